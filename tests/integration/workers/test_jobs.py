"""Whole jobs on the embedded worker: what a person gets for what they hand in."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.jobs.present import job_view
from batchinfer.jobs.speed import Speed
from batchinfer.jobs.status import JobState, Outcome
from batchinfer.money import Price
from tests.fakes import STEP_NS, answer

from .conftest import prompts


def test_each_row_gets_its_answer_in_input_order(bench):
    """100 rows over 4 shards: answers, usage and cost of each row, counters, manifest, progress."""
    seen = []
    job_id = bench.submit(prompts(100))
    bench.ledger.set_price("fake", Price(2_000, 1_000, 3_000_000))
    job = bench.run(job_id, seen.append)
    assert (job.state, job.outcome, job.num_shards) == (JobState.COMPLETED, Outcome.SUCCEEDED, 4)
    bench.check(job_id)
    rows = bench.rows(job_id)
    assert [row["output"] for row in rows] == [answer(f"row {row}") for row in range(100)]
    assert {(row["usage"]["prompt_tokens"], row["usage"]["completion_tokens"]) for row in rows} == {(2, 2)}
    assert {row["model"] for row in rows} == {"fake"}
    assert job.metered_nanos == 100 * STEP_NS * 3_600_000_000 // 3_600_000_000_000
    assert job.usage.prompt_tokens == 200
    assert seen[-1].rows_done == seen[-1].rows_total == 100
    assert bench.calls() == {f"row {row}": 1 for row in range(100)}
    assert (Path(job.output) / "_SUCCESS").exists()


def test_the_job_says_how_its_engine_was_used(bench):
    """One engine ran all shards: its report counts each generated token and each nanosecond once."""
    job = bench.run(bench.submit(prompts(100)))
    (report,) = job.engines
    assert report["steps"] > 0
    assert report["tokens_per_second"] == pytest.approx(200 / (100 * STEP_NS / 1e9), rel=1e-3)
    (use,) = job_view(job, Speed(None, None, None)).engines
    assert (use.id, use.steps, use.reuse) == (report["id"], report["steps"], None)


def test_bad_rows_do_not_touch_their_neighbours(bench):
    """Empty, blank and failing rows become error rows, one each; the job is not green."""
    job_id = bench.submit(prompts(30, {3: "", 4: "   ", 5: "ERROR please", 6: None}))
    job = bench.run(job_id)
    assert (job.state, job.outcome) == (JobState.COMPLETED, Outcome.PARTIAL)
    bench.check(job_id)
    codes = {row["row_index"]: row["error"]["code"] for row in bench.rows(job_id) if row["error"]}
    assert codes == {3: "empty_prompt", 4: "empty_prompt", 5: "engine_error", 6: "null_field"}
    assert {sample.row_index: sample.code for sample in bench.ledger.row_errors(job_id)} == codes


def test_a_job_whose_rows_all_fail_is_not_green(bench):
    job_id = bench.submit(prompts(12, dict.fromkeys(range(12), "")))
    job = bench.run(job_id)
    assert (job.state, job.outcome, job.counts.errored) == (JobState.COMPLETED, Outcome.NONE, 12)
    bench.check(job_id)
    assert bench.calls() == {}
    assert job.cost_nanos == 0, "no model is loaded for rows that cannot run"


def test_an_input_without_rows_completes(bench):
    job = bench.run(bench.submit([]))
    assert (job.state, job.num_rows) == (JobState.COMPLETED, 0)


def test_one_parquet_file_and_columns_passed_through(bench):
    """--output x.parquet is one file with the input's columns beside the results."""
    table = pa.table({"prompt": [f"row {row}" for row in range(60)], "tag": pa.array(range(60), pa.uint8())})
    job_id = bench.submit(table, output=str(bench.folder / "all.parquet"))
    job = bench.run(job_id)
    bench.check(job_id)
    result = pq.read_table(job.output)
    assert result["tag"].to_pylist() == list(range(60))
    assert result.schema.field("tag").type == pa.uint8()
    assert [entry.name for entry in bench.folder.iterdir() if entry.is_dir()] == []


def test_skipped_rows_are_not_errors(bench):
    """--on-null skip: such rows are kept, marked, and never run."""
    job_id = bench.submit(prompts(10, {2: None, 7: None}), on_null="skip")
    job = bench.run(job_id)
    assert (job.outcome, job.counts.skipped, job.counts.succeeded) == (Outcome.SUCCEEDED, 2, 8)
    bench.check(job_id)


def test_unseeded_rows_get_their_own_seeds_and_the_same_ones_again(bench):
    """Sampled rows: each its own seed, equal in a second job with other shards; a row's own seed wins."""
    table = pa.table({"prompt": ["SEED"] * 20, "seed": pa.array([None] * 19 + [77], pa.int64())})
    outputs = []
    for name, shard_rows in (("one", 3), ("two", 20)):
        job_id = bench.submit(table, temperature=1.0, shard_rows=shard_rows, output=str(bench.folder / name), seed=5)
        bench.run(job_id)
        outputs.append([row["output"] for row in bench.rows(job_id)])
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0])) == 20
    assert outputs[0][19] == "seed=77"


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ({"prompt_column": "nowhere"}, "invalid_input"),
        ({"template": "{{ nowhere }}"}, "invalid_input"),
        ({"template": "{{ prompt"}, "invalid_spec"),
        ({"id_column": "prompt"}, "duplicate_id"),
    ],
)
def test_what_cannot_work_fails_before_anything_runs(bench, spec, code):
    """The planner's sentence is the job's error."""
    job = bench.run(bench.submit(["same", "same"], **spec))
    assert (job.state, job.error_code) == (JobState.FAILED, code), job.error_message
    assert bench.calls() == {}


def test_result_columns_that_clash_are_refused_and_a_prefix_helps(bench):
    table = pa.table({"prompt": ["a b"], "status": ["new"]})
    job = bench.run(bench.submit(table))
    assert job.state is JobState.FAILED
    assert "status" in job.error_message
    job = bench.run(bench.submit(table, column_prefix="out_", output=str(bench.folder / "second")))
    assert job.state is JobState.COMPLETED
    (row,) = bench.rows(job.id)
    assert (row["status"], row["out_status"], row["out_output"]) == ("new", "succeeded", "b a")


def test_a_model_that_is_missing_fails_the_job_with_its_sentence(bench):
    """A deterministic load error is not tried again and again."""
    job = bench.run(bench.submit(prompts(50), model="missing"))
    assert (job.state, job.error_code) == (JobState.FAILED, "invalid_model")
    assert "no model at missing" in job.error_message


def test_an_engine_that_cannot_start_fails_the_job_in_the_end(bench):
    """A crash while loading may pass, so it is tried max_attempts times; then the job says what was wrong."""
    job = bench.run(bench.submit(prompts(5), model="crashing", max_attempts=1))
    assert (job.state, job.error_code) == (JobState.FAILED, "shard_failed")
    assert "last words" in job.error_message


def test_an_input_that_changed_after_planning_fails_the_job(bench):
    """Answers never stand beside other rows than those they were made for."""
    job_id = bench.submit(prompts(200), shard_rows=10)

    def tamper(progress):
        if progress.job.state is JobState.IN_PROGRESS and progress.job.counts.total:
            other = Path(bench.write([f"other {row}" for row in range(200)], "other"))
            os.utime(other, (time.time() + 5, time.time() + 5))
            other.replace(bench.folder / "input.parquet")

    bench.write(prompts(200, {row: f"SLEEP:0.02 {row}" for row in range(200)}))
    job = bench.run(job_id, tamper, shards_in_flight=1, max_num_seqs=1)
    assert (job.state, job.error_code) == (JobState.FAILED, "input_changed"), job
    assert "input.parquet" in job.error_message


def test_a_run_of_one_job_leaves_others_alone(bench):
    """``run`` works on its own job only, however long another one has waited; that one runs when its turn comes."""
    other = bench.submit(prompts(10), model="other", output=str(bench.folder / "other"))
    mine = bench.submit(prompts(10))
    assert bench.run(mine).state is JobState.COMPLETED
    assert bench.ledger.get_job(other).state is JobState.VALIDATING
    assert bench.run(other).state is JobState.COMPLETED
    bench.check(other)
