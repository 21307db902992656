"""Settings and the job service, for commands that need them."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import click

from batchinfer import tracing
from batchinfer.cli.redact import JsonFormatter, RedactingFormatter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchinfer.cli.local import LocalDoor
    from batchinfer.client.client import Client
    from batchinfer.jobs.door import JobDoor
    from batchinfer.jobs.service import JobService
    from batchinfer.settings import Settings


def load_settings(**overrides: object) -> Settings:
    """Settings out of the environment; ``overrides`` that are None change nothing. Raises UserError."""
    from batchinfer.settings import Settings

    return Settings.load(**{key: value for key, value in overrides.items() if value is not None})


@contextmanager
def open_service(settings: Settings | None = None, *, shares_disk: bool | None = None) -> Iterator[JobService]:
    """The job service on the configured database. Raises UserError."""
    from batchinfer.jobs.installed_roots import InstalledRoots
    from batchinfer.jobs.service import JobService

    settings = settings or load_settings()
    tracing.start(settings.otlp_endpoint, "batchinfer")
    roots = InstalledRoots(settings.input_roots, settings.output_roots, settings.model_roots, settings.files_folder)
    service = JobService.connect(settings.sqlalchemy_url, settings.broker_url, shares_disk=shares_disk, roots=roots)
    try:
        yield service
    finally:
        service.close()


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--server`` and ``--api-key``; :func:`open_jobs` and :func:`open_door` read them."""
    server = click.option(
        "--server", envvar="BATCHINFER_SERVER", metavar="URL", expose_value=False, callback=_remember,
        help="A server elsewhere, instead of a database of one's own (BATCHINFER_SERVER).",
    )  # fmt: skip
    api_key = click.option(
        "--api-key", envvar="BATCHINFER_API_KEY", metavar="KEY", expose_value=False, callback=_remember,
        help="Key for --server (BATCHINFER_API_KEY; the environment keeps it out of the process list).",
    )  # fmt: skip
    return server(api_key(command))


def _remember(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    ctx.meta[f"batchinfer.{param.name}"] = value


def log_format_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--log-format``."""
    return click.option(
        "--log-format", type=click.Choice(["text", "json"]), help="How log lines are written (BATCHINFER_LOG_FORMAT)."
    )(command)


@contextmanager
def open_jobs() -> Iterator[JobDoor]:
    """Jobs on the server that was named, else in the configured database. Raises UserError."""
    if is_remote():
        with open_client() as client:
            yield client
    else:
        with open_service() as service:
            yield service


@contextmanager
def open_door() -> Iterator[LocalDoor | Client]:
    """Everything beside jobs, on the server that was named, else in the configured database. Raises UserError."""
    if is_remote():
        with open_client() as client:
            yield client
        return
    from batchinfer.cli.local import LocalDoor

    settings = load_settings()
    with open_service(settings) as service:
        yield LocalDoor(service, settings)


def is_remote() -> bool:
    """Whether the command goes to a server."""
    return bool(click.get_current_context().meta.get("batchinfer.server"))


@contextmanager
def open_client() -> Iterator[Client]:
    """The server that was named."""
    from batchinfer.client.client import Client

    meta = click.get_current_context().meta
    with Client(meta["batchinfer.server"], meta.get("batchinfer.api_key")) as client:
        yield client


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stderr`` is at that moment: a progress bar puts itself there, to keep lines apart."""

    @property
    def stream(self) -> TextIO:
        """Where to write."""
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """What the base class chose at its creation is not wanted."""


def set_up_logs(level: str, log_format: str = "text") -> None:
    """Send logs to stderr; stdout belongs to results. ``--debug`` wins over the setting."""
    context = click.get_current_context(silent=True)
    is_debug = context is not None and bool((context.find_root().obj or {}).get("debug"))
    handler = _StderrHandler()
    as_text = RedactingFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else as_text)
    logging.basicConfig(
        handlers=[handler],
        level=logging.DEBUG if is_debug else level.upper(),
        force=True,
    )
    if not is_debug:
        # it tells of every look at the schema version, each time a process starts
        logging.getLogger("alembic").setLevel(logging.WARNING)
