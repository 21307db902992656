"""Feeding an engine from an iterable: lazily, bounded, and leaving nothing behind."""

import itertools

import pytest

from batchinfer.engine.generate import as_request, generate
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Request, RowStatus
from tests.engine.fakes import answer, make_engine

PARAMS = SamplingParams(max_tokens=4)


def endless(pulled):
    for i in itertools.count():
        pulled.append(i)
        yield Request(f"row{i}", PARAMS, prompt_token_ids=[i % 30 + 1, 5])


def test_every_prompt_gets_one_completion():
    engine = make_engine()
    prompts = [[i + 1, 2] for i in range(20)]
    requests = (Request(str(i), PARAMS, prompt_token_ids=prompt) for i, prompt in enumerate(prompts))
    done = {c.request_id: list(c.token_ids) for c in generate(engine, requests, None, window=3)}
    assert done == {str(i): answer(prompt, 4) for i, prompt in enumerate(prompts)}


def test_an_endless_source_is_pulled_only_as_far_as_the_window():
    engine = make_engine()
    pulled = []
    completions = generate(engine, endless(pulled), None, window=5)
    assert pulled == []
    for number_seen in range(1, 30):
        next(completions)
        assert len(pulled) <= number_seen + 5


def test_a_caller_who_stops_early_leaves_an_idle_engine():
    engine = make_engine()
    completions = generate(engine, endless([]), None, window=5)
    next(completions)
    completions.close()
    assert not engine.has_unfinished()
    assert engine.stats().used_blocks == 0
    (again,) = generate(engine, [Request("row1", PARAMS, prompt_token_ids=[9])], None, window=5)
    assert list(again.token_ids) == answer([9], 4)


def test_a_source_that_raises_passes_its_error_on_and_leaves_an_idle_engine():
    engine = make_engine()

    def broken():
        yield Request("a", PARAMS, prompt_token_ids=[1, 2, 3])
        raise OSError("disk is gone")

    with pytest.raises(OSError, match="disk is gone"):
        list(generate(engine, broken(), None, window=5))
    assert not engine.has_unfinished()


def test_bad_rows_come_out_beside_good_ones():
    engine = make_engine()
    rows = [Request("empty", PARAMS, prompt_token_ids=[]), Request("good", PARAMS, prompt_token_ids=[1])]
    status = {c.request_id: c.status for c in generate(engine, rows, None, window=1)}
    assert status == {"empty": RowStatus.ERRORED, "good": RowStatus.SUCCEEDED}


def test_text_and_messages_become_requests_named_by_their_index():
    messages = [{"role": "user", "content": "Hi"}]
    assert as_request(3, "Hello", PARAMS) == Request("3", PARAMS, prompt="Hello")
    assert as_request(4, messages, None) == Request("4", SamplingParams(), messages=messages)
    request = Request("mine", PARAMS, prompt="x")
    assert as_request(5, request, SamplingParams(max_tokens=1)) is request
