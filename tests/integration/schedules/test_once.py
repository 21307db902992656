"""Never twice: several tickers at once, killed and restarted ones, threads and processes, both databases."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import insert
from sqlalchemy.exc import IntegrityError

from batchinfer.db.tables import ScheduleRunRow
from batchinfer.jobs.caller import Caller
from batchinfer.jobs.schedule_firing import Firing


def assert_once(bench, num_runs):
    """Each logical date has one run, each run one job, each job one run."""
    runs = bench.service.store.runs("nightly", caller=Caller.operator(), limit=1000)
    assert len(runs) == num_runs
    assert max(Counter(run.logical_date for run in runs).values()) == 1
    jobs = [run.job_id for run in runs]
    assert None not in jobs
    assert len(set(jobs)) == num_runs
    assert {job.id for job in bench.ledger.list_jobs(limit=1000)} == set(jobs)


def test_three_tickers_at_once(bench):
    """Twenty missed hours, three threads that begin at the same moment, again and again."""
    bench.add(cron="0 * * * *", catch_up="all", max_active=100)
    bench.clock.pass_(hours=20)
    barrier = threading.Barrier(3)

    def tick(_number):
        runner = bench.runner()
        barrier.wait()
        for _ in range(4):
            runner.tick()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(tick, range(3)))
    bench.tick()
    assert_once(bench, 20)


def test_three_processes_one_of_them_killed_and_restarted(bench):
    """Whatever a ticker had claimed when it was killed is run once, by another or by itself after a restart."""
    bench.add(cron="0 * * * *", catch_up="all", max_active=100)
    bench.clock.pass_(hours=24)
    program = [sys.executable, str(Path(__file__).with_name("ticking.py")), bench.url]

    def start(now):
        return subprocess.Popen([*program, now.isoformat(), "6"])

    children = [start(bench.clock.now) for _ in range(3)]
    children[0].send_signal(signal.SIGKILL)
    children.append(start(bench.clock.now))
    codes = [child.wait(timeout=120) for child in children]
    assert codes[1:] == [0, 0, 0]
    bench.clock.pass_(minutes=2)  # a dead ticker's claim has run out
    for _ in range(4):
        bench.tick()
    assert_once(bench, 24)


def test_a_ticker_that_dies_between_claim_and_launch_loses_nothing(bench):
    """The claim runs out; then the run gets its job, and a late launch of the dead one changes nothing."""
    bench.add()
    bench.clock.pass_(days=1)
    firing = Firing(bench.engine, clock=bench.clock)
    firing.fire_due()
    (claim,) = firing.claim_all()
    assert firing.claim_all() == []
    bench.tick()
    assert bench.jobs() == [], "it is somebody's for a minute"
    bench.clock.pass_(seconds=61)
    bench.tick()
    (job,) = bench.jobs()
    late = firing.launch(claim, job.spec, "job_late")
    assert (late.is_started, late.blocked_by) == (False, ())
    assert_once(bench, 1)


def test_launching_twice_with_one_id_is_one_job(bench):
    """A commit whose word was lost: the same transaction again."""
    bench.add()
    bench.clock.pass_(days=1)
    firing = Firing(bench.engine, clock=bench.clock)
    firing.fire_due()
    (claim,) = firing.claim_all()
    spec = bench.runner()._render(claim)
    assert firing.launch(claim, spec, "job_1").is_started
    assert firing.launch(claim, spec, "job_1").is_started
    assert [job.id for job in bench.jobs()] == ["job_1"]


def test_the_database_itself_refuses_a_second_run(bench):
    schedule = bench.add()
    bench.clock.pass_(days=1)
    bench.tick()
    (run,) = bench.runs()
    values = {
        "schedule_id": schedule.id, "logical_date": run.logical_date, "run_id": "run_other", "kind": "scheduled",
        "run_state": "waiting", "try_number": 1, "look_at": bench.clock(), "created_at": bench.clock(),
    }  # fmt: skip
    with pytest.raises(IntegrityError), bench.engine.begin() as connection:
        connection.execute(insert(ScheduleRunRow).values(values))
    values["logical_date"] += timedelta(seconds=1)
    with bench.engine.begin() as connection:
        connection.execute(insert(ScheduleRunRow).values(values))
