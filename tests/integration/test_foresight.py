"""estimate, explain and forecast: against counts made by hand, through both doors, and after a run."""

import json
from contextlib import contextmanager
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from fastapi.testclient import TestClient

from batchinfer.api.app import create_app
from batchinfer.cli.main import cli
from batchinfer.errors import ModelError, UserError
from batchinfer.jobs.explain import longest_first
from batchinfer.jobs.foresight import Foresight, Question
from batchinfer.jobs.service import JobService
from batchinfer.jobs.spec import JobSpec
from batchinfer.jobs.survey import sample_ranges
from batchinfer.jobs.token_process import TokenProcess
from batchinfer.sampling_params import SamplingParams
from batchinfer.settings import Settings
from batchinfer.types import ErrorCode, Request, RowError
from tests.played import complete
from tests.small_model import gguf_path, tokenizer

RATE = Question(usd_per_hour="0.10")


class Words:
    """An encoder whose tokens are words."""

    max_model_len = 200

    @staticmethod
    def encode(requests):
        texts = [r.prompt or " ".join(["<bos>", *(m["content"] for m in r.messages), "<answer>"]) for r in requests]
        return [[hash(word) % 10**9 for word in text.split()] for text in texts]


@contextmanager
def words(_model):
    yield Words()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def service(home):
    made = JobService.connect(f"sqlite:///{home / 'batchinfer.db'}", "memory://")
    yield made
    made.close()


@pytest.fixture
def foresight(service):
    return Foresight(service.ledger, "default", make_encoder=words)


def spec_of(path, prompts, **fields):
    pq.write_table(pa.table({"prompt": prompts}), path, row_group_size=100)
    return JobSpec(**{"inputs": (str(path),), "model": "org/name", "max_tokens": 10} | fields)


def some(word, number):
    return " ".join([word] * number)


def test_a_small_input_is_counted_exactly(foresight, tmp_path):
    spec = spec_of(tmp_path / "a.parquet", ["one two three", "", "four", some("x", 300)])
    view = foresight.estimate(spec, RATE)
    assert (view.num_rows, view.sampled_rows, view.is_whole, view.runnable_rows) == (4, 4, True, 2)
    assert view.errors == {"empty_prompt": 1, "context_length_exceeded": 1}
    assert view.prompt_tokens.low == view.prompt_tokens.high == 4
    assert (view.completion_tokens.low, view.completion_tokens.high) == (0, 20)
    assert view.cost_usd is None


def test_a_large_input_is_sampled_and_the_interval_holds_the_truth(foresight, tmp_path):
    """Documents grow along the file: a sample of the beginning would be far off."""
    lengths = [1 + i // 40 for i in range(4000)]
    view = foresight.estimate(spec_of(tmp_path / "b.parquet", [some("w", n) for n in lengths]), RATE)
    assert not view.is_whole
    assert view.sampled_rows == 512
    assert view.prompt_tokens.low <= sum(lengths) <= view.prompt_tokens.high
    assert view.prompt_tokens.high < 1.5 * sum(lengths)


@pytest.mark.parametrize(("rows", "sample"), [(0, 5), (3, 5), (100, 10), (1000, 512), (513, 512), (10**12, 512)])
def test_samples_are_rows_of_the_input_spread_over_it(rows, sample):
    ranges = list(sample_ranges(rows, sample))
    assert all(0 <= start < end <= rows for start, end in ranges)
    assert all(one[1] <= other[0] for one, other in pairwise(ranges))
    assert sum(end - start for start, end in ranges) <= min(rows, sample)
    assert ranges == list(sample_ranges(rows, sample))


def test_moving_the_instruction_saves_what_it_says(foresight, tmp_path):
    """The advice is followed, and the next explanation must show the saving."""
    documents = [f"doc{i} " + some(f"d{i}", 30) for i in range(50)]
    instruction = some("please", 40)
    after = spec_of(tmp_path / "after.parquet", [f"{d} {instruction}" for d in documents], min_tokens=10)
    before = spec_of(tmp_path / "before.parquet", [f"{instruction} {d}" for d in documents], min_tokens=10)
    bad, good = foresight.explain(after, RATE), foresight.explain(before, RATE)
    advice = next(one for one in bad.advice if one.kind == "instruction_first")
    computed = bad.prompt_tokens * (1 - bad.expected_hit_rate) + 50 * 10
    now = good.prompt_tokens * (1 - good.expected_hit_rate) + 50 * 10
    assert advice.saved_share == pytest.approx((computed - now) / computed, abs=1e-5)
    assert f"{advice.saved_share:.0%} less" in advice.text
    assert not [one for one in good.advice if one.kind == "instruction_first"]


def test_what_the_chat_template_puts_behind_cannot_be_moved(foresight, tmp_path):
    rows = [[{"role": "user", "content": f"doc{i} " + some("please", 16)}] for i in range(20)]
    pq.write_table(pa.table({"messages": rows}), tmp_path / "chat.parquet")
    spec = JobSpec(inputs=(str(tmp_path / "chat.parquet"),), model="org/name", max_tokens=1)
    advice = next(one for one in foresight.explain(spec, RATE).advice if one.kind == "instruction_first")
    assert "the same 16 tokens" in advice.text


def test_copies_groups_and_lengths(foresight, tmp_path):
    prompts = [some("a", 32) + " " + some(f"q{i % 10}", 8) for i in range(100)]
    view = foresight.explain(spec_of(tmp_path / "c.parquet", prompts), RATE)
    assert (view.unique_rows, view.prompt_tokens, view.looked_at) == (10, 4000, 100)
    assert view.shared_tokens == 99 * 32
    assert view.shared_share == view.expected_hit_rate == pytest.approx(99 * 32 / 4000)
    assert [(g.num_tokens, g.num_rows) for g in view.groups] == [(32, 100)]
    assert [(b.low, b.high, b.num_rows) for b in view.histogram] == [(32, 63, 100)]
    copies = next(one for one in view.advice if one.kind == "reuse_results")
    # a copy computes its last, unfinished block and its answer, here 8 and, half-way to its limit, 5 tokens
    assert copies.saved_tokens == 90 * 13
    assert copies.saved_share == pytest.approx(90 * 13 / (4000 - 99 * 32 + 500), abs=1e-6)
    assert "90 of 100 rows" in copies.text


def test_sorting_is_advised_where_the_cache_loses_what_is_shared(foresight, tmp_path):
    prompts = [some(f"d{i % 60}", 160) for i in range(180)]
    small = Question(usd_per_hour="1", kv_blocks=100, window_rows=60)
    scattered = foresight.explain(spec_of(tmp_path / "d.parquet", prompts), small)
    ordered = foresight.explain(spec_of(tmp_path / "e.parquet", sorted(prompts)), small)
    advice = next(one for one in scattered.advice if one.kind == "sort_rows")
    assert scattered.expected_hit_rate < 0.1 < ordered.expected_hit_rate
    gained = (ordered.expected_hit_rate - scattered.expected_hit_rate) * scattered.prompt_tokens
    assert advice.saved_tokens == pytest.approx(gained, rel=0.01)
    assert not [one for one in ordered.advice if one.kind == "sort_rows"]


def test_the_first_rows_alone(foresight, tmp_path):
    seen = []
    spec = spec_of(tmp_path / "f.parquet", [f"w{i}" for i in range(300)])
    view = foresight.explain(spec, Question(usd_per_hour="1", max_rows=200), on_progress=lambda *at: seen.append(at))
    assert (view.num_rows, view.looked_at, view.unique_rows) == (300, 200, 200)
    assert view.estimate.sampled_rows == 300
    assert seen == [(128, 200), (200, 200)]


def test_an_even_share_and_the_largest_shard():
    assert longest_first([10, 10, 10, 10], 1) == 1.0
    assert longest_first([40], 4) == 4.0
    assert 1.0 < longest_first([10] * 16, 4) < 1.3
    assert longest_first([], 4) == 1.0


def test_a_finished_job_teaches_the_next_estimate(service, foresight, tmp_path):
    """Ten rows at 20 answer tokens and a million nanoseconds each: the next job of that spec expects the same."""
    spec = spec_of(tmp_path / "g.parquet", ["a b c"] * 10, max_tokens=64, model="org/taught")
    for number in range(6):
        view, _ = service.submit(spec.model_copy(update={"output": str(tmp_path / f"out{number}")}), base=None)
        job = service.ledger.get_job(view.id)
        service.ledger.note_forecast(job, {"est_prompt_tokens": 30})
        complete(service.ledger, view.id)
    found = foresight.estimate(spec, Question(usd_per_hour="3.6"))
    assert found.completion_tokens.expected == pytest.approx(200, rel=0.1)
    assert found.length_basis == "6 past jobs of this spec"
    # 10 ms device for 100 + 20 tokens a row, here 30 prompt tokens in all and 200 answers; a thousandth of a dollar a second
    seconds = 0.01 / 1200 * (30 + 200)
    assert found.device_seconds.expected == pytest.approx(seconds, rel=0.2)
    assert float(found.cost_usd.expected) == pytest.approx(seconds / 1000, rel=0.2)
    assert found.speed_basis == "6 past jobs"
    # another template is another spec: its answers may be anything, its speed is known all the same
    other = foresight.estimate(spec.model_copy(update={"system": "Be brief."}), RATE)
    assert "limits" in other.length_basis
    assert other.speed_basis == "6 past jobs"
    assert Foresight(service.ledger, "stranger", make_encoder=words).estimate(spec, RATE).speed_basis == "unknown"


# -- the real tokenizer --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def real():
    with TokenProcess(str(gguf_path())) as process:
        yield process


@pytest.mark.real_model
def test_the_process_counts_as_transformers_does(real):
    texts = ["Hello there", "Zwölf Boxkämpfer", "1234567", "\ud800", " "]
    made = [Request(str(i), SamplingParams(), prompt=text) for i, text in enumerate(texts)]
    chat = [{"role": "user", "content": "Hi"}]
    found = real.encode([*made, Request("c", SamplingParams(), messages=chat)])
    assert found[:2] == [tokenizer()(text)["input_ids"] for text in texts[:2]]
    assert [e.code for e in found if isinstance(e, RowError)] == [ErrorCode.INVALID_ENCODING, ErrorCode.EMPTY_PROMPT]
    text = tokenizer().apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert found[-1] == tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert real.max_model_len == 8192


def test_a_model_that_is_not_there_is_a_sentence():
    with pytest.raises(ModelError, match="no model at org/nowhere"):
        TokenProcess("org/nowhere")


@pytest.mark.real_model
def test_a_tokenizer_that_died_is_an_error(real):
    with TokenProcess(str(gguf_path())) as process:
        process._child.kill()
        process._child.wait()
        with pytest.raises(UserError) as caught:
            process.encode([Request("1", SamplingParams(), prompt="x")])
    assert caught.value.code == "tokenizer_failed"


@pytest.mark.real_model
def test_both_doors_say_the_same(home, service, tmp_path, monkeypatch):
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["Hello there", "Hello there", ""]}), path)
    monkeypatch.setenv("BATCHINFER_HOME", str(home))
    words = [str(path), "--model", str(gguf_path()), "--max-tokens", "4", "--json"]
    body = {"inputs": [str(path)], "model": str(gguf_path()), "max_tokens": 4}
    with TestClient(create_app(Settings.load(), service=service), base_url="http://localhost") as client:
        done = CliRunner().invoke(cli, ["explain", *words], standalone_mode=False, catch_exceptions=False)
        explained, estimated = (client.post(f"/v1/jobs:{verb}", json=body) for verb in ("explain", "estimate"))
        assert explained.status_code == 200, explained.text
        assert json.loads(done.stdout) == explained.json()
        assert estimated.json() == explained.json()["estimate"]
        missing = client.post("/v1/jobs:estimate", json=body | {"inputs": [str(tmp_path / "none.parquet")]})
        assert missing.status_code in (400, 404, 422)
