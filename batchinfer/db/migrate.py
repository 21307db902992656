"""Bring a database to the newest schema."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from batchinfer.db.session import read_transaction, write_transaction

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

_PACKAGE = Path(__file__).parents[1]
# Alembic's `op` and `context` are process-wide, so two threads must not migrate at once.
_ONE_AT_A_TIME = threading.Lock()
_ADVISORY_LOCK = 0x6261_7463_6869  # "batchi"


def migrations_folder() -> Path:
    """Where the migrations are: inside the installed package, or beside it in a checkout."""
    installed = _PACKAGE / "_migrations"
    return installed if installed.is_dir() else _PACKAGE.parent / "migrations"


def head() -> str:
    """The newest revision."""
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    assert revision is not None, f"no migrations in {migrations_folder()}"
    return revision


def current(engine: Engine) -> str | None:
    """The database's revision, or None if it is empty."""
    with read_transaction(engine) as connection:
        return _revision(connection)


def upgrade(engine: Engine, revision: str = "head") -> None:
    """Migrate to ``revision``. Safe while other processes and threads do the same: one migrates, the rest find it done."""
    with _ONE_AT_A_TIME, write_transaction(engine) as connection:
        _lock(connection)
        if revision == "head" and _revision(connection) == head():
            return
        command.upgrade(_config(connection), revision)


def downgrade(engine: Engine, revision: str) -> None:
    """Migrate back to ``revision`` (``base``: drop everything)."""
    with _ONE_AT_A_TIME, write_transaction(engine) as connection:
        _lock(connection)
        command.downgrade(_config(connection), revision)


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _lock(connection: Connection) -> None:
    """Hold off other migrations until the transaction ends; SQLite's ``BEGIN IMMEDIATE`` has done so already."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config
