"""Engines for SQLite and PostgreSQL, and the two ways to open a transaction on them."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from batchinfer.errors import InvalidSpecError

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from sqlalchemy import Engine

BUSY_TIMEOUT_S = 30.0
"""How long a SQLite statement waits for another process's write transaction."""

POSTGRESQL_OPTIONS = {
    "connect_timeout": 10,
    # a worker that is frozen (SIGSTOP, a swapping machine) inside a transaction keeps its row locks, and with them
    # everybody else, for as long as it sleeps: the server ends such a session; its statements run again later
    "options": "-c idle_in_transaction_session_timeout=10s",
    # a server that is gone without a word is noticed within half a minute
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}

POOL = {"pool_size": 10, "max_overflow": 20}
"""More connections than threads that poll: one above ``pool_size`` is opened and closed each time, even to a file."""

READ_ONLY = {"batchinfer_read_only": True}


def create_db_engine(url: str | URL) -> Engine:
    """Make an engine for ``sqlite:///path`` or ``postgresql://...``; no connection is opened yet.

    SQLite runs in WAL mode with a busy timeout, and its write transactions begin with ``BEGIN IMMEDIATE``: a
    transaction that reads and then writes can otherwise fail half way, where no timeout helps. Pooled connections are
    tested before use, so that a database restart costs nothing but the statements that ran in it.

    Raises:
        InvalidSpecError: the URL is malformed or names another database.
    """
    parsed = _parse(url)
    if parsed.get_backend_name() == "sqlite":
        return _create_sqlite(parsed)
    # READ COMMITTED, the default: the ledger's statements compare and set, and lock what they read before
    return create_engine(parsed, pool_pre_ping=True, **POOL, connect_args=POSTGRESQL_OPTIONS)


def _parse(url: str | URL) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise InvalidSpecError(
            f"database URL {url!r} is not a URL; use sqlite:///path or postgresql://user@host/name",
            param="database_url",
        ) from None
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise InvalidSpecError(
            f"database {parsed.get_backend_name()!r} is not supported; use sqlite or postgresql", param="database_url"
        )
    return parsed


def _create_sqlite(url: URL) -> Engine:
    if not url.database or url.database == ":memory:":
        raise InvalidSpecError(
            "a SQLite database in memory would be lost with its connection; give a file: sqlite:///path",
            param="database_url",
        )
    Path(url.database).expanduser().parent.mkdir(parents=True, exist_ok=True)
    url = url.set(database=str(Path(url.database).expanduser()))
    # autocommit at the driver, so that BEGIN is ours to say
    engine = create_engine(url, **POOL, connect_args={"timeout": BUSY_TIMEOUT_S, "isolation_level": None})
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: sqlite3.Connection, _record: Any) -> None:
    """Set what a new connection needs. Two processes that switch a new file to WAL at once wait for each other."""
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")
    if cursor.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        cursor.execute("PRAGMA journal_mode = WAL")
    # FULL: a committed part must survive a power cut as its file does
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    if connection.get_execution_options().get("batchinfer_read_only", False):
        # not through SQLAlchemy, which takes as long as a query for it; a plain BEGIN locks nothing and cannot fail
        driver: Any = connection.connection.driver_connection
        driver.execute("BEGIN")
    else:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def write_transaction(engine: Engine) -> AbstractContextManager[Connection]:
    """Open a transaction that may write; commits at the end, rolls back on an exception."""
    return engine.begin()


@contextmanager
def read_transaction(source: Engine | Connection) -> Iterator[Connection]:
    """Open a transaction that only reads: on SQLite it neither waits for a writer nor holds one up.

    With a connection it is the one that is open there: what several functions read is then read at once.
    """
    if isinstance(source, Connection):
        yield source
        return
    # the option is the connection's: an engine with it, made each time, would cost more than a small query
    with source.connect().execution_options(**READ_ONLY) as connection, connection.begin():
        yield connection
