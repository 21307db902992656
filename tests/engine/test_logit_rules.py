"""Bias, penalties and barred tokens: the numbers of transformers' processors, and of the formulas where it has none."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TypicalLogitsWarper,
)

from batchinfer.engine.config import EngineConfig
from batchinfer.engine.engine import build_engine
from batchinfer.engine.logit_rules import LogitRules, TokenCounts
from batchinfer.engine.sampler import Sampler, SamplingRow, _weights
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import ErrorCode, Request
from tests.engine.conftest import EOS
from tests.engine.fakes import drain

VOCAB = 60


def scores(rows, seed=0, vocab=VOCAB):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def rules(prompt, answer, bad_words=(), **params):
    made = LogitRules(SamplingParams(**params), prompt, bad_words)
    for token in answer:
        made.append(token)
    return made


def changed(logits, made, position=0, **more):
    """The logits as the sampler sees them after the row's changes."""
    own = logits.clone()
    Sampler({0})._change(own, [SamplingRow(made.params, 0, position, made, **more)])
    return own


class Fixed:
    """A constraint that always allows the same."""

    def __init__(self, mask):
        self._mask = mask

    def mask(self):
        return self._mask


def processed(logits, tokens, *processors):
    return LogitsProcessorList(processors)(torch.tensor([tokens]), logits.clone())


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=40)


@settings(max_examples=60, deadline=None)
@given(prompt=TOKENS.filter(len), answer=TOKENS, penalty=st.floats(0.5, 2), seed=st.integers(0, 99))
def test_repetition_penalty_is_that_of_transformers(prompt, answer, penalty, seed):
    logits = scores(1, seed)
    expected = processed(logits, prompt + answer, RepetitionPenaltyLogitsProcessor(penalty))
    assert torch.equal(changed(logits, rules(prompt, answer, repetition_penalty=penalty)), expected)


@settings(max_examples=60, deadline=None)
@given(prompt=TOKENS, answer=TOKENS, presence=st.floats(-2, 2), frequency=st.floats(-2, 2))
def test_presence_and_frequency_follow_openais_formula_and_leave_the_prompt_alone(prompt, answer, presence, frequency):
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, with c counted in the answer."""
    logits = scores(1)
    made = rules(prompt, answer, presence_penalty=presence, frequency_penalty=frequency)
    found = changed(logits, made)[0].tolist()
    for token, value in enumerate(logits[0].tolist()):
        count = answer.count(token)
        assert math.isclose(found[token], value - count * frequency - (count > 0) * presence, abs_tol=1e-4)


def test_the_order_is_bias_then_repetition_then_differences():
    """In transformers too a bias comes before the repetition penalty; the rest is by hand."""
    logits = scores(1)
    made = rules(
        [5, 6], [7, 7], repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={5: 2, 7: -9}
    )
    expected = processed(
        logits,
        [5, 6, 7, 7],
        SequenceBiasLogitsProcessor([[[5], 2.0], [[7], -9.0]]),
        RepetitionPenaltyLogitsProcessor(1.5),
    )
    expected[0, 7] -= 0.5 + 2 * 0.25
    torch.testing.assert_close(changed(logits, made), expected, rtol=0, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    words=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5),
    answer=st.lists(st.integers(0, 5), max_size=12),
)
def test_bad_words_are_those_of_transformers(words, answer):
    """Few tokens, so that words overlap and repeat."""
    logits = scores(1)
    processor = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=None)
    expected = processed(logits, [9, *answer], processor)
    assert torch.equal(changed(logits, rules([9], answer, bad_words=words)), expected)


def test_only_allowed_ids_can_come_and_a_mask_narrows_them_further():
    logits = scores(1)
    made = rules([1], [], allowed_token_ids=[3, 33, 50, 33])
    assert changed(logits, made).isfinite().nonzero()[:, 1].tolist() == [3, 33, 50]
    words = np.zeros(2, np.uint32)
    words[0] |= np.uint32(1 << 31) | np.uint32(1 << 3)
    words[1] |= np.uint32(1 << (33 - 32))
    mask = torch.from_numpy(words.view(np.int32))
    assert changed(logits, made, constraint=Fixed(mask)).isfinite().nonzero()[:, 1].tolist() == [3, 33]
    alone = SamplingRow(SamplingParams(), 0, 0, None, Fixed(mask))
    (token,) = Sampler().sample(logits, [alone])
    assert token == max((3, 31, 33), key=lambda i: logits[0, i].item())


def test_a_mask_that_allows_nothing_is_an_error_of_its_row_alone():
    found = Sampler().sample(
        scores(2), [SamplingRow(SamplingParams(), 0, 0, None, Fixed(torch.zeros(2, dtype=torch.int32))), plain(0)]
    )
    assert found[0].code is ErrorCode.ENGINE_ERROR
    assert found[1] == scores(2)[1].argmax().item()


def plain(seed):
    return SamplingRow(SamplingParams(), seed, 0)


@pytest.mark.parametrize("mass", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("vocab", [50, 3000])
def test_typical_p_keeps_what_transformers_keeps(mass, vocab):
    logits = scores(16, vocab, vocab)
    params = SamplingParams(temperature=1.0, typical_p=mass)
    weights = _weights(logits - logits.max(1, keepdim=True).values, [params] * 16)
    expected = TypicalLogitsWarper(mass)(torch.zeros(16, 1, dtype=torch.long), logits.clone())
    assert ((weights > 0) == expected.isfinite()).all()


def test_rows_with_rules_and_without_choose_in_one_batch_what_they_choose_alone():
    rng = random.Random(3)
    logits = scores(40, 7)
    rows = []
    for i in range(40):
        params = {"temperature": rng.choice([0, 1.0])}
        params |= rng.choice(
            [{}, {"repetition_penalty": 1.4}, {"logit_bias": {3: 5.0}}, {"frequency_penalty": 0.7}, {"min_tokens": 3}]
        )
        made = rules([1, 2], [rng.randrange(VOCAB) for _ in range(9)], [(4, 5), (6,)] if i % 5 == 0 else (), **params)
        rows.append(SamplingRow(made.params, i, 2, made if i % 3 else None))
    together = Sampler({0}).sample(logits, rows)
    before = logits.clone()
    assert together == [Sampler({0}).sample(logits[i : i + 1], [rows[i]])[0] for i in range(40)]
    assert torch.equal(logits, before), "the caller's logits are not touched"


@given(seen=TOKENS, added=st.lists(st.integers(0, 200), max_size=80))
def test_counts_are_those_of_a_plain_count(seen, added):
    counts = TokenCounts(seen)
    for token in added:
        counts.add(token)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {
        token: added.count(token) for token in {*seen, *added}
    }


# the whole engine against transformers' generate


@pytest.fixture(scope="module")
def engine(loaded):
    return build_engine(loaded, EngineConfig(model="real", max_model_len=512, num_kv_blocks=200))


def generated(reference, prompt, **settings):
    import torch as torch_

    output = reference.generate(
        torch_.tensor([prompt]),
        attention_mask=torch_.ones(1, len(prompt), dtype=torch_.int64),
        do_sample=False,
        max_new_tokens=24,
        eos_token_id=EOS,
        pad_token_id=EOS,
        **settings,
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.real_model
def test_greedy_rows_with_penalties_bias_and_bad_words_are_those_of_generate(engine, loaded, reference_model, prompts):
    """One batch: four kinds of rows and plain ones between them."""
    tokenizer = loaded.tokenizer
    banned = ["the", " of", "Paris"]
    bad_ids = [tokenizer.encode(w, add_special_tokens=False) for w in ("the", " the", "of", " of", "Paris", " Paris")]
    bias = {5: -100.0, 28: -3.5, 253: 2.0}
    kinds = [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"bad_words": banned}, {"bad_words_ids": bad_ids}),
        ({"logit_bias": bias}, {"sequence_bias": [[[token], value] for token, value in bias.items()]}),
        ({"min_tokens": 20}, {"min_new_tokens": 20}),
        ({}, {}),
    ]
    chosen = [prompt for prompt in prompts if 3 < len(prompt) < 90][:3]
    expected = {}
    for i, prompt in enumerate(chosen):
        for j, (ours, theirs) in enumerate(kinds):
            engine.add_request(Request(f"{i} {j}", SamplingParams(max_tokens=24, **ours), prompt_token_ids=prompt))
            expected[f"{i} {j}"] = generated(reference_model, prompt, **theirs)
    found = {completion.request_id: list(completion.token_ids) for completion in drain(engine)}
    assert found == expected
    assert all(found[f"{i} 0"] != found[f"{i} 4"] for i in range(len(chosen))), "the penalty changes these answers"


@pytest.mark.real_model
def test_ids_beyond_the_vocabulary_are_error_rows_that_name_them(engine):
    engine.add_request(Request("bias", SamplingParams(logit_bias={10**9: 1.0}), prompt="Hi"))
    engine.add_request(Request("allowed", SamplingParams(allowed_token_ids=[-1]), prompt="Hi"))
    engine.add_request(Request("good", SamplingParams(max_tokens=1), prompt="Hi"))
    done = {completion.request_id: completion for completion in drain(engine)}
    for name in ("bias", "allowed"):
        assert done[name].error.code is ErrorCode.INVALID_PARAMS
        assert "the model's tokens are 0 to 49151" in done[name].error.message
    assert done["good"].error is None


@pytest.mark.real_model
def test_special_tokens_are_kept_on_request(engine, loaded):
    """The text equals the tokenizer's own of the tokens that were generated."""
    start = loaded.tokenizer.convert_tokens_to_ids("<|im_start|>")
    for skip in (True, False):
        params = SamplingParams(max_tokens=3, allowed_token_ids=[start], skip_special_tokens=skip)
        engine.add_request(Request(str(skip), params, prompt="Hi"))
    done = {completion.request_id: completion for completion in drain(engine)}
    for skip in (True, False):
        tokens = list(done[str(skip)].token_ids)
        assert tokens == [start] * 3
        assert done[str(skip)].text == loaded.tokenizer.decode(tokens, skip_special_tokens=skip)
