"""Engines that die or hang, rows that kill them, and what people do in mid-run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from batchinfer.errors import DeviceUnhealthyError
from batchinfer.jobs.status import AttemptState, JobState, Outcome
from batchinfer.money import usd_to_nanos
from batchinfer_workers import device_health
from tests.fakes import answer

from .conftest import prompts


def slow(count, seconds=0.01):
    return [f"SLEEP:{seconds} {row}" for row in range(count)]


def when(condition, action):
    """A progress callback that acts once."""
    done = []

    def on_progress(progress):
        if not done and condition(progress):
            done.append(True)
            action()

    return on_progress


def committed(count):
    return lambda progress: progress.job.counts.total >= count


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("poison", ["CRASH 13", "SEGFAULT 13", "RAISE 13"])
def test_a_row_that_kills_the_engine_is_one_error_row(bench, poison):
    """The row that ends the engine each time it runs is found, named worker_lost, and every other row succeeds."""
    job_id = bench.submit(prompts(60, {13: poison}), shard_rows=20, max_attempts=2)
    job = bench.run(job_id)
    assert (job.state, job.outcome) == (JobState.COMPLETED, Outcome.PARTIAL)
    assert (job.counts.succeeded, job.counts.errored) == (59, 1)
    bench.check(job_id)
    rows = bench.rows(job_id)
    assert rows[13]["error"]["code"] == "worker_lost"
    assert all(row["output"] == answer(f"row {row['row_index']}") for row in rows if row["row_index"] != 13)


def test_a_row_that_hangs_the_engine_is_one_error_row(bench):
    """No progress is as bad as a crash: the watchdog ends the engine, and the row is found."""
    job_id = bench.submit(prompts(4, {2: "HANG"}), max_attempts=1)
    job = bench.run(job_id, stall_seconds=0.5)
    assert (job.counts.succeeded, job.counts.errored) == (3, 1)
    bench.check(job_id)
    assert bench.rows(job_id)[2]["error"]["code"] == "worker_lost"


def test_an_engine_that_dies_once_costs_nothing_but_time(bench, monkeypatch):
    """A crash that does not come back: all rows succeed, and what was computed in vain is overhead, not lost money."""
    monkeypatch.setenv("CRASH_FILE", str(bench.folder / "crashed"))
    rows = slow(60)
    rows[40] = "CRASH-ONCE"
    job_id = bench.submit(rows, shard_rows=30)
    job = bench.run(job_id)
    assert (job.outcome, job.counts.succeeded) == (Outcome.SUCCEEDED, 60)
    bench.check(job_id)
    assert any(attempt.state is AttemptState.FAILED for attempt in bench.ledger.attempts(job_id))


def test_interrupt_keeps_finished_rows_and_a_later_run_goes_on(bench):
    """Ctrl-C drains: what is finished is committed, nothing stays leased, and no finished row runs again."""
    job_id = bench.submit(slow(120, 0.03), shard_rows=40)
    with pytest.raises(KeyboardInterrupt):
        bench.run(job_id, when(committed(20), interrupt))
    between = bench.ledger.get_job(job_id)
    assert between.state is JobState.IN_PROGRESS
    assert 20 <= between.counts.succeeded < 120
    assert not bench.ledger.attempts(job_id, running_only=True)
    first_calls = bench.calls()
    job = bench.run(job_id)
    assert job.counts.succeeded == 120
    bench.check(job_id)
    twice = [prompt for prompt, count in bench.calls().items() if count > 1]
    assert len(twice) == sum(first_calls.values()) - between.counts.succeeded, "only unfinished rows ran again"


def test_cancel_keeps_what_is_finished(bench):
    """Rows that ended keep their outcome and their cost; the rest is cancelled, unrun."""
    job_id = bench.submit(slow(200), shard_rows=50)
    job = bench.run(job_id, when(committed(30), lambda: bench.ledger.cancel(job_id)))
    assert (job.state, job.outcome) == (JobState.CANCELLED, Outcome.PARTIAL)
    assert job.counts.succeeded >= 30
    assert job.counts.cancelled == 200 - job.counts.succeeded > 0
    bench.check(job_id)
    assert job.metered_nanos > 0


def test_a_deadline_in_mid_run_expires_the_rest(bench):
    job_id = bench.submit(slow(400, 0.02), shard_rows=50, deadline=datetime.now(UTC) + timedelta(seconds=3))
    job = bench.run(job_id)
    assert (job.state, job.outcome) == (JobState.EXPIRED, Outcome.PARTIAL)
    assert job.counts.succeeded > 0
    assert job.counts.expired == 400 - job.counts.succeeded > 0
    bench.check(job_id)
    assert {row["error"]["code"] for row in bench.rows(job_id) if row["status"] == "expired"} == {"deadline_exceeded"}


def test_pause_holds_and_resume_goes_on(bench):
    """A paused job is left alone by its worker, which returns; resumed, it ends with each row once."""
    job_id = bench.submit(slow(400), shard_rows=50)
    job = bench.run(job_id, when(committed(10), lambda: bench.ledger.pause(job_id)))
    assert job.state is JobState.PAUSED
    assert not bench.ledger.attempts(job_id, running_only=True)
    bench.ledger.resume(job_id)
    job = bench.run(job_id)
    assert (job.state, job.counts.succeeded) == (JobState.COMPLETED, 400)
    bench.check(job_id)


def test_a_budget_stops_the_job_and_a_higher_one_lets_it_go_on(bench):
    """Spent budgets hold the job: an outcome to be resumed, not an error that retries and spends."""
    # ten steps a row are 10,000 nano-dollars, so 200 rows are four budgets, however soon the engine is loaded
    rows = [f"WAIT:9 {prompt}" for prompt in slow(200)]
    job_id = bench.submit(rows, shard_rows=20, budget_usd="0.0005")
    job = bench.run(job_id)
    assert job.state is JobState.BUDGET_EXHAUSTED
    assert job.cost_nanos >= usd_to_nanos("0.0005")
    assert job.counts.succeeded < 200
    calls = bench.calls()
    assert bench.run(job_id).state is JobState.BUDGET_EXHAUSTED
    assert bench.calls() == calls, "a held job spends nothing"
    bench.ledger.resume(job_id, budget_nanos=usd_to_nanos(10))
    assert bench.run(job_id).state is JobState.COMPLETED
    bench.check(job_id)


def test_retry_runs_the_failed_rows_and_no_others(bench):
    """Three failed rows of ten: exactly three calls, and the other seven answers stay as they were."""
    failing = {1: "ERROR a", 4: "ERROR b", 8: "ERROR c"}
    job_id = bench.submit(prompts(10, failing), shard_rows=4)
    assert bench.run(job_id).counts.errored == 3
    before, calls = bench.rows(job_id), bench.calls()
    assert bench.ledger.retry(job_id) == 3
    job = bench.run(job_id)
    assert (job.counts.errored, job.counts.succeeded) == (3, 7)
    bench.check(job_id)
    assert bench.calls() - calls == dict.fromkeys(failing.values(), 1)
    kept = [row for row in bench.rows(job_id) if row["row_index"] not in failing]
    assert kept == [row for row in before if row["row_index"] not in failing]


@pytest.mark.parametrize("output", ["folder", "one.parquet"])
def test_retry_after_the_cause_is_gone_makes_the_job_whole(bench, output):
    """Rows cut off by a cancel run on a retry; the output is whole afterwards, whatever its form."""
    job_id = bench.submit(slow(90, 0.05), shard_rows=30, output=str(bench.folder / output))
    job = bench.run(job_id, when(committed(10), lambda: bench.ledger.cancel(job_id)))
    assert job.state is JobState.CANCELLED
    left = job.counts.cancelled
    bench.check(job_id)
    assert bench.ledger.retry(job_id) == left > 0
    job = bench.run(job_id)
    assert (job.state, job.outcome, job.counts.succeeded) == (JobState.COMPLETED, Outcome.SUCCEEDED, 90)
    bench.check(job_id)


def test_a_device_that_is_not_well_costs_no_row_and_its_worker_waits_for_it(bench, monkeypatch, caplog):
    """A fault of the hardware: rows go back unblamed, the worker says so and takes none until a probe is answered."""
    monkeypatch.setenv("CRASH_FILE", str(bench.folder / "failed"))
    monkeypatch.setattr(device_health, "PROBE_SECONDS", 0.3)
    probes = []

    def probe(_device):
        assert not bench.ledger.attempts(job_id, running_only=True), "no shard runs on a device that is not well"
        probes.append(bench.ledger.list_workers()[0].stats.get("device_fault"))
        return "still no answer" if len(probes) == 1 else None

    monkeypatch.setattr(device_health, "probe_device", probe)
    rows = slow(60)
    rows[40] = "ECC-ONCE"
    job_id = bench.submit(rows, shard_rows=30, max_attempts=1)
    job = bench.run(job_id)
    assert (job.outcome, job.counts.succeeded) == (Outcome.SUCCEEDED, 60)
    bench.check(job_id)
    attempts = {attempt.id: attempt for attempt in bench.ledger.attempts(job_id)}
    states = {attempt.state for attempt in attempts.values()}
    assert states == {AttemptState.RELEASED, AttemptState.COMMITTED}, "nobody is blamed"
    told = [event.data for event in bench.ledger.events(job_id) if event.kind == "device_failed"]
    released = [attempt for attempt in attempts.values() if attempt.state is AttemptState.RELEASED]
    assert {data["attempt"] for data in told} == {attempt.id for attempt in released} != set()
    for data in told:
        attempt = attempts[data["attempt"]]
        assert (data["worker"], data["reason"]) == (attempt.worker_id, attempt.error)
        assert "uncorrectable ECC" in data["reason"]
        line = f"attempt {attempt.id} of shard {data['shard']} of {job_id} gives its rows back: {data['reason']}"
        assert line in caplog.messages
    assert len(probes) == 2
    assert "uncorrectable ECC" in probes[1]["reason"]


def test_a_run_gives_up_on_a_device_that_stays_ill(bench, monkeypatch):
    monkeypatch.setenv("CRASH_FILE", str(bench.folder / "failed"))
    monkeypatch.setattr("batchinfer_workers.embedded.ILL_SECONDS", 1.0)
    monkeypatch.setattr(device_health, "probe_device", lambda _device: "no answer")
    job_id = bench.submit(["ECC-ONCE", *slow(5)])
    with pytest.raises(DeviceUnhealthyError, match="finished rows are kept"):
        bench.run(job_id)
    job = bench.ledger.get_job(job_id)
    assert (job.state, job.counts.errored) == (JobState.IN_PROGRESS, 0)
    assert bench.run(job_id).counts.succeeded == 6
