"""What the doors' use cases add to the ledger: speed, wake-ups, first rows."""

from dataclasses import replace
from datetime import timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import ConflictError, InvalidSpecError
from batchinfer.jobs.ledger import Ledger
from batchinfer.jobs.result_files import first_rows
from batchinfer.jobs.service import JobService
from batchinfer.jobs.speed import WINDOW, Speed, measure_speed
from batchinfer.jobs.status import JobState
from batchinfer.jobs.views import ResultFile
from tests.played import complete, make_spec, plan, run_shard


class Recorder:
    """A dispatcher that remembers."""

    def __init__(self):
        self.seen = []

    def wake_planner(self, job_id):
        self.seen.append(("plan", job_id))

    def wake_shards(self, model, count):
        self.seen.append(("shards", model, count))

    def wake_finalizer(self, job_id):
        self.seen.append(("finalize", job_id))


@pytest.fixture
def dispatcher():
    return Recorder()


@pytest.fixture
def service(sqlite_url, dispatcher):
    made = JobService.connect(sqlite_url, "memory://")
    made._dispatcher = dispatcher
    yield made
    made.close()


@pytest.fixture
def job_id(service, tmp_path):
    view, _ = service.submit(make_spec(tmp_path), base=None)
    return view.id


def test_workers_are_woken_when_there_is_work(service, dispatcher, tmp_path):
    view, _ = service.submit(make_spec(tmp_path), base=None, idempotency_key="k")
    service.submit(make_spec(tmp_path), base=None, idempotency_key="k")
    assert dispatcher.seen == [("plan", view.id)]
    dispatcher.seen.clear()
    service.pause(view.id)
    service.resume(view.id)
    assert dispatcher.seen == [("plan", view.id)]
    complete(service.ledger, view.id, errored=1)
    dispatcher.seen.clear()
    service.retry(view.id)
    assert dispatcher.seen == [("shards", "org/name", 2)]


def test_a_retry_of_nothing_wakes_no_one(service, dispatcher, job_id):
    complete(service.ledger, job_id)
    dispatcher.seen.clear()
    assert service.retry(job_id)[1] == 0
    assert dispatcher.seen == []


def test_a_deadline_in_the_past_is_refused(service, tmp_path):
    with pytest.raises(InvalidSpecError, match="passed already"):
        service.submit(make_spec(tmp_path, deadline="2020-01-01T00:00:00Z"), base=None)


def test_only_an_ended_job_can_be_verified(service, job_id):
    with pytest.raises(ConflictError, match="validating"):
        service.verify(job_id)


# -- speed ------------------------------------------------------------------------------------------------------------
def running(service, job_id):
    plan(service.ledger, job_id)
    run_shard(service.ledger)
    return service.ledger.get_job(job_id)


def test_speed_is_what_was_committed_over_the_time_since_the_start(service, job_id):
    """Five rows with a hundred tokens after ten seconds; five rows remain."""
    job = running(service, job_id)
    speed = measure_speed(service.engine, job, job.started_at + timedelta(seconds=10))
    assert speed == Speed(0.5, 10.0, 10.0)


def test_what_is_long_ago_does_not_count(service, job_id):
    """After an hour without a commit the average of the whole run is all there is to go by."""
    job = running(service, job_id)
    just_within = measure_speed(service.engine, job, job.started_at + WINDOW)
    assert just_within.rows_per_second == pytest.approx(5 / WINDOW.total_seconds())
    after = measure_speed(service.engine, job, job.started_at + timedelta(hours=1))
    assert after == Speed(pytest.approx(5 / 3600), pytest.approx(100 / 3600), pytest.approx(3600))


def test_a_held_job_has_no_speed(service, job_id):
    job = replace(running(service, job_id), state=JobState.PAUSED)
    assert measure_speed(service.engine, job, job.started_at + timedelta(seconds=10)) == Speed()


def test_an_ended_job_has_the_speed_of_its_whole_run(service, job_id):
    complete(service.ledger, job_id)
    job = service.ledger.get_job(job_id)
    job = replace(job, finished_at=job.started_at + timedelta(seconds=20))
    assert measure_speed(service.engine, job, job.finished_at) == Speed(0.5, 10.0, None)


def test_a_job_that_has_not_begun_has_no_speed(service, job_id):
    assert service.get(job_id).progress.tokens_per_second is None
    assert Ledger(service.engine).get_job(job_id).started_at is None


# -- first rows -------------------------------------------------------------------------------------------------------
def result_file(path, **columns):
    size = len(next(iter(columns.values())))
    fixed = {
        "row_index": list(range(size)),
        "status": ["succeeded"] * size,
        "output": [f"out {number}" for number in range(size)],
        "error": pa.nulls(size, pa.struct([("code", pa.string()), ("message", pa.string())])),
    }
    pq.write_table(pa.table(columns | fixed), path)
    return ResultFile(path=str(path), num_rows=size, num_bytes=1, sha256="")


def test_a_preview_reads_only_as_many_rows_and_files_as_it_shows(tmp_path):
    files = [result_file(tmp_path / "a.parquet", prompt=["p", "q"]), result_file(tmp_path / "b.parquet", prompt=["r"])]
    gone = ResultFile(path=str(tmp_path / "gone.parquet"), num_rows=1, num_bytes=1, sha256="")
    rows = first_rows(make_spec(tmp_path), [*files, gone], 3)
    assert [(row.prompt, row.output) for row in rows] == [("p", "out 0"), ("q", "out 1"), ("r", "out 0")]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}], "hi"),
        ([], None),
        (None, "the prompt"),
    ],
)
def test_a_conversation_shows_its_last_message(tmp_path, value, shown):
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    file = result_file(tmp_path / "a.parquet", messages=pa.array([value], kind), prompt=["the prompt"])
    [row] = first_rows(make_spec(tmp_path), [file], 1)
    assert row.prompt == (shown or "the prompt")


def test_prefixed_columns_are_found(tmp_path):
    """With a prefix, a column named ``output`` is the input's own."""
    table = pa.table(
        {"q": ["a"], "output": ["mine"], "ai_row_index": [7], "ai_status": ["succeeded"], "ai_output": ["A"]}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    file = ResultFile(path=str(tmp_path / "a.parquet"), num_rows=1, num_bytes=1, sha256="")
    [row] = first_rows(make_spec(tmp_path, column_prefix="ai_", prompt_column="q"), [file], 5)
    assert (row.row_index, row.prompt, row.output) == (7, "a", "A")
