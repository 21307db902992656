"""``db``: the database's schema."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from batchinfer.cli.connect import load_settings
from batchinfer.cli.console import print_json
from batchinfer.cli.exit_codes import ExitCode
from batchinfer.cli.options import json_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine


@contextmanager
def _engine() -> Iterator[Engine]:
    from batchinfer.db.session import create_db_engine

    engine = create_db_engine(load_settings().sqlalchemy_url)
    try:
        yield engine
    finally:
        engine.dispose()


def _shown(engine: Engine) -> str:
    """The URL without its password."""
    return engine.url.render_as_string(hide_password=True)


@click.group("db")
def db_command() -> None:
    """Create, upgrade and inspect the database.

    BATCHINFER_DATABASE_URL says which; the default is SQLite in BATCHINFER_HOME, which upgrades itself.
    """


@db_command.command("upgrade")
@json_option
def upgrade_command(as_json: bool) -> None:
    """Bring the database to the schema of this program; safe to run again."""
    from batchinfer.db import migrate

    with _engine() as engine:
        before = migrate.current(engine)
        migrate.upgrade(engine)
        after = migrate.current(engine)
    if as_json:
        print_json({"database": _shown(engine), "before": before, "revision": after})
    else:
        did = "is up to date" if before == after else f"upgraded from {before or 'empty'}"
        click.echo(f"{_shown(engine)}: {did}, at revision {after}")


@db_command.command("current")
@json_option
def current_command(as_json: bool) -> ExitCode:
    """Say which schema the database has; exit code 1 if it is not this program's."""
    from batchinfer.db import migrate

    with _engine() as engine:
        found, needed = migrate.current(engine), migrate.head()
    if as_json:
        print_json({"database": _shown(engine), "revision": found, "head": needed, "is_current": found == needed})
    else:
        advice = "" if found == needed else f"; this program needs {needed}: run `batchinfer db upgrade`"
        click.echo(f"{_shown(engine)}: revision {found or 'none'}{advice}")
    return ExitCode.OK if found == needed else ExitCode.FAILED
