"""The REST API as an ASGI app."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

from batchinfer import __version__
from batchinfer.api.access import Access, AccessMiddleware, Gate
from batchinfer.api.dashboard import fleet_pages, job_pages
from batchinfer.api.dashboard.kept_series import KeptSeries
from batchinfer.api.device_speeds import no_table
from batchinfer.api.errors import install_error_handlers
from batchinfer.api.metrics import MetricsMiddleware, ServerMetrics
from batchinfer.api.middleware import BodyLimitMiddleware, RequestIdMiddleware
from batchinfer.api.poll_middleware import PollMiddleware
from batchinfer.api.polling import Poller
from batchinfer.api.rate_limit import RateLimitMiddleware, choose_buckets
from batchinfer.api.routes import (
    batches,
    files,
    foresight,
    health,
    job_events,
    jobs,
    keys,
    models,
    money,
    results,
    schedules,
    tenants,
    webhooks,
    workers,
)
from batchinfer.api.schemas import COMMON_ERRORS
from batchinfer.jobs.files import FileStore
from batchinfer.jobs.installed_roots import InstalledRoots
from batchinfer.jobs.service import JobService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from batchinfer.api.device_speeds import DeviceSpeeds
    from batchinfer.settings import Settings

MAX_BODY_BYTES = 1024 * 1024
"""A job description is small; prompts are in files."""

_DESCRIPTION = """Batch inference over Parquet files. Submit a job, poll it, fetch its results.

Every error is `{"error": {"message", "type", "param", "code"}}`. Amounts are decimal text in US dollars."""


def create_app(
    settings: Settings,
    *,
    service: JobService | None = None,
    access: Access = Access.LOOPBACK,
    max_body_bytes: int = MAX_BODY_BYTES,
    device_speeds: DeviceSpeeds = no_table,
    now: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """Make the API. Nothing is connected until it starts, unless a ``service`` is given.

    ``access`` says who is let in without a key, ``device_speeds`` how fast devices are that no job has run on.
    """
    buckets = choose_buckets(settings.broker_url)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        roots = InstalledRoots(settings.input_roots, settings.output_roots, settings.model_roots, settings.files_folder)
        app.state.service = service or JobService.connect(settings.sqlalchemy_url, settings.broker_url)
        app.state.service.roots = roots
        app.state.files = FileStore(app.state.service.ledger, settings.files_folder, max_bytes=settings.max_file_bytes)
        app.state.settings = settings
        app.state.poller = Poller()
        yield
        await buckets.close()
        if service is None:
            app.state.service.close()

    app = FastAPI(title="batchinfer", version=__version__, description=_DESCRIPTION, lifespan=lifespan)
    for noun in (
        jobs,
        foresight,
        job_events,
        results,
        files,
        batches,
        schedules,
        models,
        money,
        workers,
        keys,
        tenants,
        webhooks,
        health,
    ):
        app.include_router(noun.router, responses=COMMON_ERRORS)
    for pages in (job_pages, fleet_pages):
        app.include_router(pages.router)
    app.state.series = KeptSeries()
    app.state.device_speeds = device_speeds
    app.state.metrics = ServerMetrics(lambda: app.state.service)
    install_error_handlers(app)
    # the last one added is the outermost
    app.add_middleware(PollMiddleware, service=lambda: app.state.service, poller=lambda: app.state.poller)
    app.add_middleware(BodyLimitMiddleware, max_bytes=max_body_bytes, streamed=[files.UPLOAD])
    app.add_middleware(RateLimitMiddleware, buckets=buckets, default=settings.rate_per_minute)
    app.add_middleware(AccessMiddleware, gate=Gate(lambda: app.state.service, access, now))
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(MetricsMiddleware, metrics=app.state.metrics)
    return app
