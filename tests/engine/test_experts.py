"""Mixtures of experts in fused layers: a row's bytes do not depend on who else is in the batch."""

import pytest
import torch

from batchinfer.models.fused.convert import pack
from batchinfer.models.fused.mlp import DenseMlp, ExpertsMlp
from batchinfer.models.fused.packed_linear import PackedLinear
from batchinfer.models.fused.parts import ModulePart
from batchinfer.models.fused.spec import Projection
from batchinfer_kernels.cpu import get_ops
from tests.engine.small_decoder import logits_of, make_forward, small_model

HIDDEN, INNER, EXPERTS = 48, 32, 5


def experts_mlp(make, top_k=2):
    """One with random weights, and the weights."""
    torch.manual_seed(0)
    ops = get_ops()
    router = torch.randn(EXPERTS, HIDDEN)
    modules = [
        (torch.nn.Linear(HIDDEN, 2 * INNER, bias=False), torch.nn.Linear(INNER, HIDDEN, bias=False))
        for _ in range(EXPERTS)
    ]
    experts = [
        DenseMlp(make(Projection("up", [ModulePart(up)])), "silu", make(Projection("down", [ModulePart(down)])))
        for up, down in modules
    ]
    mlp = ExpertsMlp(ops, PackedLinear(ops, router, None, torch.float32), top_k, experts, renormalize=True)
    return mlp, router, modules


@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_experts_are_the_weighed_sum_written_out(top_k):
    """Row by row and expert by expert, in float64."""
    mlp, router, modules = experts_mlp(pack(get_ops(), torch.float32), top_k)
    rows = torch.randn(9, HIDDEN)
    answers = mlp(mlp.convert(rows))
    for row, answer in zip(rows.double(), answers, strict=True):
        weights, chosen = torch.softmax(router.double() @ row, 0).topk(top_k)
        expected = torch.zeros(HIDDEN, dtype=torch.float64)
        for weight, expert in zip(weights / weights.sum(), chosen.tolist(), strict=True):
            gate, up = (modules[expert][0].weight.double() @ row).chunk(2)
            expected += weight * (modules[expert][1].weight.double() @ (torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(answer.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(dtype):
    """Four rows alone, and each at other places of batches of other sizes."""
    mlp = experts_mlp(pack(get_ops(), dtype))[0]
    rows = torch.randn(4, HIDDEN)
    alone = mlp(rows.clone())
    for size in (5, 17, 130):
        batch = torch.randn(size, HIDDEN)
        places = torch.randperm(size)[:4]
        batch[places] = rows
        assert torch.equal(mlp(batch)[places], alone)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_an_owned_model_gives_its_experts_away(family):
    """Router, norms and embeddings stay; the result is that of the model that was kept."""
    kept, attention = make_forward(small_model(family), torch.float32, quantization="int8")
    model = small_model(family)
    taken, other = make_forward(model, torch.float32, quantization="int8", owns_model=True)
    assert not any(parameter.numel() for name, parameter in model.named_parameters() if "_proj" in name)
    for ours, expected in zip(logits_of(taken, other)[0], logits_of(kept, attention)[0], strict=True):
        assert torch.equal(ours, expected)
