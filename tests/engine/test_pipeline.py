"""Steps that overlap give every row the bytes that it has when steps follow each other."""

import dataclasses
import random

import pytest
import torch

from batchinfer.engine.block_pool import BlockPool
from batchinfer.engine.core import EngineCore
from batchinfer.engine.gpu.pipeline import PipelinedCore
from batchinfer.engine.gpu.sampler import DeviceSampler
from batchinfer.engine.ingest import Ingest
from batchinfer.engine.sampler import Sampler
from batchinfer.engine.scheduler import Scheduler
from batchinfer.engine.sequence import PENDING
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import FinishReason, Request, RowStatus
from tests.engine.fakes import (
    EOS,
    VOCAB,
    Clock,
    FakeDetokenizer,
    FakeRenderer,
    FakeRunner,
    answer,
    drain,
    next_token,
)
from tests.engine.test_constraint import Countdown, constrained


class QueueingRunner(FakeRunner):
    """Like a device: a token that the host does not know is the one that was kept for its sequence."""

    def __post_init__(self):
        super().__post_init__()
        self.kept = {}
        self.num_pending = 0

    def execute(self, scheduled, kept=(), scored=(), hidden=()):
        pending = [part.sequence for part in scheduled if part.sequence.token_ids[-1] == PENDING]
        self.num_pending += len(pending)
        for sequence in pending:
            sequence.token_ids[-1] = self.kept[sequence]
        try:
            return super().execute(scheduled, kept, scored, hidden)
        finally:
            for sequence in pending:
                sequence.token_ids[-1] = PENDING

    def keep(self, sequences, tokens):
        self.kept = dict(zip(sequences, tokens.tolist(), strict=True))


def make(overlaps, num_blocks=32, block_size=4, max_num_seqs=8, budget=16, estimate=None, model=next_token):
    """``overlaps`` None is the engine that knows of no pipeline."""
    runner = (FakeRunner if overlaps is None else QueueingRunner)(num_blocks, block_size, model=model)
    scheduler = Scheduler(
        BlockPool(num_blocks, block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        estimate_remaining=estimate,
    )
    ingest = Ingest(FakeRenderer(), FakeDetokenizer(), {EOS}, max_model_len=1000, max_kv_tokens=num_blocks * block_size)
    sampler = Sampler({EOS})
    if overlaps is None:
        engine = EngineCore(runner, scheduler, ingest, sampler, clock=Clock())
    else:
        chooser = DeviceSampler(sampler, torch.device("cpu"))
        engine = PipelinedCore(
            runner, scheduler, ingest, sampler, clock=Clock(), device_sampler=chooser, overlaps=overlaps
        )
    return engine, runner, scheduler


def rows(seed, count=24):
    """Prompts that share beginnings, with every kind of parameter that looks at tokens."""
    chance = random.Random(seed)
    shared = [chance.randrange(1, VOCAB) for _ in range(12)]
    kinds = [
        {},
        {"stop": ("<7>", "<3><")},
        {"stop_token_ids": (5, 6, 7, 8)},
        {"ignore_eos": True, "include_stop_str_in_output": True, "stop": ("<9>",)},
        {"temperature": 0.8, "seed": seed, "n": 3},
        {"temperature": 1.2, "top_p": 0.9, "top_k": 20, "seed": 4},
        {"logprobs": 3},
        {"logprobs": 0, "prompt_logprobs": 2},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"min_tokens": 4, "max_tokens": 9},
        {"bad_words": (), "logit_bias": {3: 5.0}},
        {"beam_width": 2},
        {"temperature": 0.9, "typical_p": 0.8, "seed": 1},
    ]
    found = []
    for i in range(count):
        prompt = shared[: chance.randrange(13)] + [chance.randrange(1, VOCAB) for _ in range(chance.randrange(1, 9))]
        params = {"max_tokens": chance.choice((1, 2, 5, 9, 17))} | kinds[chance.randrange(len(kinds))]
        found.append(Request(str(i), SamplingParams(**params), prompt_token_ids=prompt))
    return found


def outcome(completion):
    """Everything of a completion but the time that it took."""
    return dataclasses.replace(completion, device_ns=0)


def run(engine, requests):
    for request in requests:
        engine.add_request(request)
    return {completion.request_id: outcome(completion) for completion in drain(engine)}


@pytest.mark.parametrize("seed", range(8))
def test_answers_are_the_same_to_the_byte(seed):
    """Text, tokens, log-probabilities, usage and finish reasons; with a pool that is large enough for all."""
    requests = rows(seed)
    expected = run(make(None, num_blocks=400)[0], requests)
    for overlaps in (False, True):
        engine, runner, _ = make(overlaps, num_blocks=400)
        assert run(engine, requests) == expected
        assert (runner.num_pending > 0) == overlaps


@pytest.mark.parametrize("seed", range(4))
def test_answers_are_the_same_when_the_pool_runs_full(seed):
    """Sequences are evicted while their token is on its way, and computed again; a guess of 1 lets too many in.

    What a row found in the cache depends on who came before it, so that count alone may differ.
    """
    requests = [
        Request(str(i), SamplingParams(max_tokens=30, ignore_eos=True), prompt_token_ids=[1 + (seed + i) % 30, 2, 3])
        for i in range(12)
    ]
    engine, _, scheduler = make(True, num_blocks=20, estimate=lambda _: 1)
    found = run(engine, requests)
    assert scheduler.num_preemptions > 0
    assert [list(found[str(i)].token_ids) for i in range(12)] == [
        answer(requests[i].prompt_token_ids, 30, eos=()) for i in range(12)
    ]


def test_the_token_behind_the_last_is_dropped():
    """The step behind the one that sampled the end computes the row once more; nothing of that is seen or counted."""
    prompt = next([p] for p in range(1, VOCAB) if 2 <= len(answer([p], 50)) < 50)
    expected = answer(prompt, 50)
    engine, runner, _ = make(True)
    engine.add_request(Request("a", SamplingParams(max_tokens=50), prompt_token_ids=prompt))
    (completion,) = drain(engine)
    assert list(completion.token_ids) == expected
    assert completion.finish_reason is FinishReason.STOP
    assert completion.usage.completion_tokens == len(expected) == engine.stats().completion_tokens
    assert sum(len(batch) for batch in runner.batches) == len(expected) + 1


def test_grammars_see_each_token_before_they_allow_the_next():
    """Also tokens that a grammar forces: what the step under way would have sampled behind the first is dropped."""
    engine, _, _ = make(True, num_blocks=100)
    grammars = [Countdown(38), Countdown(37, forces=9), Countdown(12), Countdown(30, forces=3)]
    requests = [
        Request(str(i), SamplingParams(max_tokens=max_tokens, ignore_eos=True), prompt_token_ids=[3, i + 1])
        for i, max_tokens in enumerate((9, 14, 9, 2))
    ]
    for request, grammar in zip(requests, grammars, strict=True):
        constrained(engine, request, grammar)
    engine.add_request(Request("free", SamplingParams(max_tokens=20, ignore_eos=True), prompt_token_ids=[7]))
    done = {c.request_id: c for c in drain(engine)}
    assert list(done["0"].token_ids) == grammars[0].accepted == list(range(38, 29, -1))
    assert list(done["1"].token_ids) == grammars[1].accepted == list(range(37, 23, -1))
    assert "the grammar has ended" in done["2"].error.message
    assert list(done["3"].token_ids) == [30, 29]
    assert list(done["free"].token_ids) == answer([7], 20, eos=())
    stats = engine.stats()
    assert stats.completion_tokens == sum(c.usage.completion_tokens for c in done.values())


def test_an_answer_that_ends_by_count_costs_no_further_step():
    engine, runner, _ = make(True)
    engine.add_request(Request("a", SamplingParams(max_tokens=6, ignore_eos=True), prompt_token_ids=[3, 4]))
    drain(engine)
    assert len(runner.batches) == 6


def test_blocks_filled_by_answers_are_found_by_later_prompts():
    """A block whose last token was on its way when its step was scheduled is offered once that is known."""
    first = answer([3, 4], 14, eos=())
    engine, _, _ = make(True)
    engine.add_request(Request("a", SamplingParams(max_tokens=14, ignore_eos=True), prompt_token_ids=[3, 4]))
    drain(engine)
    engine.add_request(Request("b", SamplingParams(max_tokens=1), prompt_token_ids=[3, 4, *first]))
    (completion,) = drain(engine)
    assert completion.usage.cached_tokens == 12


def test_time_is_charged_to_rows_that_are_there():
    engine, _, _ = make(True)
    completions = []
    for request in rows(1):
        engine.add_request(request)
    while engine.has_unfinished():
        completions += engine.step()
    stats = engine.stats()
    assert stats.step_ns == sum(c.device_ns for c in completions) > 0


def test_an_aborted_row_has_no_token_that_is_on_its_way():
    engine, _, _ = make(True)
    engine.add_request(Request("a", SamplingParams(max_tokens=40, ignore_eos=True), prompt_token_ids=[3, 4]))
    engine.add_request(Request("b", SamplingParams(max_tokens=9, ignore_eos=True), prompt_token_ids=[5]))
    for _ in range(4):
        engine.step()
    (sample,) = engine.progress()["a"]
    assert list(sample.token_ids) == answer([3, 4], 4, eos=())
    engine.step()
    engine.abort("a")
    found = {c.request_id: c for c in drain(engine)}
    assert found["a"].status is RowStatus.CANCELLED or found["a"].error is not None
    assert found["a"].usage.completion_tokens == 5
    assert list(found["b"].token_ids) == answer([5], 9, eos=())


@pytest.mark.parametrize("fails", ["always", "once"])
def test_a_row_that_breaks_steps_is_found_and_the_others_end(fails):
    engine, runner, _ = make(True)
    state = {"left": 10**9 if fails == "always" else 1}

    def before(scheduled):
        is_bad = any(part.sequence.request_id == "4" and part.start > 4 for part in scheduled)
        if is_bad and state["left"]:
            state["left"] -= 1
            raise RuntimeError("bad kernel")

    runner.before_step = before
    requests = [
        Request(str(i), SamplingParams(max_tokens=9, ignore_eos=True), prompt_token_ids=[i + 1, 2]) for i in range(8)
    ]
    found = run(engine, requests)
    for i in range(8):
        if i == 4 and fails == "always":
            assert "bad kernel" in found["4"].error.message
        else:
            assert list(found[str(i)].token_ids) == answer([i + 1, 2], 9, eos=())


def test_a_row_without_a_largest_logit_ends_with_the_same_error():
    results = []
    for overlaps in (None, True):
        engine, runner, _ = make(overlaps)
        execute = runner.execute

        def poisoned(scheduled, *args, execute=execute):
            head = execute(scheduled, *args)
            for row, part in enumerate(part for part in scheduled if part.samples):
                if part.sequence.request_id == "1" and part.sequence.num_output_tokens >= 2:
                    head.best[row] = float("nan")
            return head

        runner.execute = poisoned
        requests = [
            Request(str(i), SamplingParams(max_tokens=7, ignore_eos=True), prompt_token_ids=[i + 1]) for i in range(4)
        ]
        results.append(run(engine, requests))
    assert results[0] == results[1]
    assert "no finite maximum (nan)" in results[0]["1"].error.message
