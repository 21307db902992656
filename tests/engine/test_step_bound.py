"""The share of the roofline against numbers worked out by hand."""

from types import SimpleNamespace

import pytest
import torch

from batchinfer.engine.core import EngineCore
from batchinfer.engine.devices import Device
from batchinfer.engine.model_shape import ModelShape
from batchinfer.engine.roofline import Precision
from batchinfer.engine.scheduler import SchedulerOutput
from batchinfer.engine.startup import precision_of
from batchinfer.engine.stats import EngineStats
from batchinfer.engine.step_bound import StepBound
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Request
from tests.engine.fakes import drain, make_engine

# As in test_roofline.py: layers 1,152 weights, head 256, 16 values of KV a token, 64 operations a pair, activations of
# 1,024 bytes a token.
SHAPE = ModelShape(2, 8, 2, 1, 4, 16, 32)


def device(compute=1e12, bandwidth=1e12):
    return Device("d", bandwidth, 1e6, compute, None, 4 * compute, None, None, 10, "invented", fp32=compute / 2)


def step(*parts, num_scored=0):
    """Parts are (start, tokens, samples) and further fields."""
    scheduled = [
        SimpleNamespace(
            start=start, num_new_tokens=count, samples=samples, guesses=more.get("guesses", ()),
            sequence=SimpleNamespace(is_prefill_only=more.get("is_prefill_only", False)),
        )
        for start, count, samples, more in ((*part, {})[:4] for part in parts)
    ]  # fmt: skip
    return SchedulerOutput(scheduled, sum(part[1] for part in parts), num_scored)


def test_a_step_that_computes():
    """A chunk of 3 tokens behind 2, which samples, and one that decodes behind 9.

    4 tokens x 2 x 1,152 = 9,216; head 2 x 2 x 256 = 1,024; pairs 3 + 4 + 5 + 10 = 22, x 64 = 1,408; 11,648 operations
    at 10**6 a second.
    """
    bound = StepBound(device(compute=1e6), SHAPE, Precision())
    assert bound.nanoseconds(step((2, 3, True), (9, 1, True)), 1000) == 11_648_000


def test_units_of_int8_and_float32():
    """INT8 products and head run at 4 x 10**6: 10,240 / 4 = 2,560, attention in bfloat16 1,408; float32 at half the speed."""
    output = step((2, 3, True), (9, 1, True))
    int8 = StepBound(device(compute=1e6), SHAPE, precision_of("int8", torch.bfloat16, "bfloat16"))
    assert int8.nanoseconds(output, 1000) == 3_968_000
    single = StepBound(device(compute=1e6), SHAPE, precision_of("none", torch.float32, "float32"))
    assert single.nanoseconds(output, 1000) == 23_296_000
    weights_only = StepBound(device(compute=1e6), SHAPE, precision_of("int8-weight-only", torch.float32, "bfloat16"))
    assert weights_only.nanoseconds(output, 1000) == 11_648_000


def test_a_step_that_reads():
    """Weights 2,304, head 512 and logits 2 x 2 x 32 x 4 = 512; context 5 + 10 read and 4 written, of 32 bytes: 608.

    Activations 4,096. Together 8,032 bytes at 10**6 a second. Of a pool that holds 7 tokens, 7 + 4: 352 instead of 608.
    """
    bound = StepBound(device(bandwidth=1e6), SHAPE, Precision())
    output = step((2, 3, True), (9, 1, True))
    assert bound.nanoseconds(output, 1000) == 8_032_000
    assert bound.nanoseconds(output, 7) == 7_776_000, "what rows share is read once"


def test_a_part_of_a_prompt_needs_no_head():
    """3 x 2 x 1,152 + (1 + 2 + 3) x 64 = 7,296 operations; with log-probabilities of two places 2 x 512 more."""
    bound = StepBound(device(compute=1e6), SHAPE, Precision())
    assert bound.nanoseconds(step((0, 3, False)), 1000) == 7_296_000
    assert bound.nanoseconds(step((0, 3, True, {"is_prefill_only": True})), 1000) == 7_296_000
    assert bound.nanoseconds(step((0, 3, False), num_scored=2), 1000) == 8_320_000


def test_each_guess_goes_through_the_head():
    """Three tokens, of which two are guesses: 3 x 2,304 + 3 x 512 + (6 + 7 + 8) x 64 = 9,792."""
    bound = StepBound(device(compute=1e6), SHAPE, Precision())
    assert bound.nanoseconds(step((5, 3, True, {"guesses": (1, 2)})), 1000) == 9_792_000


@pytest.mark.parametrize(
    ("start", "count", "pairs"),
    [
        (0, 3, 1 + 2 + 3),
        (2, 4, 3 + 4 + 4 + 4),
        (9, 2, 4 + 4),
    ],
)
def test_a_window_limits_what_is_seen(start, count, pairs):
    """One of two layers sees four tokens back: half of the pairs are those, half are all."""
    whole = sum(range(start + 1, start + count + 1))
    bound = StepBound(device(compute=1e6), SHAPE, Precision(), (None, 4))
    expected = count * 2304 + 32 * (pairs + whole)
    assert bound.nanoseconds(step((start, count, False)), 1000) == expected * 1000
    # KV of 32 bytes: half of min(start + count, 4 + count - 1) and half of start + count
    memory = StepBound(device(bandwidth=1e6), SHAPE, Precision(), (None, 4))
    read = (min(start + count, 3 + count) + start + count) / 2
    assert memory.nanoseconds(step((start, count, False)), 1000) == (2304 + 32 * (read + count) + 1024 * count) * 1000


def test_an_engine_adds_up_its_steps_and_sums_of_engines_are_exact():
    """A prompt of 5 and two tokens after it: steps (0, 5) and (5, 1), both of which sample, by hand as above."""
    engine = make_engine()
    counted = EngineCore(
        engine._runner, engine._scheduler, engine._ingest, engine._sampler, clock=engine._clock,
        bound=StepBound(device(compute=1e6), SHAPE, Precision()),
    )  # fmt: skip
    counted.add_request(Request("a", SamplingParams(max_tokens=2, ignore_eos=True), prompt_token_ids=[1, 2, 3, 4, 5]))
    drain(counted)
    stats = counted.stats()
    first, second = 5 * 2304 + 512 + 15 * 64, 2304 + 512 + 6 * 64
    assert stats.roofline_ns == (first + second) * 1000
    assert stats.roofline_share == stats.roofline_ns / stats.step_ns
    assert stats.since(EngineStats(roofline_ns=first * 1000)).roofline_ns == second * 1000
    assert stats.report()["roofline_share"] == round(stats.roofline_share, 4)
    assert EngineStats(step_ns=5).report()["roofline_share"] is None
