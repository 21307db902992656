from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import delete, event

from batchinfer.db.session import create_db_engine
from batchinfer.db.tables import Base
from batchinfer.jobs.ledger import Ledger
from tests.integration.ledger.scenario import FakeClock, Scenario

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy import Engine


@pytest.fixture(scope="session")
def sqlite_shared(sqlite_template: Path) -> Iterator[Engine]:
    """A migrated SQLite database that the ledger's tests use one after the other."""
    engine = create_db_engine(f"sqlite:///{sqlite_template.with_name('shared.db')}")
    sqlite_template.with_name("shared.db").write_bytes(sqlite_template.read_bytes())
    # no power cut is tested here, and the disk's fsync is most of the time of a small transaction
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF").close())
    yield engine
    engine.dispose()


@pytest.fixture(params=["sqlite", "postgres"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """An engine on an empty database, SQLite and PostgreSQL; shared, since a new engine compiles all statements anew."""
    engine: Engine = request.getfixturevalue(f"{request.param}_shared")
    with engine.begin() as connection:
        for table in reversed(Base.metadata.sorted_tables):
            connection.execute(delete(table))
    return engine


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def ledger(engine: Engine, clock: FakeClock) -> Ledger:
    """A ledger on each database, with a clock that stands still."""
    return Ledger(engine, clock=clock)


@pytest.fixture
def story(ledger: Ledger, clock: FakeClock) -> Scenario:
    return Scenario(ledger, clock)
