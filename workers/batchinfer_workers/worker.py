"""``batchinfer worker``: work until told to stop."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from celery.worker import state as celery_state

from batchinfer.jobs.dispatch import connect_dispatcher
from batchinfer.jobs.service import JobService
from batchinfer_workers.app import create_app
from batchinfer_workers.node import DRAIN_SECONDS
from batchinfer_workers.ticker import Ticker

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from celery import Celery

    from batchinfer.settings import Settings

LAST_RESORT_SECONDS = DRAIN_SECONDS + 10
_log = logging.getLogger(__name__)


def run_worker(settings: Settings, *, models: Sequence[str] | None = None, ticker_only: bool = False) -> int:
    """Work on shards of these models (None: any) until SIGTERM or SIGINT; return the exit code.

    The first signal drains: finished rows are committed, the rest of each shard goes back at once. A second one ends
    the process on the spot; leases then expire by themselves. ``ticker_only`` runs no shards: it keeps leases,
    deadlines and wake-ups going while no worker is up. Call it in the main thread.

    Raises:
        UserError: the database is not there or not up to date.
    """
    if ticker_only:
        return _run_ticker(settings)
    app = create_app(settings)
    if models is not None:
        app.batchinfer_options = replace(app.batchinfer_options, models=tuple(models))
    controller = build_controller(app)
    handle = _StopHandler(app)
    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    controller.start()
    return int(controller.exitcode or 0)


def build_controller(app: Celery) -> Any:
    """A Celery worker in this process, without Celery's own signal handlers and logging."""
    app.finalize()
    app.set_default()
    settings = app.batchinfer_options.settings
    return app.WorkController(
        hostname=f"batchinfer-{os.getpid()}@{socket.gethostname()}",
        loglevel=settings.log_level.upper(),
        pool_cls=app.conf.worker_pool,
        concurrency=app.conf.worker_concurrency,
        # workers learn of each other from the database
        without_gossip=True,
        without_mingle=True,
    )


def stop_controller() -> None:
    """Make this process's Celery worker leave its loop and stop its steps, in its own thread."""
    celery_state.should_stop = os.EX_OK


class _StopHandler:
    """First signal: drain. Second: end at once."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._is_stopping = False

    def __call__(self, signum: int, _frame: FrameType | None) -> None:
        if self._is_stopping:
            os._exit(128 + signum)
        self._is_stopping = True
        _log.warning("%s: committing finished rows and giving the rest back", signal.Signals(signum).name)
        node = getattr(self._app, "batchinfer_node", None)
        if node is not None:
            node.drain()
        stop_controller()
        # a planner or finalizer at work on a huge input is not waited for: its lease expires, another one does it
        last_resort = threading.Timer(LAST_RESORT_SECONDS, os._exit, args=(os.EX_OK,))
        last_resort.daemon = True
        last_resort.start()


def _run_ticker(settings: Settings) -> int:
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    signal.signal(signal.SIGINT, lambda *_: stopped.set())
    service = JobService.connect(settings.sqlalchemy_url, settings.broker_url)
    ticker = Ticker(service.ledger, connect_dispatcher(settings.broker_url), seconds=settings.tick_seconds)
    ticker.start()
    stopped.wait()
    ticker.close()
    service.close()
    return os.EX_OK
