"""Settings and the job service, for commands that need them."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchinfer.jobs.service import JobService
    from batchinfer.settings import Settings


def load_settings(**overrides: object) -> Settings:
    """Settings out of the environment; ``overrides`` that are None change nothing. Raises UserError."""
    from batchinfer.settings import Settings

    return Settings.load(**{key: value for key, value in overrides.items() if value is not None})


@contextmanager
def open_service(settings: Settings | None = None) -> Iterator[JobService]:
    """The job service on the configured database. Raises UserError."""
    from batchinfer.jobs.service import JobService

    settings = settings or load_settings()
    service = JobService.connect(settings.sqlalchemy_url, settings.broker_url)
    try:
        yield service
    finally:
        service.close()


def set_up_logs(level: str) -> None:
    """Send logs to stderr; stdout belongs to results. ``--debug`` wins over the setting."""
    context = click.get_current_context(silent=True)
    is_debug = context is not None and bool((context.find_root().obj or {}).get("debug"))
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if is_debug else level.upper(),
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        force=True,
    )
