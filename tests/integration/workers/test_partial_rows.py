"""Rows that a drained or a killed worker leaves behind go on from their tokens; tokens are billed once, lost work too."""

import signal
import time
from pathlib import Path

import pytest

from batchinfer.errors import FencedError
from batchinfer.jobs.status import AttemptState, JobState
from batchinfer.money import nanos_to_usd
from tests.fakes import STEP_NS
from tests.processes import Process

STEPS = 120
ROW = f"WAIT:{STEPS - 1} PACE:0.02"
NANOS_A_STEP = 1000  # at 3.60 dollars an hour


def wait_for(condition):
    """Another process is at work: look until it is so far."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.02)


def check_bill(bench, job_id, row, num_tokens):
    """The row went on; what the first attempt had done for it is lost work, and the sums are exact."""
    job = bench.check(job_id)
    steps = int(row["cost_usd"].scaleb(9)) // NANOS_A_STEP
    assert 0 < steps < STEPS, "the row did not begin again"
    assert row["usage"]["completion_tokens"] == job.usage.completion_tokens == num_tokens
    first, *_ = bench.ledger.attempts(job_id)
    assert first.metered_ns > 0
    cost = bench.ledger.cost_report(job_id)
    assert cost.overhead_nanos["lost"] == first.metered_ns * NANOS_A_STEP // STEP_NS
    assert cost.total_nanos == cost.rows_nanos + sum(cost.overhead_nanos.values()) == job.cost_nanos
    assert nanos_to_usd(cost.rows_nanos) == row["cost_usd"]
    return steps + first.metered_ns // STEP_NS


def test_a_drained_workers_rows_go_on(bench):
    job_id = bench.submit([ROW], file="in.parquet")

    def drain(_progress):
        if bench.calls():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run(job_id, drain)
    assert bench.ledger.get_job(job_id).state is JobState.IN_PROGRESS
    assert list(Path(bench.folder).rglob("progress-*"))
    assert bench.run(job_id).state is JobState.COMPLETED
    (row,) = bench.rows(job_id)
    assert row["output"] == " ".join(reversed(ROW.split()))
    assert check_bill(bench, job_id, row, 2) >= STEPS, "no step was left out"
    assert not list(Path(bench.folder).rglob("progress-*")), "swept with the parts"


def test_a_killed_workers_rows_go_on(bench, tmp_path):
    """SIGKILL: what it had saved last counts."""
    job_id = bench.submit([ROW])
    settings = {
        "database_url": bench.database_url, "usd_per_hour": "3.60", "lease_seconds": 2, "heartbeat_seconds": 0.1,
        "tick_seconds": 0.1, "checkpoint_seconds": 0.2,
    }  # fmt: skip
    with Process("worker", **settings) as worker:
        wait_for(lambda: list(tmp_path.rglob("progress-*-00003.part")))
        worker.send(signal.SIGKILL)
        worker.wait()
    assert bench.run(job_id).state is JobState.COMPLETED
    (row,) = bench.rows(job_id)
    check_bill(bench, job_id, row, 2)
    states = [attempt.state for attempt in bench.ledger.attempts(job_id)]
    assert states == [AttemptState.LOST, AttemptState.COMMITTED]


def test_a_fenced_attempt_leaves_nothing_behind(bench, tmp_path):
    """What a zombie would save is refused: the next attempt does not see it."""
    job_id = bench.submit(["a"])
    bench.run(job_id)
    (attempt,) = bench.ledger.attempts(job_id)
    with pytest.raises(FencedError):
        bench.ledger.note_progress(attempt.id, str(tmp_path / "late"))
