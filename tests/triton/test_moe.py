"""Routing and grouped products against plain torch, and the whole expert layer against transformers' own."""

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from batchinfer_kernels import grouped_gemm, moe, routing
from batchinfer_kernels.grouped_gemm import GroupedConfig, grouped_config
from batchinfer_kernels.reference import quantize_rows
from tests.triton.checks import assert_rounded

EXPLORE = settings(max_examples=14, deadline=None, phases=(Phase.explicit, Phase.generate), derandomize=True)
F32, BF16, I8 = torch.float32, torch.bfloat16, torch.int8
TINY = GroupedConfig(16, 16, 32, 4, 2)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights_of(num_experts: int, n: int, k: int, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor | None]:
    w = randn(num_experts, n, k, seed=seed)
    if dtype != I8:
        return {"w": w.to(dtype), "w_scale": None}
    rounded, scale = quantize_rows(w.flatten(0, 1))
    return {"w": rounded.view_as(w), "w_scale": scale.view(num_experts, n)}


def rows_of(num_rows: int, k: int, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor | None]:
    a = randn(num_rows, k, seed=seed)
    if dtype != I8:
        return {"a": a.to(dtype), "a_scale": None}
    return dict(zip(("a", "a_scale"), quantize_rows(a), strict=True))


def routed_to(experts: list[list[int]], num_experts: int) -> routing.Routing:
    """A routing that sends each token where it is told, first choice first."""
    logits = torch.full((len(experts), num_experts), -50.0)
    for token, choices in enumerate(experts):
        for rank, expert in enumerate(choices):
            logits[token, expert] = -0.5 * rank
    return routing.route(logits, len(experts[0]))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_routing_is_what_sorting_by_hand_gives(scores, renormalize):
    logits, bias = randn(9, 5), torch.tensor([0.0, 0.4, 0.0, -0.4, 0.1])
    found = routing.route(
        logits,
        2,
        scores=scores,
        renormalize=renormalize,
        selection_bias=bias if scores == "sigmoid" else None,
        scale=2.5,
    )
    buckets: list[list[int]] = [[] for _ in range(5)]
    for token, row in enumerate(logits):
        score = row.softmax(0) if scores == "softmax" else row.sigmoid()
        ranked = (score + bias if scores == "sigmoid" else score).tolist()
        chosen = sorted(range(5), key=lambda expert, ranked=ranked: -ranked[expert])[:2]
        mass = sum(float(score[expert]) for expert in chosen) if renormalize else 1.0
        expected = torch.tensor([2.5 * float(score[expert]) / mass for expert in chosen])
        torch.testing.assert_close(found.weights[token], expected)
        for choice, expert in enumerate(chosen):
            buckets[expert].append(token * 2 + choice)
    assert found.order.tolist() == [pair for bucket in buckets for pair in bucket]
    assert found.offsets.diff().tolist() == [len(bucket) for bucket in buckets]


def test_equal_scores_go_to_the_lowest_experts():
    found = routing.route(torch.zeros(3, 4), 2)
    assert found.order.tolist() == [0, 2, 4, 1, 3, 5]
    assert found.offsets.tolist() == [0, 3, 6, 6, 6]
    with pytest.raises(ValueError, match="number of experts"):
        routing.route(torch.zeros(3, 4), 5)


@EXPLORE
@example(
    num_tokens=33, num_experts=1, top_k=1, n=16, k=80, kinds=(I8, I8), gather=True, scatter=False, bias=True, seed=0
)
@example(
    num_tokens=5, num_experts=9, top_k=3, n=48, k=32, kinds=(BF16, BF16), gather=False, scatter=True, bias=True, seed=1
)
@given(
    num_tokens=st.integers(0, 40), num_experts=st.integers(1, 9), top_k=st.integers(1, 3), n=st.sampled_from([16, 48]),
    k=st.sampled_from([16, 32, 80]), kinds=st.sampled_from([(F32, F32), (BF16, BF16), (I8, I8), (BF16, I8)]),
    gather=st.booleans(), scatter=st.booleans(), bias=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_grouped_gemm(num_tokens, num_experts, top_k, n, k, kinds, gather, scatter, bias, seed):
    top_k = min(top_k, num_experts)
    sent = routing.route(randn(num_tokens, num_experts, seed=seed) * 2, top_k)
    operands = rows_of(num_tokens if gather else num_tokens * top_k, k, kinds[0], seed)
    operands |= weights_of(num_experts, n, k, kinds[1], seed + 1)
    operands |= {"bias": randn(num_experts, n, seed=seed + 2) if bias else None}
    out_dtype = BF16 if kinds[0] == BF16 else F32
    options = {"routing": sent, "gather": gather, "scatter": scatter}
    out = grouped_gemm.grouped_gemm(**operands, **options, out_dtype=out_dtype, config=TINY)
    assert_rounded(out, grouped_gemm.grouped_gemm_reference(**operands, **options), slack=2.0)


def test_experts_without_rows_and_one_with_all_but_one():
    sent = routed_to([[6, 2], *[[2, 6]] * 36, [0, 6]], 8)
    assert sent.offsets.diff().tolist() == [1, 0, 37, 0, 0, 0, 38, 0]
    operands = rows_of(38, 64, I8, 0) | weights_of(8, 32, 64, I8, 1)
    for gather, scatter in ((True, False), (False, True)):
        rows = operands if gather else operands | rows_of(76, 64, I8, 2)
        options = {"routing": sent, "gather": gather, "scatter": scatter}
        out = grouped_gemm.grouped_gemm(**rows, **options, out_dtype=F32, config=TINY)
        assert torch.equal(out, grouped_gemm.grouped_gemm_reference(**rows, **options))


def test_a_tokens_answer_does_not_depend_on_the_tokens_beside_it():
    """Exact sums, in any tile."""
    operands = rows_of(40, 64, I8, 0) | weights_of(4, 32, 64, I8, 1)
    sent = routing.route(randn(40, 4, seed=3), 2)
    whole = grouped_gemm.grouped_gemm(**operands, routing=sent, gather=True, scatter=True)
    alone = routing.route(randn(40, 4, seed=3)[7:8], 2)
    row = operands | {"a": operands["a"][7:8], "a_scale": operands["a_scale"][7:8]}
    for block_m in (16, 32):
        config = GroupedConfig(block_m, 32, 64, 4, 2)
        out = grouped_gemm.grouped_gemm(**row, routing=alone, gather=True, scatter=True, config=config)
        assert torch.equal(out, whole[14:16])


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(("num_tokens", "dtype"), [(12, I8), (12, BF16), (120, I8)])
def test_grouped_gemm_in_the_configs_of_the_table(arch, num_tokens, dtype):
    sent = routing.route(randn(num_tokens, 3), 2)
    operands = rows_of(num_tokens, 320, dtype, 0) | weights_of(3, 144, 320, dtype, 1)
    config = grouped_config(arch, num_tokens * 2, 3, dtype)
    options = {"routing": sent, "gather": True, "scatter": False}
    out = grouped_gemm.grouped_gemm(**operands, **options, config=config)
    assert_rounded(out, grouped_gemm.grouped_gemm_reference(**operands, **options), slack=1.1)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("top_k", "n"), [(1, 16), (3, 2064)])
def test_combine_experts(dtype, top_k, n):
    y, weights, residual = randn(5 * top_k, n).to(dtype), randn(5, top_k, seed=1), randn(5, n, seed=2).to(dtype)
    out = grouped_gemm.combine_experts(y, weights, out_dtype=dtype)
    assert_rounded(out, grouped_gemm.combine_experts_reference(y, weights))
    out = grouped_gemm.combine_experts(y, weights, residual=residual, out_dtype=dtype)
    assert_rounded(out, grouped_gemm.combine_experts_reference(y, weights, residual=residual))


@pytest.fixture(scope="module")
def mixtral():
    """transformers' own expert layer, and what it answers to 13 tokens."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    torch.manual_seed(0)
    config = MixtralConfig(hidden_size=64, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    block = MixtralSparseMoeBlock(config).eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    x = randn(13, 64, seed=9)
    with torch.no_grad():
        answer = block(x[None])
    answer = answer[0] if isinstance(answer, tuple) else answer
    return block, x, answer.view(13, 64).detach()


def test_the_expert_layer_is_transformers(mixtral):
    block, x, truth = mixtral
    with torch.no_grad():
        sent = routing.route(x @ block.gate.weight.T, 2)
        gate_up, down = (moe.ExpertWeights(w.data) for w in (block.experts.gate_up_proj, block.experts.down_proj))
        out = moe.expert_mlp(x, gate_up, down, sent, "silu", residual=torch.ones(13, 64))
    torch.testing.assert_close(out, truth + 1, rtol=1e-4, atol=1e-5)


def test_the_expert_layer_in_int8_is_near_transformers(mixtral):
    """Eight bits with a scale a row and a channel: about one percent."""
    block, x, truth = mixtral

    def rounded(w: torch.Tensor) -> moe.ExpertWeights:
        numbers, scale = quantize_rows(w.detach().flatten(0, 1))
        return moe.ExpertWeights(numbers.view_as(w), scale.view(w.shape[:2]))

    with torch.no_grad():
        sent = routing.route(x @ block.gate.weight.T, 2)
        out = moe.expert_mlp(x, rounded(block.experts.gate_up_proj), rounded(block.experts.down_proj), sent, "silu")
    assert (out - truth).norm() < 0.02 * truth.norm()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(3, 32, dtype=I8)}, "must be"),
        ({"w": torch.zeros(4, 24, 32, dtype=I8)}, "multiples of 16"),
        ({"w": torch.zeros(3, 16, 32, dtype=I8)}, "over 4 experts"),
        ({"a_scale": None}, "int8 takes scales"),
        (
            {"a": torch.zeros(2, 32), "a_scale": None, "w": torch.zeros(4, 16, 32, dtype=BF16), "w_scale": None},
            "type of a",
        ),
        ({"bias": torch.zeros(4, 8)}, "bias"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    operands = rows_of(2, 32, I8, 0) | weights_of(4, 16, 32, I8, 1) | change
    with pytest.raises(ValueError, match=message):
        grouped_gemm.grouped_gemm(**operands, routing=routed_to([[0, 1], [1, 2]], 4), gather=True, scatter=False)
