"""Engines."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from batchinfer.db.session import create_db_engine, read_transaction, write_transaction
from batchinfer.errors import InvalidSpecError


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("not a url", "not a URL"),
        ("mysql://host/db", "'mysql' is not supported"),
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
    ],
)
def test_other_databases_are_refused_in_one_sentence(url, problem):
    with pytest.raises(InvalidSpecError, match=problem) as caught:
        create_db_engine(url)
    assert caught.value.param == "database_url"


def test_sqlite_makes_its_folder_and_runs_in_wal_mode(tmp_path):
    engine = create_db_engine(f"sqlite:///{tmp_path / 'new' / 'folder' / 'x.db'}")
    with engine.connect() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 30_000}
    engine.dispose()


def test_readers_neither_wait_for_a_writer_nor_hold_one_up(sqlite_url):
    """A poll of the status must not stop a worker's commit, nor wait for it."""
    engine = create_db_engine(sqlite_url)
    with read_transaction(engine) as reader:
        assert reader.execute(text("SELECT count(*) FROM workers")).scalar_one() == 0
        with write_transaction(engine) as writer:
            writer.execute(text("DELETE FROM workers"))
            with read_transaction(engine) as other:
                assert other.execute(text("SELECT count(*) FROM workers")).scalar_one() == 0
    engine.dispose()


def test_a_write_transaction_locks_from_its_first_moment(sqlite_url):
    """Else two transactions could both read, and one fail when it writes: BEGIN IMMEDIATE."""
    engine = create_db_engine(sqlite_url)
    impatient = create_db_engine(sqlite_url)
    with write_transaction(engine), impatient.connect() as other:
        other.rollback()
        with pytest.raises(OperationalError, match="locked"):
            raw = other.connection.driver_connection
            raw.execute("PRAGMA busy_timeout = 0")
            other.rollback()
            other.execute(text("SELECT 1"))
    impatient.dispose()
    engine.dispose()


def test_writers_queue_up_instead_of_failing(sqlite_url):
    engine = create_db_engine(sqlite_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE counter (n int)"))
        connection.execute(text("INSERT INTO counter VALUES (0)"))

    def count() -> None:
        for _ in range(25):
            with write_transaction(engine) as connection:
                n = connection.execute(text("SELECT n FROM counter")).scalar_one()
                connection.execute(text("UPDATE counter SET n = :n"), {"n": n + 1})

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with engine.connect() as connection:
        assert connection.execute(text("SELECT n FROM counter")).scalar_one() == 100
    engine.dispose()


def test_importing_the_database_layer_opens_nothing():
    """Nothing may be connected before a fork; and torch has no business here."""
    program = (
        "import sys, batchinfer.db.migrate, batchinfer.jobs.ledger\n"
        "engine = batchinfer.db.session.create_db_engine('postgresql://nobody@127.0.0.1:1/none')\n"
        "assert engine.pool.checkedin() == 0\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
