"""An answer that was cut off goes on in another engine, and nobody can tell."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.engine.config import EngineConfig
from batchinfer.engine.engine import build_engine
from batchinfer.engine.wire import request_from_json, request_to_json
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Request, SampleProgress
from tests.engine.fakes import VOCAB, drain, make_engine

PARAMS = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    "penalties": {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "stop": {"stop": ("><",), "min_tokens": 5, "ignore_eos": True},
    "logprobs": {"temperature": 1.0, "seed": 8, "logprobs": 2, "prompt_logprobs": 1},
    "samples": {"temperature": 1.0, "seed": 9, "n": 3, "logprobs": 0},
    "best of": {"temperature": 1.0, "seed": 9, "n": 1, "best_of": 3},
    "bad words": {"logit_bias": {4: 5.0, 6: -3.0}, "temperature": 1.0, "seed": 2},
}


def answers(completions):
    """All that a row's owner sees of its answer; what the cache had is not part of it."""
    return {
        c.request_id: (c.status, c.text, c.token_ids, c.finish_reason, c.usage.completion_tokens, json.dumps(c.extra))
        for c in completions
    }


def cut(engine, requests, num_steps):
    """Run so many steps; what ended, and requests that go on, having crossed a pipe as they do."""
    for request in requests:
        engine.add_request(request)
    ended = [completion for _ in range(num_steps) for completion in engine.step()]
    progress = engine.progress()
    left = {r.request_id: r for r in requests} | {c.request_id: None for c in ended}
    on = [replace(r, progress=progress.get(r.request_id, ())) for r in left.values() if r is not None]
    return ended, [request_from_json(json.loads(json.dumps(request_to_json(request)))) for request in on]


def requests_of(prompts, max_tokens=10):
    kinds = list(PARAMS.items())
    return [
        Request(
            f"{i} {kinds[i % len(kinds)][0]}",
            SamplingParams(max_tokens=max_tokens, **kinds[i % len(kinds)][1]),
            prompt_token_ids=prompt,
        )
        for i, prompt in enumerate(prompts)
    ]


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=9), min_size=8, max_size=12),
    cuts=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    caching=st.booleans(),
)
def test_a_cut_row_ends_as_if_it_had_not_been_cut(prompts, cuts, caching):
    """Cut once, twice, thrice, with every kind of parameters, into engines with full and with tiny pools."""
    requests = requests_of(prompts)
    whole = make_engine(num_blocks=256, caching=caching)
    for request in requests:
        whole.add_request(request)
    expected = answers(drain(whole))
    found, left = [], requests
    for num_steps in cuts:
        ended, left = cut(make_engine(num_blocks=64, caching=caching), left, num_steps)
        found += ended
    last = make_engine(num_blocks=32, caching=caching)
    for request in left:
        last.add_request(request)
    assert answers([*found, *drain(last)]) == expected


def test_tokens_that_are_there_are_not_generated_again():
    engine = make_engine()
    ended, [left] = cut(
        engine, [Request("a", SamplingParams(max_tokens=9, ignore_eos=True), prompt_token_ids=[1, 2])], 6
    )
    assert not ended
    assert len(left.progress[0].token_ids) == 6
    other = make_engine()
    other.add_request(left)
    (completion,) = drain(other)
    assert other.stats().completion_tokens == 3
    assert completion.usage.completion_tokens == 9, "billed once, and all of them"


@pytest.mark.parametrize(
    "progress",
    [
        SampleProgress(tuple([1] * 4)),
        SampleProgress((1, VOCAB + 7)),
        SampleProgress((1, -1)),
        SampleProgress((1, 0, 3)),
        SampleProgress((1, 2), scores=((1, -0.5, 1, ()),)),
    ],
    ids=["too long", "no such token", "a negative token", "beyond its end", "scores for one of two"],
)
def test_what_cannot_be_the_rows_own_is_dropped(progress):
    """A damaged file costs the tokens in it, and nothing else."""
    params = SamplingParams(max_tokens=4, logprobs=0 if progress.scores else None)
    request = Request("a", params, prompt_token_ids=[5, 6])
    plain, damaged = make_engine(), make_engine()
    plain.add_request(request)
    damaged.add_request(replace(request, progress=(progress,)))
    assert answers(drain(damaged)) == answers(drain(plain))


@pytest.mark.real_model
def test_a_real_model_goes_on_with_the_same_bytes(loaded):
    """Cut in the middle of a stop string and of a character, with penalties and log-probabilities, in one float32 model."""
    texts = ["The sky is blue because", "Count: one, two, three,", "Write three emojis:"]
    kinds = [
        {"logprobs": 3, "repetition_penalty": 1.2},
        {"temperature": 0.9, "seed": 4, "stop": (", five", "nine"), "logprobs": 1},
        {"temperature": 1.2, "seed": 6, "presence_penalty": 0.5, "min_tokens": 8},
    ]
    requests = [
        Request(str(i), SamplingParams(max_tokens=12, **kind), prompt=text)
        for i, (text, kind) in enumerate(zip(texts, kinds, strict=True))
    ]
    config = EngineConfig(model="unused", device="cpu", num_kv_blocks=64, max_num_seqs=4)
    whole = build_engine(loaded, config)
    for request in requests:
        whole.add_request(request)
    expected = answers(drain(whole))
    for num_steps in (2, 5, 9):
        ended, left = cut(build_engine(loaded, config), requests, num_steps)
        other = build_engine(loaded, config)
        for request in left:
            other.add_request(request)
        assert answers([*ended, *drain(other)]) == expected
