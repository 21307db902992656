"""The engine as a Python user meets it, on the real model."""

import pytest

from batchinfer import Engine, SamplingParams
from batchinfer.errors import InvalidSpecError, ModelError
from batchinfer.types import ErrorCode, FinishReason, Request, RowStatus

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def engine(model_path):
    with Engine(str(model_path), max_num_seqs=4, num_kv_blocks=64, max_model_len=512) as engine:
        yield engine


def test_it_knows_the_capital_of_france(engine):
    """Text is completed, messages are answered, and the answer ends with the model's own end-of-turn token."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    rows = {
        c.request_id: c for c in engine.generate(["The capital of France is", question], SamplingParams(max_tokens=12))
    }
    assert rows["0"].text.startswith(" Paris")
    assert rows["1"].text == "The capital of France is Paris."
    assert rows["1"].finish_reason is FinishReason.STOP
    assert rows["1"].usage.completion_tokens == len(rows["1"].token_ids) <= 12
    engine.core.check_integrity()


def test_a_stop_string_ends_a_row_and_is_cut_from_it(engine):
    (row,) = engine.generate(["The capital of France is"], SamplingParams(max_tokens=12, stop=("aris",)))
    assert (row.text, row.finish_reason) == (" P", FinishReason.STOP)


def test_a_seeded_row_is_the_same_alone_and_among_others(engine):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7)
    row = Request("row", params, prompt="Once upon a time")
    others = [Request(str(i), SamplingParams(max_tokens=12, temperature=1.0), prompt="Once upon a") for i in range(5)]
    (alone,) = engine.generate([row])
    among = {c.request_id: c for c in engine.generate([*others, row])}
    assert among["row"].token_ids == alone.token_ids
    assert len({among[str(i)].token_ids for i in range(5)}) > 1, "unseeded rows have seeds of their own"


def test_rows_that_cannot_run_are_error_rows(engine):
    rows = [
        Request("long", prompt="word " * 600),
        Request("empty", prompt=" "),
        Request("good", SamplingParams(max_tokens=2), prompt="Hello"),
    ]
    done = {c.request_id: c for c in engine.generate(rows)}
    assert done["long"].error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert done["empty"].error.code is ErrorCode.EMPTY_PROMPT
    assert done["good"].status is RowStatus.SUCCEEDED


def test_what_the_rows_cost_is_what_the_steps_took(engine):
    before = engine.core.stats().step_ns
    done = list(engine.generate(["one", "two", "three"], SamplingParams(max_tokens=5)))
    assert sum(c.device_ns for c in done) == engine.core.stats().step_ns - before


def test_a_bad_setting_or_model_is_refused_by_name(tmp_path):
    with pytest.raises(InvalidSpecError, match="block_size"):
        Engine("model", block_size=0)
    with pytest.raises(ModelError):
        Engine(str(tmp_path / "nothing.gguf"))
