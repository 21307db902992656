"""Greedy rows get the head's own argmax; what they would have got from their logits is the same."""

import copy

import pytest
import torch

from batchinfer.engine.attention_groups import Span
from batchinfer.engine.head_output import HeadOutput
from batchinfer.engine.sampler import Sampler, SamplingRow
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import RowError
from tests.engine.small_decoder import make_forward, small_model

GREEDY = SamplingRow(SamplingParams(max_tokens=8), 0, 0)


@pytest.fixture(scope="module")
def reference():
    """A vocabulary of more than one slice."""
    return small_model("gemma2", vocab_size=9001, final_logit_softcapping=3.0)


@pytest.mark.parametrize(
    ("block_size", "dtype", "quantization"),
    [
        (16, torch.float32, "none"),
        (16, torch.bfloat16, "none"),
        (16, torch.float32, "int8"),
        (16, torch.float32, "int8-weight-only"),
        (4, torch.float32, "none"),  # transformers' modules, which have no INT8
        (4, torch.bfloat16, "none"),
    ],
)
@torch.inference_mode()
def test_the_best_token_does_not_depend_on_whose_logits_are_kept(reference, dtype, quantization, block_size):
    forward, attention = make_forward(copy.deepcopy(reference), dtype, quantization=quantization, block_size=block_size)
    assert forward.name == ("fused" if block_size == 16 else "transformers")
    tokens, positions = torch.arange(5, 17), torch.arange(12)

    def run(kept):
        context = attention.context([Span(0, 0, 12, [3, 9, 1])], 12)
        return forward(tokens, positions, torch.arange(12), context, kept)

    whole = run(range(12))
    for kept in ([], [3], [11, 0, 5]):
        output = run(kept)
        assert torch.equal(output.best, whole.best)
        assert torch.equal(output.best_index, whole.best_index)
        assert torch.equal(output.logits, whole.logits[kept])
    assert whole.best_index.tolist() == whole.logits.float().argmax(dim=1).tolist()
    assert Sampler().choose(run([]), [GREEDY] * 12) == Sampler().sample(whole.logits, [GREEDY] * 12)


def test_rows_without_a_finite_best_are_errors_either_way():
    logits = torch.zeros(5, 7)
    logits[0, 3], logits[1, 2], logits[2], logits[3, [2, 5]] = float("nan"), float("inf"), float("-inf"), 1.0
    logits[4] = -2.0
    rows = [GREEDY] * 5
    head = HeadOutput.of_logits(logits, [])
    assert head.logits.shape == (0, 7)
    chosen = Sampler().choose(head, rows)
    assert [isinstance(token, RowError) for token in chosen] == [True, True, True, False, False]
    assert chosen[3:] == [2, 0], "the lowest of equals"
    assert chosen == Sampler().sample(logits, rows)


def test_only_rows_that_need_logits_are_sampled_from_them():
    """A drawn row and one that may not end yet, between greedy ones."""
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(4))
    logits[2, 1] = 50.0
    rows = [
        GREEDY,
        SamplingRow(SamplingParams(temperature=1.0), 7, 3),
        SamplingRow(SamplingParams(min_tokens=5), 0, 4),
        SamplingRow(SamplingParams(min_tokens=5), 0, 5),
    ]
    kept = [i for i, row in enumerate(rows) if row.needs_logits]
    assert kept == [1, 2]
    sampler = Sampler(eos_token_ids={1})
    assert sampler.choose(HeadOutput.of_logits(logits, kept), rows) == sampler.sample(logits, rows)
    assert sampler.sample(logits, rows)[2] != 1
