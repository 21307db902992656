"""--reuse-results: what is computed, what is copied, and what is never copied, counted by the engine's own calls."""

from __future__ import annotations

import shutil
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from batchinfer.jobs.caller import Caller
from batchinfer.jobs.service import JobService
from batchinfer.jobs.spec import JobSpec
from batchinfer.jobs.status import JobState, Outcome
from batchinfer.money import Price
from tests.adapter_folder import make_adapter
from tests.fakes import answer

from .conftest import prompts


@pytest.fixture
def night(bench):
    """Run one night: its prompts in, its job and what the engine ran out."""
    model = bench.folder / "model.gguf"
    model.write_bytes(b"weights")
    count = 0

    def run(texts, *, tenant="default", settings=None, is_checked=True, **spec):
        nonlocal count
        count += 1
        before = bench.calls()
        values = {
            "model": str(model), "output": str(bench.folder / f"out-{count}"), "shard_rows": 25, "reuse_results": True,
        } | spec  # fmt: skip
        inputs = bench.write(texts, f"in-{count}.parquet")
        job, _ = bench.ledger.submit(JobSpec(inputs=inputs, **values), tenant=tenant)
        bench.run(job.id, **(settings or {"shards_in_flight": 1}))
        done = bench.check(job.id) if is_checked else bench.ledger.get_job(job.id)
        assert done.state is JobState.COMPLETED
        return done, bench.calls() - before

    run.model = model
    return run


def statuses(bench, job):
    return [row["status"] for row in bench.rows(job.id)]


def test_the_next_night_computes_new_and_changed_rows_only(bench, night):
    """60 rows; the next night 50 of them in another order, 10 changed, 5 new: 15 run, 50 are copied with their source."""
    bench.ledger.set_price(str(night.model), Price(2_000, 1_000, 3_000_000))
    first, calls = night(prompts(60))
    assert sum(calls.values()) == 60
    tonight = [f"row {row}" for row in range(49, -1, -1)] + [f"changed {row}" for row in range(10)] + list("abcde")
    second, calls = night(tonight)
    assert sorted(calls) == sorted(tonight[50:])
    rows = bench.rows(second.id)
    assert [row["output"] for row in rows] == [answer(text) for text in tonight]
    assert [row["status"] for row in rows] == ["deduplicated"] * 50 + ["succeeded"] * 15
    sources = [row["reused_from"] for row in rows[:50]]
    assert [(source["job_id"], source["row_index"]) for source in sources] == [
        (first.id, row) for row in range(49, -1, -1)
    ]
    assert {row["cost_usd"] for row in rows[:50]} == {Decimal(0)}
    assert {row["list_cost_usd"] for row in rows[:50]} == {Decimal(0)}
    assert {row["finish_reason"] for row in rows[:50]} == {"stop"}
    costs = {row["row_index"]: row["cost_usd"] for row in bench.rows(first.id)}
    assert second.saved_nanos == int(sum(costs[row] for row in range(50)).scaleb(9)) > 0
    # two prompt and two generated tokens each, at $2e-6 and $3e-3 a million
    assert second.saved_list_nanos == 50 * Price(2_000, 1_000, 3_000_000).cost(2, 0, 2) > 0
    assert second.outcome is Outcome.SUCCEEDED
    service = JobService.connect(bench.database_url, "memory://")
    view = service.get(second.id).reuse
    service.close()
    assert (view.rows, view.hit_rate) == (50, round(50 / 65, 6))


def test_copies_of_copies_name_the_row_that_was_computed(bench, night):
    """Each night's output is a source of its own: with the first night's gone, the second's copies serve the third."""
    first, _ = night(prompts(30))
    second, calls = night(prompts(30))
    assert not calls
    shutil.rmtree(first.output)
    third, calls = night(prompts(30))
    assert not calls
    assert {row["reused_from"]["job_id"] for row in bench.rows(third.id)} == {first.id}
    shutil.rmtree(second.output)
    shutil.rmtree(third.output)
    fourth, calls = night(prompts(30))
    assert sum(calls.values()) == 30
    assert statuses(bench, fourth) == ["succeeded"] * 30


def test_nothing_is_reused_across_a_changed_spec(night):
    night(prompts(5))
    for change in (
        {"max_tokens": 7},
        {"system": "Be brief."},
        {"dtype": "bfloat16"},
        {"include_token_ids": True},
        {"max_model_len": 512},
    ):
        _, calls = night(prompts(5), **change)
        assert sum(calls.values()) == 5, change


def test_what_changes_no_answer_does_not_matter(night):
    """Another prefix, one file or many, other shards, another name."""
    one = str(night.model.parent / "one.parquet")
    night(prompts(10), output=one)
    second, calls = night(prompts(10), name="other", priority=5, shard_rows=3, max_attempts=9)
    assert not calls
    shutil.rmtree(second.output)
    _, calls = night(prompts(10), column_prefix="x_", is_checked=False)
    assert not calls
    Path(one).unlink()
    _, calls = night(prompts(10))
    assert not calls, "the copies behind the prefix are a source, too"


def test_nothing_is_reused_across_a_changed_model(night):
    night(prompts(10))
    night.model.write_bytes(b"other weights")
    _, calls = night(prompts(10))
    assert sum(calls.values()) == 10


def test_tenants_never_share(bench, night):
    service = JobService.connect(bench.database_url, "memory://")
    for tenant in ("red", "blue"):
        roots = [str(bench.folder)]
        service.tenants.add(Caller.operator(), tenant, input_roots=roots, output_roots=roots)
    service.close()
    night(prompts(10), tenant="red")
    _, calls = night(prompts(10), tenant="blue")
    assert sum(calls.values()) == 10
    _, calls = night(prompts(10), tenant="red")
    assert not calls


def test_rows_that_failed_run_again(bench, night):
    texts = prompts(10, {3: "ERROR please", 4: "", 5: None})
    first, _ = night(texts)
    second, calls = night(texts)
    assert calls == {"ERROR please": 1}
    assert statuses(bench, first) == ["succeeded"] * 3 + ["errored"] * 3 + ["succeeded"] * 4
    assert statuses(bench, second) == ["deduplicated"] * 3 + ["errored"] * 3 + ["deduplicated"] * 4


def test_a_damaged_or_foreign_source_is_computed(bench, night):
    """A file of another size, a file that is no Parquet, an index that points to other rows: never a wrong answer."""
    first, _ = night(prompts(60), shard_rows=20)
    files = sorted(Path(first.output).glob("shard-*.parquet"))
    files[0].write_bytes(b"x")
    files[1].write_bytes(b"x" * files[1].stat().st_size)
    index = Path(first.output) / "_keys.bin"
    data = bytearray(index.read_bytes())
    # the rows are the last third of the one run: reversed, each entry leads to another row
    data[40 * 24 :] = bytes(data[40 * 24 :])
    third = len(data) // 3
    rows = [data[2 * third + 8 * i : 2 * third + 8 * i + 8] for i in range(60)]
    index.write_bytes(bytes(data[: 2 * third]) + b"".join(reversed(rows)))
    second, calls = night(prompts(60))
    assert [row["output"] for row in bench.rows(second.id)] == [answer(f"row {row}") for row in range(60)]
    assert sum(calls.values()) >= 58


def test_equal_rows_of_a_job_run_once(bench, night):
    """100 rows of 8 different prompts over 4 shards that run one after the other: 8 calls."""
    texts = [f"kind {row % 8}" for row in range(100)]
    job, calls = night(texts)
    assert calls == {f"kind {kind}": 1 for kind in range(8)}
    rows = bench.rows(job.id)
    assert [row["output"] for row in rows] == [answer(text) for text in texts]
    assert job.counts.deduplicated == 92
    assert {row["reused_from"]["row_index"] for row in rows if row["reused_from"]} == set(range(8))


def test_equal_rows_of_one_that_fails_run_themselves(bench, night):
    job, calls = night(["ERROR x"] * 4 + ["fine"] * 4)
    assert calls == {"ERROR x": 4, "fine": 1}
    assert (job.counts.errored, job.counts.succeeded, job.counts.deduplicated) == (4, 1, 3)


def test_sampled_rows_are_computed_once_with_one_seed_only(bench, night):
    """Without a seed each row draws its own; with one seed in the data the same prompt is the same row."""
    _, calls = night(["SEED a"] * 6, temperature=1.0)
    assert calls == {"SEED a": 6}
    table = pa.table({"prompt": ["SEED b"] * 6, "seed": pa.array([1, 1, 1, 2, 2, 2])})
    job, calls = night(table, temperature=1.0)
    assert calls == {"SEED b": 2}
    assert [row["output"] for row in bench.rows(job.id)] == ["b seed=1"] * 3 + ["b seed=2"] * 3
    _, calls = night(["SEED a"] * 6, temperature=1.0)
    assert not calls, "a row's own draw is the same the next night"


def test_a_crash_in_the_middle_leaves_one_outcome_a_row(bench, night, monkeypatch):
    """The engine dies once among copies and leaders; what is committed stays, followers find their leader's part."""
    monkeypatch.setenv("CRASH_FILE", str(bench.folder / "crashed"))
    night(prompts(20))
    texts = prompts(20) + [f"twin {row % 5}" for row in range(40)] + ["CRASH-ONCE x"] * 3
    job, _ = night(texts, shard_rows=100, settings={"shards_in_flight": 1, "checkpoint_rows": 1})
    assert [row["output"] for row in bench.rows(job.id)] == [answer(text) for text in texts]
    assert job.counts.succeeded + job.counts.deduplicated == 63
    assert (bench.folder / "crashed").exists()


def test_a_job_without_the_flag_has_neither_columns_nor_index(bench, night):
    job, _ = night(prompts(5), reuse_results=False)
    assert not {"row_key", "reused_from"} & set(bench.rows(job.id)[0])
    assert not (Path(job.output) / "_keys.bin").exists()
    _, calls = night(prompts(5))
    assert sum(calls.values()) == 5


def test_retry_keeps_the_index_true(bench, night, monkeypatch):
    """A retry of the source's failed row: afterwards its new answer is copied, too."""
    monkeypatch.setenv("ERROR_FILE", str(bench.folder / "failed"))
    texts = prompts(6, {2: "ERROR-ONCE again"})
    first, _ = night(texts)
    assert (first.counts.succeeded, first.counts.errored) == (5, 1)
    assert bench.ledger.retry(first.id) == 1
    bench.run(first.id, shards_in_flight=1)
    assert bench.check(first.id).counts.succeeded == 6
    second, calls = night(texts)
    assert not calls
    assert [row["reused_from"]["row_index"] for row in bench.rows(second.id)] == list(range(6))


def test_answers_under_an_adapter_are_copied_by_its_content(bench, night):
    """A moved adapter is the same one; other weights under the same path are another, and rows of other adapters stay."""
    make_adapter(bench.folder / "adapters" / "job", b"one")
    make_adapter(bench.folder / "adapters" / "other", b"two")
    first, calls = night(prompts(20), adapter=str(bench.folder / "adapters" / "job"))
    assert sum(calls.values()) == 20
    (bench.folder / "adapters" / "job").rename(bench.folder / "adapters" / "moved")
    second, calls = night(prompts(20), adapter=str(bench.folder / "adapters" / "moved"))
    assert not calls
    assert {row["reused_from"]["job_id"] for row in bench.rows(second.id)} == {first.id}
    _, calls = night(prompts(20), adapter=str(bench.folder / "adapters" / "other"))
    assert sum(calls.values()) == 20
    _, calls = night(prompts(20))
    assert sum(calls.values()) == 20, "the model alone is none of them"
    make_adapter(bench.folder / "adapters" / "moved", b"three")
    _, calls = night(prompts(20), adapter=str(bench.folder / "adapters" / "moved"))
    assert sum(calls.values()) == 20
