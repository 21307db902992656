"""Real threads and processes on real databases."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from batchinfer.db.session import create_db_engine
from batchinfer.jobs.ledger import Ledger
from batchinfer.jobs.status import JobState
from tests.integration.ledger.drainer import drain
from tests.integration.ledger.scenario import FakeClock, Scenario, assert_books_balance

SHARDS = 40


@pytest.fixture
def planned_job(database_url):
    """A ledger with the database's own clock, and a job of forty shards of two rows."""
    engine = create_db_engine(database_url)
    ledger = Ledger(engine)
    job_id = Scenario(ledger, FakeClock()).planned(rows=2 * SHARDS, shard_rows=2)
    yield ledger, job_id
    engine.dispose()


def assert_drained_once(ledger, job_id, leased):
    assert sorted(leased) == list(range(SHARDS))
    job = ledger.get_job(job_id)
    assert job.state is JobState.FINALIZING
    assert job.counts.succeeded == 2 * SHARDS
    assert job.metered_nanos == 3 * SHARDS
    assert len(ledger.attempts(job_id)) == SHARDS
    assert_books_balance(ledger, job_id)


def test_threads_drain_each_shard_once(database_url, planned_job):
    """Four workers in one process, as with Celery's threads pool."""
    with ThreadPoolExecutor(4) as pool:
        leased = list(pool.map(lambda n: drain(database_url, f"t{n}"), range(4)))
    assert_drained_once(*planned_job, [index for one in leased for index in one])


def test_processes_drain_each_shard_once(database_url, planned_job):
    """Three workers on one database."""
    program = [sys.executable, str(Path(__file__).with_name("drainer.py")), database_url]
    children = [subprocess.Popen([*program, f"p{n}"], stdout=subprocess.PIPE, text=True) for n in range(3)]
    outputs = [child.communicate(timeout=120)[0] for child in children]
    assert [child.returncode for child in children] == [0] * 3
    assert_drained_once(*planned_job, [int(index) for out in outputs for index in out.split()])


def test_people_and_workers_at_once_end_in_a_finished_job(database_url, planned_job):
    """Pauses and resumes run against leases and commits; a deadlock or a lost update would leave the job unfinished."""
    ledger, job_id = planned_job
    is_over = threading.Event()

    def meddle() -> None:
        while not is_over.is_set():
            if ledger.get_job(job_id).state is JobState.FINALIZING:
                return
            for ask in (ledger.pause, ledger.resume):
                try:
                    ask(job_id)
                except Exception as error:  # noqa: BLE001 -- the last shard may have come between: then it is refused
                    assert getattr(error, "code", "") in ("conflict", "illegal_transition"), error

    def work(number: int) -> None:
        while ledger.get_job(job_id).state is not JobState.FINALIZING:
            drain(database_url, f"m{number}")

    with ThreadPoolExecutor(4) as pool:
        meddler = pool.submit(meddle)
        workers = [pool.submit(work, n) for n in range(2)]
        for worker in workers:
            worker.result(timeout=120)
        is_over.set()
        meddler.result(timeout=30)
    assert ledger.get_job(job_id).counts.succeeded == 2 * SHARDS
    assert_books_balance(ledger, job_id)


def test_a_database_restart_costs_nothing_but_time(postgres, postgresql_url):
    """The ledger's calls wait for the server and go on: a job must survive a failover."""
    engine = create_db_engine(postgresql_url)
    ledger = Ledger(engine, retry_seconds=60)
    job_id = Scenario(ledger, FakeClock()).planned(rows=2 * SHARDS, shard_rows=2)
    started = threading.Event()

    def work() -> list[int]:
        started.set()
        return drain(postgresql_url, "r1") + drain(postgresql_url, "r2")

    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(work)
        assert started.wait(30)
        postgres.restart()
        worker.result(timeout=120)
    job = ledger.get_job(job_id)
    assert job.counts.succeeded == 2 * SHARDS - 2 * len(ledger.attempts(job_id, running_only=True))
    assert_books_balance(ledger, job_id)
    engine.dispose()
