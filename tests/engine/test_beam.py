"""Beam search against ``generate(num_beams=...)`` of transformers on the unpatched model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.engine.config import EngineConfig
from batchinfer.engine.engine import build_engine
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import ErrorCode, Request, RowStatus
from tests.engine.conftest import EOS
from tests.engine.fakes import answer, drain, make_engine
from tests.engine.test_core import ENGINES, ask, by_id

CASES = [(2, 1.0, 1, 12), (4, 1.0, 4, 12), (3, 2.0, 2, 30), (5, -0.5, 3, 20)]


def searched(model, prompt, width, length_penalty, n, max_tokens):
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        num_beams=width,
        num_return_sequences=n,
        length_penalty=length_penalty,
        max_new_tokens=max_tokens,
        eos_token_id=EOS,
        pad_token_id=EOS,
        return_dict_in_generate=True,
        output_scores=True,
    )
    beams = []
    for line in output.sequences[:, len(prompt) :].tolist():
        end = line.index(EOS) + 1 if EOS in line else len(line)
        beams.append(line[:end])
    return beams, output.sequences_scores.tolist()


@pytest.mark.real_model
def test_beams_and_scores_are_those_of_generate(loaded, prompts, reference_model):
    """All searches in one batch with plain rows, whose answers they must not change."""
    engine = build_engine(loaded, EngineConfig(model="real", max_model_len=512, num_kv_blocks=200))
    chosen = [p for p in prompts if 3 < len(p) < 60][:4]
    for i, (prompt, (width, penalty, n, most)) in enumerate(zip(chosen, CASES, strict=True)):
        params = SamplingParams(beam_width=width, length_penalty=penalty, n=n, max_tokens=most)
        engine.add_request(Request(str(i), params, prompt_token_ids=prompt))
        engine.add_request(Request(f"plain {i}", SamplingParams(max_tokens=12), prompt_token_ids=prompt))
    done = by_id(drain(engine))
    for i, (prompt, (width, penalty, n, most)) in enumerate(zip(chosen, CASES, strict=True)):
        beams, scores = searched(reference_model, prompt, width, penalty, n, most)
        completion = done[str(i)]
        found = completion.extra.get("samples") or [
            {"token_ids": list(completion.token_ids), "cumulative_logprob": completion.extra["cumulative_logprob"]}
        ]
        assert [sample["token_ids"] for sample in found] == beams
        ours = [sample["cumulative_logprob"] / len(sample["token_ids"]) ** penalty for sample in found]
        assert ours == pytest.approx(scores, abs=2e-3)
        assert completion.text == loaded.tokenizer.decode(beams[0], skip_special_tokens=True)
    alone = build_engine(loaded, EngineConfig(model="real", max_model_len=512, num_kv_blocks=200))
    for i, prompt in enumerate(chosen):
        alone.add_request(Request(f"plain {i}", SamplingParams(max_tokens=12), prompt_token_ids=prompt))
    for name, completion in by_id(drain(alone)).items():
        assert done[name].token_ids == completion.token_ids


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(1, 3), max_size=12), st.integers(0, 6), st.integers(1, 4)), max_size=5
    ),
    shape=ENGINES,
    abort=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 4)),
)
def test_searches_in_small_pools_end_once_and_leave_plain_rows_alone(rows, shape, abort):
    engine = make_engine(**shape)
    for i, (prompt, max_tokens, width) in enumerate(rows):
        engine.add_request(ask(str(i), prompt, max_tokens, beam_width=width))
        engine.add_request(ask(f"plain {i}", prompt, max_tokens))
    done = by_id(drain(engine, before=lambda step: abort and step == abort[0] and engine.abort(str(abort[1]))))
    assert len(done) == 2 * len(rows)
    for i, (prompt, max_tokens, _) in enumerate(rows):
        plain, found = done[f"plain {i}"], done[str(i)]
        assert found.status in (plain.status, RowStatus.CANCELLED)
        if plain.status is RowStatus.SUCCEEDED:
            assert list(plain.token_ids) == answer(prompt, min(max_tokens, len(plain.token_ids)))
    assert sum(c.device_ns for c in done.values()) == engine.stats().step_ns
    assert engine.stats().used_blocks == 0


def test_a_failing_beam_is_an_error_row():
    engine = make_engine()

    def before(scheduled):
        if any(part.sequence.num_tokens > 6 and part.sequence.request_id == "a" for part in scheduled):
            raise RuntimeError("poisoned")

    engine._runner.before_step = before
    engine.add_request(ask("a", [1, 2, 3], max_tokens=9, beam_width=3, ignore_eos=True))
    engine.add_request(ask("b", [1, 2, 4], max_tokens=9, ignore_eos=True))
    done = by_id(drain(engine))
    assert done["a"].error.code is ErrorCode.ENGINE_ERROR
    assert list(done["b"].token_ids) == answer([1, 2, 4], 9, ())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 1}, "goes without temperature"),
        ({"stop": ["x"], "logprobs": 1}, "goes without stop and logprobs"),
        ({"n": 4}, r"n \(4\) is above beam_width \(3\)"),
    ],
)
def test_what_a_search_cannot_do_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(beam_width=3, **fields)
