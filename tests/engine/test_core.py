"""The engine over a model that keeps token ids for KV: any wrong block, order or rollback gives a wrong answer."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.engine.protocol import EngineProtocol
from batchinfer.errors import DeviceUnhealthyError, EngineError
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import ErrorCode, FinishReason, Request, RowStatus
from tests.engine.fakes import EOS, VOCAB, answer, drain, make_engine


def ask(request_id, prompt, max_tokens=8, **params):
    return Request(request_id, SamplingParams(max_tokens=max_tokens, **params), prompt_token_ids=prompt)


def by_id(completions):
    ids = [c.request_id for c in completions]
    assert len(set(ids)) == len(ids), "a row ended twice"
    return {c.request_id: c for c in completions}


def test_the_core_is_an_engine():
    assert isinstance(make_engine(), EngineProtocol)


def test_a_row_gets_the_models_answer():
    engine = make_engine()
    prompt = [3, 1, 4, 1, 5]
    engine.add_request(ask("a", prompt))
    (completion,) = drain(engine)
    expected = answer(prompt, 8)
    assert list(completion.token_ids) == expected
    assert completion.finish_reason is (FinishReason.STOP if expected[-1] == EOS else FinishReason.LENGTH)
    assert completion.usage.prompt_tokens == 5
    assert completion.usage.completion_tokens == len(expected)


# prompts of exactly k blocks; the first batch that shares a prefix shares it


@pytest.mark.parametrize("length", [4, 8, 12])
def test_a_wholly_cached_prompt_leaves_a_token_to_compute(length):
    """A prompt of exactly k blocks, seen before: k - 1 blocks are reused, the last is computed for its logits."""
    engine = make_engine(block_size=4)
    prompt = list(range(1, length + 1))
    engine.add_request(ask("first", prompt))
    drain(engine)
    engine.add_request(ask("second", prompt))
    (completion,) = drain(engine)
    assert completion.usage.cached_tokens == length - 4
    assert list(completion.token_ids) == answer(prompt, 8)


def test_the_first_batch_shares_its_prefix():
    """Eight rows that begin alike arrive together in one empty engine: the prefix is computed once."""
    engine = make_engine(num_blocks=64, max_num_batched_tokens=128, max_num_seqs=8)
    prefix = list(range(1, 13))
    for i in range(8):
        engine.add_request(ask(str(i), [*prefix, 20 + i]))
    done = by_id(drain(engine))
    assert [done[str(i)].usage.cached_tokens for i in range(8)] == [0] + [12] * 7
    assert engine.stats().prefill_tokens == 13 + 7
    assert all(list(done[str(i)].token_ids) == answer([*prefix, 20 + i], 8) for i in range(8))


def test_a_prefix_longer_than_the_budget_is_still_computed_once():
    """The first row needs three steps for the prefix; the others wait for it instead of computing it too."""
    engine = make_engine(num_blocks=64, max_num_batched_tokens=16)
    prefix = [i % 30 + 1 for i in range(40)]
    for i in range(4):
        engine.add_request(ask(str(i), [*prefix, 31 + i]))
    drain(engine)
    assert engine.stats().prefill_tokens == 41 + 3


def test_without_prefix_caching_nothing_is_shared():
    engine = make_engine(caching=False, num_blocks=64)
    for i in range(3):
        engine.add_request(ask(str(i), list(range(1, 14))))
    assert all(c.usage.cached_tokens == 0 for c in drain(engine))
    assert engine.stats().prefill_tokens == 39


# impossible requests, clamping, nothing asked for


def test_rows_too_long_for_the_context_are_error_rows_and_their_neighbours_are_not():
    engine = make_engine(max_model_len=20, num_blocks=100)
    engine.add_request(ask("short", [1, 2]))
    engine.add_request(ask("long", [1] * 200))
    engine.add_request(ask("full", [1] * 20))
    engine.add_request(ask("other", [2, 1]))
    done = by_id(drain(engine))
    for name in ("long", "full"):
        assert done[name].status is RowStatus.ERRORED
        assert done[name].error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
        assert "20 tokens" in done[name].error.message
    assert list(done["short"].token_ids) == answer([1, 2], 8)
    assert list(done["other"].token_ids) == answer([2, 1], 8)


def test_a_prompt_longer_than_the_pool_is_an_error_row_at_once():
    engine = make_engine(num_blocks=4, block_size=4)
    engine.add_request(ask("huge", [1] * 17))
    engine.add_request(ask("small", [1]))
    done = by_id(drain(engine))
    assert done["huge"].error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert "KV cache holds 16 tokens" in done["huge"].error.message
    assert done["small"].status is RowStatus.SUCCEEDED


@pytest.mark.parametrize(
    ("max_model_len", "num_blocks", "room"),
    [(20, 100, 10), (1000, 4, 7)],  # 20 - 10 positions; 16 slots - 10, and the last token needs no slot
)
def test_max_tokens_is_clamped_to_what_fits_and_said_so(max_model_len, num_blocks, room):
    engine = make_engine(max_model_len=max_model_len, num_blocks=num_blocks, block_size=4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    engine.add_request(ask("a", prompt, max_tokens=131072, ignore_eos=True))
    (completion,) = drain(engine)
    assert completion.clamped_max_tokens == room
    assert list(completion.token_ids) == answer(prompt, room, eos=())
    assert completion.finish_reason is FinishReason.LENGTH


def test_max_tokens_that_fits_is_not_reported_as_clamped():
    engine = make_engine(max_model_len=20)
    engine.add_request(ask("a", [1] * 10, max_tokens=10, ignore_eos=True))
    (completion,) = drain(engine)
    assert completion.clamped_max_tokens is None
    assert completion.usage.completion_tokens == 10


def test_max_tokens_zero_ends_at_once_without_an_answer():
    engine = make_engine(max_model_len=4)
    engine.add_request(ask("full", [1, 2, 3, 4], max_tokens=0))
    engine.add_request(ask("over", [1, 2, 3, 4, 5], max_tokens=0))
    done = by_id(drain(engine))
    assert done["full"].status is RowStatus.SUCCEEDED
    assert done["full"].token_ids == ()
    assert done["full"].finish_reason is FinishReason.LENGTH
    assert done["full"].clamped_max_tokens is None
    assert done["over"].error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_an_empty_prompt_is_an_error_row():
    engine = make_engine()
    engine.add_request(ask("a", []))
    (completion,) = drain(engine)
    assert completion.error.code is ErrorCode.EMPTY_PROMPT


def test_a_request_that_breaks_the_tokenizer_is_an_error_row():
    engine = make_engine()
    engine.add_request(Request("a", prompt_token_ids=7))
    (completion,) = drain(engine)
    assert completion.error.code is ErrorCode.ENGINE_ERROR


def test_an_id_twice_is_refused_while_the_first_is_unfinished():
    engine = make_engine()
    engine.add_request(ask("a", [1]))
    with pytest.raises(ValueError, match="'a' is still unfinished"):
        engine.add_request(ask("a", [2]))
    drain(engine)
    engine.add_request(ask("a", [2]))
    assert len(drain(engine)) == 1


# the head of the queue, and rows that wait for each other


def test_one_big_request_is_not_starved_by_small_ones():
    """Once it is the next, it waits until it fits; what came later waits behind it."""
    engine = make_engine(num_blocks=8, block_size=4, max_num_seqs=4)
    for i in range(4):
        engine.add_request(ask(f"before{i}", [i + 1], max_tokens=6, ignore_eos=True))
    engine.step()
    engine.add_request(ask("big", list(range(1, 26)), max_tokens=7, ignore_eos=True))
    for i in range(6):
        engine.add_request(ask(f"after{i}", [i + 1], max_tokens=6, ignore_eos=True))
    order = [c.request_id for c in drain(engine)]
    assert order.index("big") == 4
    assert engine.stats().preemptions == 0


def test_two_long_prompts_that_cannot_both_fit_run_one_after_the_other():
    engine = make_engine(num_blocks=10, block_size=4, max_num_batched_tokens=8)
    prompts = {"a": [1] * 30, "b": [2] * 30}
    for name, prompt in prompts.items():
        engine.add_request(ask(name, prompt, max_tokens=5, ignore_eos=True))
    done = by_id(drain(engine))
    assert all(list(done[name].token_ids) == answer(prompts[name], 5, eos=()) for name in prompts)
    assert engine.stats().preemptions == 0


def test_a_low_estimate_preempts_and_still_answers_right():
    """Every row is believed to end at once: the pool runs full, rows are evicted, counted, and lose nothing."""
    engine = make_engine(num_blocks=10, block_size=2, estimate=lambda _: 1)
    for i in range(6):
        engine.add_request(ask(str(i), [i + 1, 7], max_tokens=12, ignore_eos=True))
    done = by_id(drain(engine))
    assert engine.stats().preemptions > 0
    assert engine.stats().prompt_tokens == 12, "a prompt counts once, however often it is computed"
    for i in range(6):
        assert list(done[str(i)].token_ids) == answer([i + 1, 7], 12, eos=())
        assert done[str(i)].usage.cached_tokens == 0, "its own blocks, computed again or not, are no hit"


def test_the_oldest_row_is_never_evicted_even_if_it_is_the_cheapest():
    """So there is always one that comes to its end, whatever the estimates."""
    engine = make_engine(num_blocks=12, block_size=2, estimate=lambda _: 1)
    engine.add_request(ask("oldest", [9], max_tokens=20, ignore_eos=True))
    for i in range(3):
        engine.add_request(ask(str(i), [i + 1] * 6, max_tokens=10, ignore_eos=True))
    drain(engine)
    assert engine.stats().preemptions > 0
    starts = [start for batch in engine._runner.batches for name, start, _ in batch if name == "oldest"]
    assert starts == list(range(20)), "each position computed once, in order"


def test_a_row_with_a_long_prompt_is_counted_for_as_long_as_its_prompt_takes():
    """The long prompt needs 40 steps beside a decoding row: by then that row has grown, and both together do not fit."""
    engine = make_engine(num_blocks=65, block_size=1, max_num_batched_tokens=2)
    engine.add_request(ask("decoding", [1], max_tokens=60, ignore_eos=True))
    engine.add_request(ask("prompt", [2] * 40, max_tokens=5, ignore_eos=True))
    drain(engine)
    assert engine.stats().preemptions == 0


def test_rows_that_share_a_prefix_fit_together_where_copies_would_not():
    """Ten shared blocks and one each for eight rows: 18 of 20, though eight copies would need 88."""
    engine = make_engine(num_blocks=20, block_size=4, max_num_batched_tokens=100)
    prefix = [i % 9 + 1 for i in range(40)]
    for i in range(8):
        engine.add_request(ask(str(i), [*prefix, 20 + i], max_tokens=3, ignore_eos=True))
    drain(engine)
    assert max(len(batch) for batch in engine._runner.batches) == 8


def test_a_part_of_a_prompt_ends_on_a_block_boundary():
    engine = make_engine(num_blocks=64, block_size=4, max_num_batched_tokens=15, caching=False)
    lengths = {"a": 30, "b": 21, "c": 13, "d": 30}
    for name, length in lengths.items():
        engine.add_request(ask(name, [1] * length))
    drain(engine)
    parts = [part for batch in engine._runner.batches for part in batch]
    ends = [(name, start + count) for name, start, count in parts if start + count < lengths[name]]
    assert ends
    assert all(end % 4 == 0 for _, end in ends)


# what happens when a step raises


def fail_on(name, error):
    def before_step(scheduled):
        if name in [part.sequence.request_id for part in scheduled]:
            raise error

    return before_step


def test_a_row_that_breaks_the_step_fails_alone():
    engine = make_engine(num_blocks=64)
    engine._runner.before_step = fail_on("bad", RuntimeError("kernel refused"))
    for i in range(7):
        engine.add_request(ask(str(i), [i + 1, 2, 3]))
    engine.add_request(ask("bad", [1, 2, 3]))
    done = by_id(drain(engine))
    assert done["bad"].status is RowStatus.ERRORED
    assert done["bad"].error.code is ErrorCode.ENGINE_ERROR
    assert "kernel refused" in done["bad"].error.message
    assert all(list(done[str(i)].token_ids) == answer([i + 1, 2, 3], 8) for i in range(7))


def test_a_failed_step_takes_back_the_prefixes_it_had_offered():
    """Blocks offered by a step that failed hold nothing; a row that used them would read garbage."""
    engine = make_engine(num_blocks=64, max_num_batched_tokens=64)
    failures = iter([True])

    def fail_once(_):
        if next(failures, False):
            raise RuntimeError("once")

    engine._runner.before_step = fail_once
    for i in range(4):
        engine.add_request(ask(str(i), [*range(1, 13), 20 + i]))
    done = by_id(drain(engine))
    assert all(list(done[str(i)].token_ids) == answer([*range(1, 13), 20 + i], 8) for i in range(4))
    assert engine.stats().failed_steps == 1


def test_an_error_row_does_not_wait_for_its_neighbours():
    """It is held back only until a step without it has passed."""
    engine = make_engine(num_blocks=64)
    engine._runner.before_step = fail_on("bad", RuntimeError("refused"))
    engine.add_request(ask("bad", [1]))
    engine.add_request(ask("long", [2], max_tokens=100, ignore_eos=True))
    assert [c.request_id for c in drain(engine)] == ["bad", "long"]


def test_many_bad_rows_among_good_ones_are_not_blamed_on_the_engine():
    """Between two rows that fail, another one's step passes: so the engine works."""
    engine = make_engine(num_blocks=64, max_num_seqs=2)

    def refuse(scheduled):
        if any(part.sequence.request_id.startswith("bad") for part in scheduled):
            raise RuntimeError("refused")

    engine._runner.before_step = refuse
    for i in range(20):
        engine.add_request(ask(f"good{i}", [i + 1], max_tokens=3))
        engine.add_request(ask(f"bad{i}", [i + 1], max_tokens=3))
    statuses = [(c.request_id[:3], c.status) for c in drain(engine)]
    assert statuses.count(("bad", RowStatus.ERRORED)) == statuses.count(("goo", RowStatus.SUCCEEDED)) == 20


def test_out_of_memory_shrinks_the_step_and_loses_no_row():
    engine = make_engine(num_blocks=64, max_num_batched_tokens=64)

    def too_big(scheduled):
        if sum(part.num_new_tokens for part in scheduled) > 10:
            raise torch.OutOfMemoryError("CUDA out of memory")

    engine._runner.before_step = too_big
    prompts = [[i + 1] * 30 for i in range(5)]
    for i, prompt in enumerate(prompts):
        engine.add_request(ask(str(i), prompt))
    done = by_id(drain(engine))
    assert all(list(done[str(i)].token_ids) == answer(prompts[i], 8) for i in range(5))
    assert engine.stats().batched_tokens_limit <= 10


def run_out_of_memory(most_tokens, when=lambda scheduled: True):
    """A device on which a step of more tokens than ``most_tokens`` does not fit, ``when`` it is short."""

    def before_step(scheduled):
        if when(scheduled) and sum(part.num_new_tokens for part in scheduled) > most_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    return before_step


def completed(before_step=None, **params):
    """All of a mixture of rows, each with what it says: as one text, to the byte."""
    engine = make_engine(num_blocks=64, max_num_batched_tokens=64)
    engine._runner.before_step = before_step
    for i in range(6):
        engine.add_request(ask(str(i), [i % 3 + 1] * (4 * i + 1), max_tokens=6, seed=i, **params))
    done = by_id(drain(engine))
    engine.check_integrity()
    return {i: repr(replace(c, device_ns=0, usage=None)) for i, c in done.items()}, engine


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"logprobs": 2, "ignore_eos": True}])
@pytest.mark.parametrize("most_tokens", [1, 7])
def test_answers_are_the_same_to_the_byte_however_small_steps_become(most_tokens, params):
    plain, _ = completed(**params)
    shrunk, engine = completed(run_out_of_memory(most_tokens), **params)
    assert shrunk == plain
    stats = engine.stats()
    assert stats.out_of_memory == stats.failed_steps > 0
    assert stats.errored == 0
    assert stats.report()["out_of_memory"] == stats.out_of_memory


def test_a_decode_step_that_is_too_large_runs_fewer_sequences_and_none_is_lost():
    engine = make_engine(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64)
    engine._runner.before_step = run_out_of_memory(3)
    for i in range(8):
        engine.add_request(ask(str(i), [i + 1], max_tokens=6, ignore_eos=True))
    done = by_id(drain(engine))
    assert all(list(done[str(i)].token_ids) == answer([i + 1], 6, eos=()) for i in range(8))
    assert engine.stats().max_num_seqs <= 3
    assert engine._runner.batches
    assert max(len(batch) for batch in engine._runner.batches[3:]) <= 3


def test_when_memory_is_back_steps_grow_again():
    engine = make_engine(num_blocks=200, block_size=4, max_num_batched_tokens=64)
    is_short = [True]
    engine._runner.before_step = run_out_of_memory(8, lambda _: is_short[0])
    engine.add_request(ask("a", [1] * 40, max_tokens=300, ignore_eos=True))
    for _ in range(20):
        engine.step()
    assert engine.stats().batched_tokens_limit <= 10  # a chunk of it ends with a block: 8
    is_short[0] = False
    drain(engine)
    stats = engine.stats()
    assert (stats.batched_tokens_limit, stats.max_num_seqs) == (64, 8)


def test_steps_that_cannot_grow_are_tried_ever_more_seldom():
    """Each try costs a step, so their number must stay small beside the steps that pass."""
    engine = make_engine(num_blocks=600, block_size=4, max_num_batched_tokens=16, max_num_seqs=4)
    engine._runner.before_step = run_out_of_memory(1)
    for i in range(2):
        engine.add_request(ask(str(i), [i + 1], max_tokens=300, ignore_eos=True))
    drain(engine)
    stats = engine.stats()
    assert stats.steps == 2 * 300
    assert stats.out_of_memory < 8


def test_a_row_that_does_not_fit_alone_is_an_error_row_and_the_others_get_their_steps_back():
    engine = make_engine(num_blocks=64, max_num_batched_tokens=64)
    huge = lambda scheduled: any(part.sequence.request_id == "huge" for part in scheduled)  # noqa: E731
    engine._runner.before_step = run_out_of_memory(0, huge)
    for i in range(6):
        engine.add_request(ask(str(i), [i + 1, 2, 3]))
    engine.add_request(ask("huge", [7] * 30))
    done = by_id(drain(engine))
    assert done["huge"].error.code is ErrorCode.OUT_OF_MEMORY
    assert "CUDA out of memory" in done["huge"].error.message
    assert "Tried to allocate" not in done["huge"].error.message
    assert all(list(done[str(i)].token_ids) == answer([i + 1, 2, 3], 8) for i in range(6))
    engine.add_request(ask("after", [1] * 60))
    drain(engine)
    assert engine.stats().batched_tokens_limit == 64


def test_a_device_that_is_not_well_blames_no_row():
    engine = make_engine()
    engine._runner.before_step = fail_on("a", torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"))
    engine.add_request(ask("a", [1]))
    with pytest.raises(DeviceUnhealthyError, match="uncorrectable ECC"):
        engine.step()


def test_a_row_without_finite_logits_fails_alone_and_leaves_no_prefix():
    engine = make_engine()
    execute = engine._runner.execute

    def with_nan(scheduled, *wanted):
        head = execute(scheduled, *wanted)
        for i, part in enumerate(p for p in scheduled if p.samples):
            if part.sequence.request_id == "nan":
                head.best[i] = float("nan")
        return head

    engine._runner.execute = with_nan
    engine.add_request(ask("nan", [1, 2, 3, 4, 5]))
    engine.add_request(ask("good", [6, 2, 3, 4, 5]))
    done = by_id(drain(engine))
    assert done["nan"].error.code is ErrorCode.ENGINE_ERROR
    assert list(done["good"].token_ids) == answer([6, 2, 3, 4, 5], 8)
    engine.add_request(ask("again", [1, 2, 3, 4, 5]))
    assert drain(engine)[0].usage.cached_tokens == 0


def test_a_device_that_fails_every_step_is_an_engine_error_and_not_a_thousand_error_rows():
    engine = make_engine(num_blocks=64, max_num_seqs=4)

    def broken(_):
        raise RuntimeError("device is gone")

    engine._runner.before_step = broken
    for i in range(30):
        engine.add_request(ask(str(i), [i + 1]))
    completions = []
    with pytest.raises(EngineError, match="device is gone"):
        for _ in range(200):
            completions += engine.step()
    assert completions == []


def test_a_fault_that_poisons_the_device_ends_the_engine_at_once():
    engine = make_engine()
    engine._runner.before_step = fail_on("a", torch.AcceleratorError("illegal memory access"))
    engine.add_request(ask("a", [1]))
    with pytest.raises(EngineError, match="illegal memory access"):
        engine.step()


def test_an_aborted_row_ends_as_cancelled_with_what_it_cost():
    engine = make_engine()
    engine.add_request(ask("a", [1, 2, 3], max_tokens=50, ignore_eos=True))
    engine.add_request(ask("waiting", [1] * 10, max_tokens=100))
    engine.step()
    engine.abort("a")
    engine.abort("waiting")
    engine.abort("nobody")
    done = by_id(engine.step())
    engine.check_integrity()
    assert {c.status for c in done.values()} == {RowStatus.CANCELLED}
    assert done["a"].device_ns > 0
    assert sum(c.device_ns for c in done.values()) == engine.stats().step_ns
    assert not engine.has_unfinished()


# the rule above all: whatever is asked, in whatever engine, each row ends once, right, and is paid for

ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 3), min_size=0, max_size=24),  # few token ids, so that prefixes meet
        st.integers(0, 14),
        st.booleans(),
    ),
    max_size=14,
)
ENGINES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(1, 24),
        "block_size": st.sampled_from([1, 2, 3, 4, 7]),
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.integers(1, 24),
        "max_model_len": st.integers(2, 40),
        "caching": st.booleans(),
    }
)


def expected_outcome(prompt, max_tokens, ignore_eos, shape):
    """Status and tokens of a row by the rules alone."""
    room = min(shape["max_model_len"] - len(prompt), shape["num_blocks"] * shape["block_size"] - len(prompt) + 1)
    if not prompt or room < min(1, max_tokens):
        return RowStatus.ERRORED, []
    return RowStatus.SUCCEEDED, answer(prompt, min(max_tokens, room), () if ignore_eos else (EOS,))


@settings(max_examples=300, deadline=None)
@given(rows=ROWS, shape=ENGINES, hopeful=st.booleans())
def test_every_row_ends_once_with_its_own_answer(rows, shape, hopeful):
    engine = make_engine(**shape, **({"estimate": lambda _: 1} if hopeful else {}))
    for i, (prompt, max_tokens, ignore_eos) in enumerate(rows):
        engine.add_request(ask(str(i), prompt, max_tokens, ignore_eos=ignore_eos))
    done = by_id(drain(engine))
    assert len(done) == len(rows)
    for i, row in enumerate(rows):
        status, tokens = expected_outcome(*row, shape)
        assert (done[str(i)].status, list(done[str(i)].token_ids)) == (status, tokens)
    stats = engine.stats()
    assert sum(c.device_ns for c in done.values()) == stats.step_ns
    assert stats.unfinished_device_ns == 0
    assert stats.used_blocks == 0
    for batch in engine._runner.batches:
        assert len(batch) <= shape["max_num_seqs"]
        assert sum(tokens for _, _, tokens in batch) <= shape["max_num_batched_tokens"]
    if not hopeful:
        assert stats.preemptions == 0, "the careful admission rule let in too much"


@settings(max_examples=200, deadline=None)
@given(rows=ROWS, shape=ENGINES, hopeful=st.booleans(), data=st.data())
def test_aborts_and_failures_cost_only_their_own_row(rows, shape, hopeful, data):
    """At random moments rows are aborted, steps fail, or a row is one that always fails."""
    engine = make_engine(**shape, **({"estimate": lambda _: 1} if hopeful else {}))
    numbers = st.sets(st.integers(0, 13), max_size=3)
    poisoned = {str(i) for i in data.draw(numbers, label="poisoned")}
    flaky_steps = data.draw(st.sets(st.integers(0, 20), max_size=3), label="flaky steps")
    aborts = data.draw(st.dictionaries(st.integers(0, 20), st.integers(0, 13), max_size=4), label="aborts")

    def before_step(scheduled):
        if poisoned & {part.sequence.request_id for part in scheduled}:
            raise RuntimeError("poisoned")
        if len(engine._runner.batches) in flaky_steps and len(scheduled) > 1:
            raise RuntimeError("flaky")

    engine._runner.before_step = before_step
    for i, (prompt, max_tokens, ignore_eos) in enumerate(rows):
        engine.add_request(ask(str(i), prompt, max_tokens, ignore_eos=ignore_eos))
    done = by_id(drain(engine, before=lambda step: engine.abort(str(aborts.get(step)))))
    assert len(done) == len(rows)
    for i, row in enumerate(rows):
        completion = done[str(i)]
        status, tokens = expected_outcome(*row, shape)
        if str(i) in poisoned and status is RowStatus.SUCCEEDED and row[1] > 0:
            assert completion.status in (RowStatus.ERRORED, RowStatus.CANCELLED)
        elif completion.status is not RowStatus.CANCELLED:
            assert (completion.status, list(completion.token_ids)) == (status, tokens)
        else:
            assert i in aborts.values()
    assert sum(c.device_ns for c in done.values()) == engine.stats().step_ns
    assert engine.stats().used_blocks == 0


def test_the_vocabulary_of_the_fake_is_wide_enough_to_tell_contexts_apart():
    """Else the tests above would prove little: two contexts rarely share an answer of eight tokens."""
    answers = {tuple(answer([i, j], 8)) for i in range(VOCAB) for j in range(3)}
    assert len(answers) > 110
