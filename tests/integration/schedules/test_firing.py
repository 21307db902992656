"""When runs are made, and what becomes of them, on SQLite and PostgreSQL."""

from datetime import UTC, datetime, timedelta

import pytest

from batchinfer.dataset.roots import Roots
from batchinfer.errors import ConflictError, InvalidSpecError, NotFoundError
from batchinfer.jobs.caller import Caller, Role
from batchinfer.jobs.dispatch import NullDispatcher
from batchinfer.jobs.schedule_firing import Firing
from batchinfer.jobs.schedule_records import RunState
from batchinfer.jobs.schedule_runner import ScheduleRunner
from batchinfer.jobs.schedule_spec import ScheduleSpec
from batchinfer.jobs.status import JobState


def utc(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def dates(runs):
    return [run.logical_date for run in runs]


def test_a_due_moment_becomes_one_job(bench):
    """Nothing before its time; then a job with the rendered paths; nothing more until the next day."""
    bench.add(
        tz="Europe/Istanbul",
        job={"output": str(bench.folder / "out-{{ logical_date }}"), "tags": {"d": "{{ logical_date }}"}},
    )
    bench.clock.now = utc("2026-01-01T23:29:59")
    bench.tick()
    assert bench.jobs() == []
    bench.clock.pass_(seconds=1)
    for _ in range(3):
        bench.tick()
    (job,) = bench.jobs()
    assert job.output == str(bench.folder / "out-2026-01-02")
    assert job.tags == {"schedule": "nightly", "d": "2026-01-02"}
    assert (job.name, job.state) == ("nightly", JobState.VALIDATING)
    (run,) = bench.runs()
    assert (run.state, run.job_id, run.logical_date) == ("running", job.id, utc("2026-01-01T23:30"))
    bench.complete(job.id)
    bench.tick()
    (run,) = bench.runs()
    assert (run.state, run.job_state, run.job_outcome) == ("done", "completed", "succeeded")
    view = bench.service.get("nightly")
    assert view.next_runs[0] == utc("2026-01-02T23:30")
    assert view.last_run == run


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("none", []),
        ("latest", [utc("2026-01-05T02:30")]),
        ("all", [utc(f"2026-01-0{day}T02:30") for day in range(2, 6)]),
    ],
)
def test_catching_up_after_days_without_a_worker(bench, policy, expected):
    bench.add(catch_up=policy, max_active=10)
    bench.clock.now = utc("2026-01-05T09:00")
    bench.tick()
    bench.tick()
    assert dates(bench.runs()) == expected
    assert len(bench.jobs()) == len(expected)
    bench.clock.now = utc("2026-01-06T02:30")
    bench.tick()
    assert dates(bench.runs())[-1] == utc("2026-01-06T02:30"), "and on time again"


def test_downtime_over_the_hour_that_the_clocks_leave_out(bench):
    """Down from 01:50 to 03:20 in Berlin on the short day: the night's run is made once, for the change's moment."""
    bench.clock.now = utc("2026-03-28T12:00")
    bench.add(tz="Europe/Berlin")
    bench.clock.now = utc("2026-03-29T00:50")
    bench.tick()
    bench.clock.now = utc("2026-03-29T01:20")
    bench.tick()
    bench.clock.now = utc("2026-03-29T02:20")
    bench.tick()
    assert dates(bench.runs()) == [utc("2026-03-29T01:00")]


def test_the_hour_that_comes_twice_fires_once(bench):
    bench.clock.now = utc("2026-10-24T12:00")
    bench.add(tz="Europe/Berlin")
    bench.clock.now = utc("2026-10-25T00:00")
    while bench.clock.now < utc("2026-10-25T03:00"):
        bench.tick()
        bench.clock.pass_(minutes=10)
    assert dates(bench.runs()) == [utc("2026-10-25T00:30")]


def test_years_of_minutes_are_not_walked_through(bench):
    """A minutely schedule that nobody looked at for years: one run, and a note of what was left out."""
    bench.add(cron="* * * * *")
    bench.clock.now = utc("2029-01-01T00:00:10")
    bench.tick()
    (run,) = bench.runs()
    assert run.logical_date == utc("2029-01-01T00:00")
    assert run.state == "running"


def test_all_missed_minutes_come_in_portions(bench):
    """250 minutes at catch_up all, overlap queue: every one has a run, in order, and one job is at work."""
    bench.add(cron="* * * * *", catch_up="all", overlap="queue")
    start = bench.clock.now
    bench.clock.pass_(minutes=250)
    for _ in range(3):
        bench.tick()
    found = bench.service.store.runs("nightly", caller=Caller.operator(), limit=1000)
    assert dates(found[::-1]) == [start + timedelta(minutes=minute) for minute in range(1, 251)]
    assert len(bench.jobs()) == 1
    assert bench.runs(state=RunState.RUNNING)[0].logical_date == start + timedelta(minutes=1)


def test_overlap_skip(bench):
    bench.add(cron="0 * * * *")
    bench.clock.pass_(hours=1)
    bench.tick()
    bench.clock.pass_(hours=1)
    bench.tick()
    first, second = bench.runs()
    assert (first.state, second.state) == ("running", "skipped")
    assert first.job_id in second.reason
    assert len(bench.jobs()) == 1


def test_overlap_queue(bench):
    """The second waits until the first job has ended; order is kept."""
    bench.add(cron="0 * * * *", overlap="queue")
    for _ in range(3):
        bench.clock.pass_(hours=1)
        bench.tick()
    assert [run.state for run in bench.runs()] == ["running", "waiting", "waiting"]
    bench.complete(bench.runs()[0].job_id)
    bench.tick()
    assert [run.state for run in bench.runs()] == ["done", "running", "waiting"]


def test_overlap_cancel_previous(bench):
    bench.add(cron="0 * * * *", overlap="cancel_previous")
    bench.clock.pass_(hours=1)
    bench.tick()
    bench.clock.pass_(hours=1)
    bench.tick()
    states = [bench.ledger.get_job(run.job_id).state for run in bench.runs()]
    assert states[0] in (JobState.CANCELLED, JobState.CANCELLING)
    assert states[1] is JobState.VALIDATING


def test_max_active(bench):
    bench.add(cron="0 * * * *", overlap="queue", max_active=2)
    for _ in range(3):
        bench.clock.pass_(hours=1)
        bench.tick()
    assert [run.state for run in bench.runs()] == ["running", "running", "waiting"]


def test_jitter_delays_the_start_not_the_date(bench):
    bench.add(cron="0 * * * *", jitter="30m")
    bench.clock.pass_(hours=1)
    started = []
    for _ in range(31):
        bench.tick()
        started.append(len(bench.runs()))
        bench.clock.pass_(minutes=1)
    assert started[-1] == 1
    assert bench.runs()[0].logical_date == utc("2026-01-01T13:00")


@pytest.mark.parametrize(("policy", "state"), [("fail", "failed"), ("skip", "skipped")])
def test_missing_input_fails_or_skips(bench, policy, state):
    bench.add(missing_input=policy, job={"inputs": [str(bench.folder / "in-{{ logical_date }}.parquet")]})
    bench.clock.now = utc("2026-01-02T02:30")
    bench.tick()
    (run,) = bench.runs()
    assert run.state == state
    assert "in-2026-01-02.parquet" in run.reason
    assert bench.jobs() == []


def test_missing_input_is_waited_for(bench):
    bench.add(missing_input="wait:2h", job={"inputs": [str(bench.folder / "in-{{ logical_date }}.parquet")]})
    bench.clock.now = utc("2026-01-02T02:30")
    bench.tick()
    bench.clock.pass_(hours=1)
    bench.tick()
    (run,) = bench.runs()
    assert run.state == "waiting"
    assert "waits for its input" in run.reason
    bench.input("2026-01-02")
    bench.clock.pass_(minutes=1)
    bench.tick()
    assert bench.runs()[0].state == "running"


def test_waiting_has_an_end(bench):
    bench.add(missing_input="wait:2h", job={"inputs": [str(bench.folder / "in-{{ logical_date }}.parquet")]})
    bench.clock.now = utc("2026-01-02T02:30")
    bench.tick()
    bench.clock.pass_(hours=2)
    bench.tick()
    assert bench.runs()[0].state == "failed"


def test_pause_and_resume(bench):
    """Paused: nothing fires. Resumed: what passed is caught up with as after a downtime."""
    bench.add()
    bench.service.pause("nightly")
    assert bench.service.get("nightly").next_runs == []
    bench.clock.now = utc("2026-01-04T03:00")
    bench.tick()
    assert bench.runs() == []
    bench.service.resume("nightly")
    bench.tick()
    assert dates(bench.runs()) == [utc("2026-01-04T02:30")]


def test_an_output_that_is_taken_fails_the_run_and_touches_nothing(bench):
    (bench.folder / "out").mkdir()
    (bench.folder / "out" / "mine").write_text("precious")
    bench.add(job={"output": str(bench.folder / "out")})
    bench.clock.now = utc("2026-01-02T02:30")
    bench.tick()
    (run,) = bench.runs()
    assert run.state == "failed"
    assert "exists already" in run.reason


def test_trigger_now_and_for_a_date(bench):
    bench.add()
    bench.service.pause("nightly")
    run = bench.service.trigger("nightly")
    assert run.kind == "manual"
    bench.tick()
    assert bench.runs()[0].state == "running", "a person's word counts though it is paused"
    bench.service.trigger("nightly", logical_date="2025-12-24T02:30")
    with pytest.raises(ConflictError):
        bench.service.trigger("nightly", logical_date="2025-12-24T02:30+00:00")


def test_backfill_is_bounded_and_leaves_what_is_there(bench):
    """A week, two at once; the day that has a run is left alone; the range is in the schedule's zone."""
    bench.add(tz="Europe/Istanbul")
    bench.service.trigger("nightly", logical_date="2025-12-03T02:30")
    made = bench.service.backfill("nightly", start="2025-12-01", end="2025-12-07", parallel=2)
    assert (len(made.runs), made.existing) == (6, 1)
    assert made.runs[0].logical_date == utc("2025-11-30T23:30")
    most = 0
    for _ in range(8):
        bench.tick()
        running = [run for run in bench.runs(state=RunState.RUNNING) if run.kind == "backfill"]
        most = max(most, len(running))
        for run in running:
            bench.complete(run.job_id)
    assert most == 2
    assert {run.state for run in bench.runs() if run.kind == "backfill"} == {"done"}
    assert len(bench.jobs()) == 7
    again = bench.service.backfill("nightly", start="2025-12-01", end="2025-12-07")
    assert (again.runs, again.existing, again.id) == ([], 7, None)


def test_backfill_retries_what_failed(bench):
    bench.add(job={"inputs": [str(bench.folder / "in-{{ logical_date }}.parquet")]})
    bench.input("2025-12-02")
    bench.service.backfill("nightly", start="2025-12-01", end="2025-12-02", parallel=5)
    bench.tick()
    failed, running = bench.runs()
    assert (failed.state, running.state) == ("failed", "running")
    bench.complete(running.job_id)
    bench.tick()
    bench.input("2025-12-01")
    made = bench.service.backfill("nightly", start="2025-12-01", end="2025-12-02", retry=True)
    assert [run.try_number for run in made.runs] == [2]
    bench.tick()
    assert [run.state for run in bench.runs()] == ["running", "done"]


@pytest.mark.parametrize(
    ("start", "end", "parallel"),
    [("2025-12-01", "2025-11-01", 1), ("1990-01-01", "2025-12-31", 1), ("2025-12-01", "2025-12-02", 0), ("x", "y", 1), ("2030-01-01", "2030-02-01", 1)],
)  # fmt: skip
def test_bad_backfills_are_refused(bench, start, end, parallel):
    bench.add()
    with pytest.raises(InvalidSpecError):
        bench.service.backfill("nightly", start=start, end=end, parallel=parallel)
    assert bench.runs() == []


def test_removing_keeps_jobs(bench):
    bench.add()
    bench.clock.now = utc("2026-01-02T02:30")
    bench.tick()
    bench.service.remove("nightly")
    with pytest.raises(NotFoundError):
        bench.service.get("nightly")
    assert len(bench.jobs()) == 1
    bench.clock.pass_(days=3)
    bench.tick()
    assert len(bench.jobs()) == 1


def test_names_are_unique_and_defaults_frozen(bench):
    view = bench.add()
    assert view.job["max_tokens"] == 256, "a later program's defaults do not change what was scheduled"
    assert view.job["inputs"] == [str(bench.folder / "in.parquet")]
    with pytest.raises(ConflictError, match="schedule rm"):
        bench.add()
    with pytest.raises(InvalidSpecError):
        bench.add(name="other", job={"max_tokens": -1})
    with pytest.raises(InvalidSpecError):
        bench.add(name="other", cron="every night")
    bench.add(name="another")
    page = bench.service.list(limit=1)
    assert (page.data[0].name, page.has_more) == ("another", True)
    assert [view.name for view in bench.service.list(after=page.last_id).data] == ["nightly"]


def test_deadlines_count_from_the_start_of_each_run(bench):
    bench.add(job={"deadline": "6h"})
    assert bench.service.get("nightly").job["deadline"] == "6h"
    bench.clock.now = utc("2026-01-02T02:30")
    bench.tick()
    (job,) = bench.jobs()
    assert job.deadline_at is not None
    assert abs(job.deadline_at - datetime.now(UTC) - timedelta(hours=6)) < timedelta(minutes=5)
    with pytest.raises(ValueError, match="duration"):
        bench.add(name="other", job={"deadline": "2030-01-01T00:00Z"})


def test_tenants_do_not_see_each_other(bench):
    """The same name twice; each tenant has its own, its jobs are the tenant's, and the other's is not there."""
    red, blue = (bench.acting_for(Caller(tenant, Role.SUBMITTER)) for tenant in ("red", "blue"))
    spec = ScheduleSpec(name="nightly", cron="30 2 * * *", job={"inputs": [bench.always_there()], "model": "org/name"})
    mine, theirs = red.add(spec, base=None), blue.add(spec, base=None)
    assert [view.id for view in red.list().data] == [mine.id]
    for name in (theirs.id, "other"):
        for call in (red.get, red.pause, red.resume, red.remove, red.trigger, red.runs):
            with pytest.raises(NotFoundError):
                call(name)
    run = red.trigger("nightly")
    bench.tick()
    (job,) = bench.jobs()
    assert red.runs("nightly").data[0].job_id == job.id
    assert (job.tenant_id, run.schedule) == ("red", "nightly")
    with pytest.raises(ConflictError, match="several tenants"):
        bench.service.get("nightly")


def test_a_run_outside_of_its_tenants_roots_fails_before_anything_is_looked_at(bench):
    """Whether the file is there is not told: both runs fail with the same words."""
    said = set()
    for name, path in (("there", bench.always_there()), ("not-there", str(bench.folder / "no.parquet"))):
        bench.add(name=name, job={"inputs": [path]})
        bench.service.trigger(name)
        roots = Roots((str(bench.folder / "mine"),), (str(bench.folder),), ())
        ScheduleRunner(
            Firing(bench.engine, clock=bench.clock), bench.ledger, NullDispatcher(), roots_of=lambda _tenant, r=roots: r
        ).tick()
        (run,) = bench.runs(name)
        assert run.state == "failed"
        said.add(run.reason.replace(path, "PATH"))
        bench.clock.pass_(seconds=1)
    assert len(said) == 1
    assert "lies outside" in said.pop()
    assert bench.jobs() == []
