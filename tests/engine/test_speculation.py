"""Guesses change nothing but the number of steps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.engine.config import EngineConfig
from batchinfer.engine.speculation import LENGTHS, NgramIndex, Speculator, StepCosts, expected_tokens
from batchinfer.errors import InvalidSpecError
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Request
from tests.engine.fakes import VOCAB, drain, make_engine
from tests.engine.test_progress import answers, requests_of


def repeating(context):
    """A model that soon goes round in circles: what it says depends on the last token alone."""
    return context[-1] * 3 % VOCAB


def run(requests, speculator, **limits):
    engine = make_engine(num_blocks=limits.pop("num_blocks", 256), speculator=speculator, model=repeating, **limits)
    for request in requests:
        engine.add_request(request)
    return answers(drain(engine)), engine.stats()


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=12), min_size=1, max_size=12),
    num_blocks=st.sampled_from([16, 40, 256]),
    budget=st.sampled_from([5, 16, 64]),
    max_num_seqs=st.sampled_from([1, 3, 16]),
    caching=st.booleans(),
)
def test_answers_are_those_without_guesses(prompts, num_blocks, budget, max_num_seqs, caching):
    """Greedy and drawn, penalties, stop strings, min_tokens, log-probabilities, samples; with chunks and tiny pools."""
    requests = requests_of(prompts, max_tokens=20)
    plain, _ = run(requests, None)
    guessed, _ = run(
        requests, Speculator(always=True), num_blocks=num_blocks, max_num_batched_tokens=budget, caching=caching,
        max_num_seqs=max_num_seqs,
    )  # fmt: skip
    assert guessed == plain


def test_right_guesses_save_steps_and_count_once():
    request = Request("a", SamplingParams(max_tokens=60, ignore_eos=True), prompt_token_ids=[1, 3, 9])
    _, plain = run([request], None)
    _, guessed = run([request], Speculator(always=True), max_num_batched_tokens=64)
    assert plain.completion_tokens == guessed.completion_tokens == 60
    assert (plain.guessed_tokens, plain.accepted_tokens) == (0, 0)
    assert guessed.steps < plain.steps / 3
    assert guessed.accepted_tokens == plain.steps - guessed.steps
    assert guessed.guessed_tokens >= guessed.accepted_tokens


def test_guesses_are_what_followed_last_time():
    index = NgramIndex()
    assert index.guess([1, 2, 3], 4) == []
    assert index.guess([1, 2, 3, 4, 5, 1, 2], 4) == [3, 4, 5, 1], "two tokens that were there before"
    assert index.guess([1, 2, 3, 4, 5, 1, 2, 9, 1, 2], 2) == [9, 1], "the last time counts"
    assert index.guess([1, 2, 3, 4, 5, 1, 2, 9, 1, 2, 3, 5, 1, 2, 3], 1) == [5], "three tokens before two"


def test_costs_lie_on_the_line_between_what_was_measured():
    costs = StepCosts()
    assert costs.of(3) is None
    costs.observe(2, 100)
    assert (costs.of(1), costs.of(2), costs.of(50)) == (100, 100, 100)
    costs.observe(10, 500)
    assert costs.of(6) == pytest.approx(300)
    assert costs.of(40) == 500


def test_expected_tokens():
    assert expected_tokens(0, 4) == 1
    assert expected_tokens(1, 4) == 5
    assert expected_tokens(0.5, 2) == 1.75


@pytest.mark.parametrize(("cost_of_more", "is_on"), [(1.1, True), (20.0, False)])
def test_it_is_on_only_where_it_pays(cost_of_more, is_on):
    """Two sequences: guesses that cost a tenth are worth it, guesses that cost twenty steps are not."""
    speculator = Speculator()
    assert speculator.length(2) == 0, "nothing is measured yet"
    for _ in range(50):
        speculator.observe_step(2, 1000)
        for count in LENGTHS:
            speculator.observe_step(2 * (1 + count), int(1000 * cost_of_more))
    assert (speculator.length(2) > 0) == is_on


def test_it_gives_up_on_wrong_guesses_and_tries_again_later():
    speculator = Speculator()
    engine = make_engine()
    engine.add_request(Request("a", SamplingParams(max_tokens=500, ignore_eos=True), prompt_token_ids=[1, 2, 1, 2]))
    engine.step()
    (sequence,) = engine._scheduler.running
    for count in (1, 3, 5, 9):
        speculator.observe_step(count, 1000 + 100 * count)
    speculator.guess(sequence, 4)
    while speculator.length(1):
        speculator.observe_guesses(sequence, 4, 0)
    tries = [speculator.length(1) for _ in range(200)]
    assert any(tries)
    assert tries.count(0) > 50


def test_a_strange_setting_is_refused():
    with pytest.raises(InvalidSpecError, match="speculation"):
        EngineConfig(model="m", speculation="always")
