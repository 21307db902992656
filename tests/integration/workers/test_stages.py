"""Whole jobs of several stages: outcomes, sums, rows that do not run twice, and the bytes of separate jobs."""

import json
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.dataset.manifest import read_manifest
from batchinfer.dataset.verify import verify
from batchinfer.jobs.present import job_view
from batchinfer.jobs.speed import Speed
from batchinfer.jobs.status import JobState, Outcome
from batchinfer.money import Price, usd_to_nanos
from batchinfer.types import Usage
from tests.fakes import answer
from tests.processes import Process

from .test_partial_rows import wait_for

STAGES = [
    {"name": "draft", "prompt": "say {{ topic }}"},
    {"name": "keep", "filter": "score > 0.5"},
    {"name": "judge", "messages": [{"role": "user", "content": "judge {{ draft.output }}"}]},
]


def table(count, **topics):
    """Rows of which those from the middle on pass the filter."""
    return pa.table(
        {
            "topic": [topics.get(f"t{row}", f"t{row}") for row in range(count)],
            "score": [(row + 0.5) / count for row in range(count)],
        }
    )


def check_stages(bench, job_id, names=("draft", "judge")):
    """What :meth:`Bench.check` does, and that the stages' parts are the row's whole, to the nano-dollar."""
    job = bench.check(job_id)
    for row in bench.rows(job_id) if names else ():
        parts = [row[name] for name in names if row[name] is not None]
        assert row["cost_usd"] == sum(part["cost_usd"] for part in parts)
        total = sum((Usage(**part["usage"]) for part in parts), Usage())
        assert row["usage"] == {name: getattr(total, name) for name in row["usage"]}
        if row["list_cost_usd"] is not None:
            assert row["list_cost_usd"] == sum(part["list_cost_usd"] for part in parts)
    return job


def test_rows_go_through_the_stages(bench):
    """Filtered rows are counted everywhere; costs of stages, rows and ledger are one sum; neighbours never notice a fault."""
    bench.ledger.set_price("fake", Price(2_000_000, 1_000_000, 3_000_000_000))
    job_id = bench.submit(table(30, t3="ERROR t3", t20="ERROR t20"), stages=STAGES, shard_rows=10)
    job = bench.run(job_id)
    assert (job.state, job.outcome) == (JobState.COMPLETED, Outcome.PARTIAL)
    check_stages(bench, job_id)
    rows = bench.rows(job_id)
    for row in rows[4:15]:
        assert (row["status"], row["stopped_at"], row["keep"], row["judge"], row["output"]) == (
            "filtered",
            "keep",
            False,
            None,
            None,
        )
        assert row["draft"]["output"] == answer(f"say {row['topic']}")
    for row in rows[21:]:
        said = answer(f"say {row['topic']}")
        assert (row["status"], row["stopped_at"], row["keep"]) == ("succeeded", None, True)
        assert row["draft"]["output"] == said
        assert row["output"] == row["judge"]["output"] == answer(f"judge {said}")
        assert (row["finish_reason"], row["judge"]["finish_reason"], row["judge"]["error"]) == ("stop", "stop", None)
    for index in (3, 20):
        error = rows[index]["error"]
        assert (error["code"], error["message"]) == ("engine_error", "stage 'draft': asked for an error")
        assert (rows[index]["stopped_at"], rows[index]["keep"], rows[index]["judge"]) == ("draft", None, None)
        assert rows[index]["draft"]["error"]["message"] == "asked for an error"
    counts = {"succeeded": 14, "errored": 2, "filtered": 14}
    assert {name: number for name, number in job.counts.as_dict().items() if number} == counts
    assert {name: number for name, number in read_manifest(job.output).counts.items() if number} == counts
    assert read_manifest(job.output).job["stopped_at"] == {"draft": {"errored": 2}, "keep": {"filtered": 14}}
    view = job_view(job, Speed(None, None, None)).rows
    assert (view.filtered, view.remaining) == (14, 0)
    assert sum(usd_to_nanos(row["list_cost_usd"]) for row in rows) == job.list_nanos > 0
    assert sum(bench.calls().values()) == 30 + 14


def test_verify_recounts_where_rows_ended(bench):
    """Somebody changed the stage of a filtered row: the file's hash says so, and so do the sums."""
    job = bench.run(bench.submit(table(6), stages=STAGES, output=str(bench.folder / "out.parquet")))
    assert verify(job.output).ok
    found = pq.read_table(job.output)
    at = found.schema.get_field_index("stopped_at")
    changed = ["judge" if row == 1 else name for row, name in enumerate(found["stopped_at"].to_pylist())]
    pq.write_table(found.set_column(at, found.schema.field(at), pa.array(changed, pa.large_string())), job.output)
    problems = verify(job.output).problems
    assert problems[-1] == (
        "rows ended at stages {'judge': {'filtered': 1}, 'keep': {'filtered': 2}}, "
        "but the manifest says {'keep': {'filtered': 3}}"
    )


def test_a_job_that_filters_all_of_its_rows_is_green_and_one_filter_first_costs_nothing(bench):
    stages = [{"name": "keep", "filter": "score > 1"}, STAGES[0]]
    job = bench.run(bench.submit(table(10), stages=stages))
    assert (job.outcome, job.counts.filtered, job.cost_nanos) == (Outcome.SUCCEEDED, 10, 0)
    check_stages(bench, job.id, ["draft"])
    assert bench.calls() == {}


def test_only_failed_rows_run_again_by_retry(bench, monkeypatch):
    """A filtered row is an outcome like a success: a retry leaves it alone."""
    monkeypatch.setenv("ERROR_FILE", str(bench.folder / "mark"))
    job = bench.run(bench.submit(table(12, t8="ERROR-ONCE"), stages=STAGES))
    assert (job.counts.filtered, job.counts.errored) == (6, 1)
    before = bench.calls()
    assert bench.ledger.retry(job.id) == 1
    job = bench.run(job.id)
    assert (job.counts.filtered, job.counts.errored, job.counts.succeeded) == (6, 0, 6)
    bench.check(job.id)
    again = bench.calls() - before
    assert again == {"say ERROR-ONCE": 1, f"judge {answer('say ERROR-ONCE')}": 1}


def test_nothing_finished_runs_again_after_a_killed_worker(bench, tmp_path):
    """SIGKILL while judges run: filtered rows and drafts that were kept are not run again, and the sums are exact."""
    stages = [*STAGES[:2], {"name": "judge", "prompt": "judge {{ draft.output }} WAIT:150 PACE:0.004"}]
    job_id = bench.submit(table(12), stages=stages)
    settings = {
        "database_url": bench.database_url, "usd_per_hour": "3.60", "lease_seconds": 2, "heartbeat_seconds": 0.1,
        "tick_seconds": 0.1, "checkpoint_seconds": 0.2, "checkpoint_pause_seconds": 0,
    }  # fmt: skip

    def is_kept():
        """The judges have begun, the drafts before them are kept, and the filtered rows are committed."""
        kept = [json.loads(path.read_bytes()) for path in tmp_path.rglob("progress-*.part")]
        return any(len(one.get("answers", ())) == len(one["rows"]) == 6 for one in kept)

    with Process("worker", **settings) as worker:
        wait_for(lambda: bench.ledger.get_job(job_id).counts.filtered == 6 and is_kept())
        worker.send(signal.SIGKILL)
        worker.wait()
    before = bench.calls()
    assert bench.run(job_id).state is JobState.COMPLETED
    job = check_stages(bench, job_id)
    assert (job.counts.filtered, job.counts.succeeded) == (6, 6)
    again = bench.calls() - before
    assert sum(again.values()) == 6
    assert all(prompt.startswith("judge") for prompt in again), "finished drafts were not run again"
    rows = bench.rows(job_id)
    for row in rows[6:]:
        said = answer(f"say {row['topic']}")
        assert (row["draft"]["output"], row["output"]) == (said, answer(f"judge {said} WAIT:150 PACE:0.004"))
        assert row["draft"]["cost_usd"] == 0, "the attempt that was killed has paid for it, as lost work"
    cost = bench.ledger.cost_report(job_id)
    assert cost.overhead_nanos["lost"] > 0
    assert cost.total_nanos == cost.rows_nanos + sum(cost.overhead_nanos.values()) == job.cost_nanos


def test_a_row_that_kills_the_engine_in_a_later_stage_ends_alone(bench):
    """The engine dies on one row's judge each time: that row is found and its neighbours finish."""
    stages = [STAGES[0], {"name": "judge", "prompt": "{{ 'CRASH' if topic == 't0' else 'judge' }} {{ draft.output }}"}]
    job = bench.run(bench.submit(table(3), stages=stages, max_attempts=1))
    check_stages(bench, job.id)
    rows = bench.rows(job.id)
    assert (job.counts.succeeded, job.counts.errored) == (2, 1)
    assert rows[0]["error"]["code"] == "worker_lost"


def test_what_the_input_does_not_have_fails_the_job_before_it_costs_anything(bench):
    stages = [STAGES[0], {"name": "keep", "filter": "scroe > 1"}]
    job = bench.run(bench.submit(table(5), stages=stages))
    assert (job.state, job.cost_nanos, bench.calls()) == (JobState.FAILED, 0, {})
    assert "stage 'keep': the template uses 'scroe'" in job.error_message
    assert not list(Path(bench.folder).rglob("*.part"))
