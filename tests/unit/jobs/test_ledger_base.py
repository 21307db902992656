"""Which database errors are worth another try."""

from __future__ import annotations

import sqlite3

import psycopg
import pytest
from psycopg import errors
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from batchinfer.db.session import create_db_engine
from batchinfer.jobs.ledger import Ledger
from batchinfer.jobs.ledger_base import is_transient


def wrapped(original: Exception, *, kind: type[DBAPIError] = OperationalError, lost: bool = False) -> DBAPIError:
    return kind("SELECT 1", {}, original, connection_invalidated=lost)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (wrapped(errors.DeadlockDetected("deadlock detected")), True),
        (wrapped(errors.SerializationFailure("could not serialize")), True),
        (wrapped(errors.AdminShutdown("terminating connection")), True),
        (wrapped(errors.CannotConnectNow("the database system is starting up")), True),
        (wrapped(errors.TooManyConnections("too many clients")), True),
        (wrapped(errors.ConnectionFailure("gone")), True),
        (wrapped(psycopg.OperationalError("connection refused")), True),
        (wrapped(psycopg.InterfaceError("connection is closed"), kind=DBAPIError, lost=True), True),
        (wrapped(sqlite3.OperationalError("database is locked")), True),
        (wrapped(sqlite3.OperationalError("no such table: jobs")), False),
        (wrapped(sqlite3.OperationalError("disk I/O error")), False),
        (wrapped(errors.UniqueViolation("duplicate key"), kind=IntegrityError), False),
        (wrapped(errors.UndefinedTable("no table jobs"), kind=DBAPIError), False),
        (wrapped(errors.DiskFull("no space left")), False),
        (wrapped(sqlite3.IntegrityError("UNIQUE constraint failed: locked"), kind=IntegrityError), False),
    ],
)
def test_only_errors_that_may_pass_are_tried_again(error, expected):
    """A full disk or a missing table does not mend itself; a restart, a deadlock and a busy file do."""
    assert is_transient(error) is expected


def test_a_transaction_is_run_again_until_it_passes(tmp_path):
    ledger = Ledger(create_db_engine(f"sqlite:///{tmp_path / 'x.db'}"), retry_seconds=30)
    outcomes = iter([wrapped(errors.DeadlockDetected()), wrapped(sqlite3.OperationalError("database is locked")), None])
    runs = []

    def work(_connection, _now):
        runs.append(1)
        if (outcome := next(outcomes)) is not None:
            raise outcome
        return "done"

    assert ledger._write(work) == "done"
    assert len(runs) == 3


def test_it_gives_up_when_its_time_is_over(tmp_path):
    ledger = Ledger(create_db_engine(f"sqlite:///{tmp_path / 'x.db'}"), retry_seconds=0)

    def work(_connection, _now):
        raise wrapped(errors.DeadlockDetected("again"))

    with pytest.raises(OperationalError, match="again"):
        ledger._write(work)
