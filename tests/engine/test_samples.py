"""Several samples of a row: each what the row alone would draw with that sample's seed, on one computed prompt."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.engine.config import EngineConfig
from batchinfer.engine.engine import build_engine
from batchinfer.engine.row import sample_seed
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import ErrorCode, Request, RowStatus
from tests.engine.fakes import answer, drain, make_engine
from tests.engine.test_constraint import Free
from tests.engine.test_core import ENGINES, ask, by_id

COLD = {"temperature": 0.01, "seed": 1}
"""So cold that a draw from the fake's logits is always its favourite."""


@pytest.mark.real_model
def test_each_sample_is_what_its_seed_draws_alone(loaded, prompts):
    """And the prompt is computed once, but for the tokens beyond its last full block."""
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=42, ignore_eos=True, logprobs=0)
    prompt = next(p for p in prompts if 40 < len(p) < 90)
    config = EngineConfig(model="real", max_model_len=512, num_kv_blocks=100)
    engine = build_engine(loaded, config)
    engine.add_request(Request("many", params.model_copy(update={"n": 4}), prompt_token_ids=prompt))
    (many,) = drain(engine)
    full = (len(prompt) - 1) // config.block_size * config.block_size
    assert engine.stats().prefill_tokens == len(prompt) + 3 * (len(prompt) - full)
    for i in range(4):
        alone = params.model_copy(update={"seed": sample_seed(42, i)})
        engine.add_request(Request(str(i), alone, prompt_token_ids=prompt))
    singles = by_id(drain(engine))
    samples = many.extra["samples"]
    assert [sample["sample_index"] for sample in samples] == [0, 1, 2, 3]
    for i, sample in enumerate(samples):
        single = singles[str(i)]
        assert (sample["output"], tuple(sample["token_ids"])) == (single.text, single.token_ids)
        assert sample["finish_reason"] == single.finish_reason
        assert sample["logprobs"] == single.extra["logprobs"]
        assert sample["cumulative_logprob"] == single.extra["cumulative_logprob"]
    assert len({tuple(sample["token_ids"]) for sample in samples}) == 4
    assert (many.text, many.token_ids) == (samples[0]["output"], tuple(samples[0]["token_ids"]))
    assert many.usage.completion_tokens == 4 * 8
    assert many.usage.prompt_tokens == len(prompt)


@pytest.mark.real_model
def test_best_of_keeps_the_likeliest(loaded, prompts):
    params = SamplingParams(max_tokens=6, temperature=1.2, seed=3, ignore_eos=True)
    engine = build_engine(loaded, EngineConfig(model="real", max_model_len=512, num_kv_blocks=100))
    engine.add_request(Request("all", params.model_copy(update={"n": 6, "logprobs": 0}), prompt_token_ids=prompts[2]))
    engine.add_request(Request("best", params.model_copy(update={"n": 2, "best_of": 6}), prompt_token_ids=prompts[2]))
    done = by_id(drain(engine))
    ranked = sorted(done["all"].extra["samples"], key=lambda sample: -sample["cumulative_logprob"])
    best = done["best"].extra["samples"]
    assert [sample["token_ids"] for sample in best] == [sample["token_ids"] for sample in ranked[:2]]
    assert [sample["sample_index"] for sample in best] == [0, 1]
    assert done["best"].extra["cumulative_logprob"] == ranked[0]["cumulative_logprob"]
    assert "logprobs" not in best[0]
    assert done["best"].usage.completion_tokens == 6 * 6


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(1, 3), max_size=20), st.integers(0, 9), st.integers(1, 5)), max_size=8
    ),
    shape=ENGINES,
    hopeful=st.booleans(),
    aborts=st.dictionaries(st.integers(0, 12), st.integers(0, 7), max_size=3),
    poisoned=st.sets(st.integers(0, 7), max_size=2),
)
def test_a_row_ends_once_whatever_becomes_of_its_samples(rows, shape, hopeful, aborts, poisoned):
    """Small pools, evictions, aborts and rows that break steps: each row has one completion, all of its samples or none."""
    engine = make_engine(**shape, **({"estimate": lambda _: 1} if hopeful else {}))

    def before_step(scheduled):
        if {str(i) for i in poisoned} & {part.sequence.request_id for part in scheduled}:
            raise RuntimeError("poisoned")

    engine._runner.before_step = before_step
    for i, (prompt, max_tokens, n) in enumerate(rows):
        engine.add_request(ask(str(i), prompt, max_tokens, n=n, **COLD))
    done = by_id(drain(engine, before=lambda step: engine.abort(str(aborts.get(step)))))
    assert len(done) == len(rows)
    for i, (prompt, max_tokens, n) in enumerate(rows):
        completion = done[str(i)]
        room = min(shape["max_model_len"] - len(prompt), shape["num_blocks"] * shape["block_size"] - len(prompt) + 1)
        if completion.status is RowStatus.SUCCEEDED:
            expected = answer(prompt, min(max_tokens, room))
            samples = completion.extra.get("samples", [{"token_ids": list(completion.token_ids)}])
            assert [sample["token_ids"] for sample in samples] == [expected] * n
            assert completion.usage.completion_tokens == n * len(expected)
        elif completion.status is RowStatus.ERRORED:
            assert i in poisoned or not prompt or room < min(1, max_tokens)
        else:
            assert i in aborts.values()
    assert sum(c.device_ns for c in done.values()) == engine.stats().step_ns
    assert engine.stats().used_blocks == 0


def test_an_error_of_one_sample_ends_the_row_and_frees_the_others():
    engine = make_engine()
    engine.add_request(ask("a", [1, 2, 3], max_tokens=30, n=3, ignore_eos=True, **COLD))
    engine.add_request(ask("b", [1, 2, 4], max_tokens=5, ignore_eos=True))
    engine.step()
    third = [s for s in engine._scheduler.running if s.request_id == "a"][2]

    class Broken(Free):
        def accept(self, token_id):
            raise ValueError("no such token")

    third.constraint = Broken()
    done = by_id(drain(engine))
    assert done["a"].error.code is ErrorCode.ENGINE_ERROR
    assert list(done["b"].token_ids) == answer([1, 2, 4], 5, ())
    assert engine.stats().used_blocks == 0


def test_samples_at_temperature_0_are_refused():
    with pytest.raises(ValueError, match="3 samples at temperature 0 are 3 times the same"):
        SamplingParams(n=3)
    with pytest.raises(ValueError, match=r"best_of \(1\) is below n \(2\)"):
        SamplingParams(n=2, best_of=1, temperature=1)
