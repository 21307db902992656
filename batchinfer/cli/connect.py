"""Settings and the job service, for commands that need them."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

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
def open_service(settings: Settings | None = None, *, shares_disk: bool | None = None) -> Iterator[JobService]:
    """The job service on the configured database. Raises UserError."""
    from batchinfer.jobs.service import JobService

    settings = settings or load_settings()
    service = JobService.connect(settings.sqlalchemy_url, settings.broker_url, shares_disk=shares_disk)
    try:
        yield service
    finally:
        service.close()


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stderr`` is at that moment: a progress bar puts itself there, to keep lines apart."""

    @property
    def stream(self) -> TextIO:
        """Where to write."""
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """What the base class chose at its creation is not wanted."""


def set_up_logs(level: str) -> None:
    """Send logs to stderr; stdout belongs to results. ``--debug`` wins over the setting."""
    context = click.get_current_context(silent=True)
    is_debug = context is not None and bool((context.find_root().obj or {}).get("debug"))
    logging.basicConfig(
        handlers=[_StderrHandler()],
        level=logging.DEBUG if is_debug else level.upper(),
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        force=True,
    )
    if not is_debug:
        # it tells of every look at the schema version, each time a process starts
        logging.getLogger("alembic").setLevel(logging.WARNING)
