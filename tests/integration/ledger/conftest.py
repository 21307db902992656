from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batchinfer.db.session import create_db_engine
from batchinfer.jobs.ledger import Ledger
from tests.integration.ledger.scenario import FakeClock, Scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = create_db_engine(database_url)
    yield engine
    engine.dispose()


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
