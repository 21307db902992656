"""The checks of what a job needs around the program: database, broker, folders, price. None ever raises."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from batchinfer.cli.checks import MIN_FREE_BYTES, Check, fail, ok, warn
from batchinfer.cli.console import size
from batchinfer.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Engine

    from batchinfer.settings import Settings

CONNECT_SECONDS = 3
MAX_SKEW_SECONDS = 2.0
"""Leases and schedules go by the database's clock and bear any skew; signatures of webhooks bear minutes."""


def check_database(settings: Settings) -> list[Check]:
    """Whether the database answers, has this program's schema, and workers."""
    from sqlalchemy.exc import SQLAlchemyError

    from batchinfer.db import migrate
    from batchinfer.db.session import create_db_engine

    try:
        engine = create_db_engine(settings.sqlalchemy_url)
    except (UserError, OSError) as error:
        return [fail("database", str(error), "correct BATCHINFER_DATABASE_URL")]
    shown = engine.url.render_as_string(hide_password=True)
    try:
        found, needed = migrate.current(engine), migrate.head()
        checks = [ok("database", shown), _migrations(engine, found, needed)]
        if found == needed:
            checks.append(_workers(engine, is_embedded=settings.is_embedded))
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        return [fail("database", f"{shown}: {reason}", "start it, or correct BATCHINFER_DATABASE_URL")]
    finally:
        engine.dispose()
    return checks


def _migrations(engine: Engine, found: str | None, needed: str) -> Check:
    if found == needed:
        return ok("migrations", f"at revision {needed}")
    if engine.dialect.name == "sqlite":
        return ok("migrations", f"at revision {found or 'none'}; upgraded to {needed} at the first use")
    return fail("migrations", f"at revision {found or 'none'}, this program needs {needed}", "batchinfer db upgrade")


def _workers(engine: Engine, *, is_embedded: bool) -> Check:
    from batchinfer.jobs.queries import workers_seen_since
    from batchinfer.jobs.queue_lanes import WORKER_SILENCE

    alive = workers_seen_since(engine, datetime.now(UTC) - WORKER_SILENCE)
    if alive or is_embedded:
        return ok("workers", f"{alive} alive")
    return warn("workers", "none alive: submitted jobs wait", "batchinfer worker")


def check_settings(settings: Settings) -> Check:
    """Which settings the environment gives. Names only: a URL may hold a password."""
    given = sorted(f"BATCHINFER_{name}".upper() for name in settings.model_fields_set)
    return ok("settings", ", ".join(given) if given else "all defaults")


def check_price(settings: Settings) -> Check:
    """Whether somebody has said what an hour costs."""
    text = f"${settings.usd_per_hour}/h"
    if "usd_per_hour" in settings.model_fields_set:
        return ok("price", text)
    return warn("price", f"{text} is an assumption", "set BATCHINFER_USD_PER_HOUR to what this machine costs")


def check_folder(home: Path) -> Check:
    """Whether the home folder takes files."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=home) as file:
            file.write(b"batchinfer")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return fail("home", f"{home}: {error.strerror}", "make it writable, or set BATCHINFER_HOME to another folder")
    free = shutil.disk_usage(home).free
    if free < MIN_FREE_BYTES:
        return warn("home", f"{home}: only {size(free)} free", "free some disk, or move BATCHINFER_HOME")
    return ok("home", f"{home}, {size(free)} free")


def check_broker(url: str) -> Check:
    """Whether the broker answers."""
    if url.startswith("memory://"):
        return ok("broker", "inside the worker's process (memory://)")
    from kombu.connection import Connection
    from kombu.utils.url import sanitize_url

    shown = str(sanitize_url(url))
    options = {"socket_connect_timeout": CONNECT_SECONDS, "socket_timeout": CONNECT_SECONDS}
    try:
        connect: Any = Connection
        with connect(url, connect_timeout=CONNECT_SECONDS, transport_options=options) as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=CONNECT_SECONDS)
    except Exception as error:  # noqa: BLE001 -- each transport raises its own errors
        return fail(
            "broker", f"{shown}: {error}", "start it, or correct BATCHINFER_BROKER_URL; jobs are safe meanwhile"
        )
    return ok("broker", shown)


def check_clock(settings: Settings) -> Check:
    """Whether this machine's clock is that of the database: schedules, deadlines and signatures go by both."""
    from sqlalchemy import text
    from sqlalchemy.exc import SQLAlchemyError

    from batchinfer.db.session import create_db_engine, read_transaction

    try:
        engine = create_db_engine(settings.sqlalchemy_url)
    except (UserError, OSError):
        return warn("clock", "not compared: there is no database", "mend the database first")
    try:
        if engine.dialect.name == "sqlite":
            return ok("clock", "this machine's own; the database is here")
        with read_transaction(engine) as connection:
            before = datetime.now(UTC)
            theirs = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
            after = datetime.now(UTC)
    except SQLAlchemyError:
        return warn("clock", "not compared: the database does not answer", "mend the database first")
    finally:
        engine.dispose()
    skew = (before + (after - before) / 2 - theirs).total_seconds()
    if abs(skew) - (after - before).total_seconds() / 2 > MAX_SKEW_SECONDS:
        way = "ahead of" if skew > 0 else "behind"
        text_of = f"{abs(skew):.1f} s {way} the database's"
        return fail("clock", text_of, "synchronise this machine's or the database's clock (chrony, systemd-timesyncd)")
    return ok("clock", f"within {max(abs(skew), 0.001):.3f} s of the database's")


def check_storage(uri: str) -> Check:
    """Whether a file can be written, read back and deleted under ``uri``."""
    from batchinfer.dataset.filesystem import Location

    try:
        folder = Location.parse(uri)
        folder.make_folder()
        probe = folder.child(f".batchinfer-doctor-{uuid.uuid4().hex}")
        with probe.filesystem.open_output_stream(probe.path) as stream:
            stream.write(b"batchinfer")
        is_same = probe.read_bytes() == b"batchinfer"
        probe.delete()
    except (OSError, UserError) as error:
        return fail("storage", f"{uri}: {error}", "check the path and its permissions, or AWS_* for s3://")
    if not is_same:
        return fail("storage", f"{uri}: what was read is not what was written", "do not use this storage")
    return ok("storage", f"{uri} takes files")
