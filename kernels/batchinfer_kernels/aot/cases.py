"""Launches of every kernel at production sizes, on meta tensors, and what their code must contain."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from batchinfer_kernels import act_and_mul, quantize, rms_norm
from batchinfer_kernels.attention_plan import QuerySpan, plan_attention
from batchinfer_kernels.embedding import embedding
from batchinfer_kernels.fp8_gemm import FP8, fp8_gemm
from batchinfer_kernels.grouped_gemm import combine_experts, grouped_gemm
from batchinfer_kernels.int4_gemm import int4_gemm
from batchinfer_kernels.int8_gemm import int8_gemm
from batchinfer_kernels.kv_write import kv_write
from batchinfer_kernels.lm_head import HeadWeights, lm_head_argmax, lm_head_reduce
from batchinfer_kernels.logit_changes import Entries, LogitChanges, change_logits
from batchinfer_kernels.logprobs import token_logprobs
from batchinfer_kernels.lora import LoraRows, LoraTable, lora_add
from batchinfer_kernels.paged_attention import AttentionForm, paged_attention
from batchinfer_kernels.paged_kv import PagedKV
from batchinfer_kernels.rope_and_kv_write import Rope, rope_and_kv_write
from batchinfer_kernels.routing import Routing
from batchinfer_kernels.sampler import SamplingRows, sample

if TYPE_CHECKING:
    from collections.abc import Callable

BF16 = torch.bfloat16
F32 = torch.float32
I8 = torch.int8
I32 = torch.int32


ARCHS: tuple[int | str, ...] = (80, 86, 89, 90, 100, "gfx942")
UNITS: dict[int, tuple[str, ...]] = {80: (r"mma\.sync", r"cp\.async"), 90: (r"wgmma", r"cp\.async"), 100: (r"tcgen05",)}
S8_UNITS: dict[int, tuple[str, ...]] = {
    80: (r"mma\.sync\S*s8", r"cp\.async"),
    90: (r"wgmma\S*s8", r"cp\.async"),
    100: (r"mma\S*s8", r"cp\.async"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One call of a launcher. ``expect`` are patterns that the PTX for an architecture (0: every one) must contain.

    Every kernel must load vectors, except for the ``small`` ones that read a few KB a row in all, and may load numbers of
    one or two bytes one at a time only where ``max_narrow_loads`` says so. ``is_int8``: MI300 must use its int8 units.
    """

    name: str
    run: Callable[[], object]
    expect: dict[int, tuple[str, ...]] = field(default_factory=dict)
    max_scalar_loads_in_loops: int = 0
    max_narrow_loads: int = 0
    archs: tuple[int | str, ...] = ARCHS
    small: tuple[str, ...] = ()
    is_int8: bool = False


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def rows_cases() -> list[Case]:
    """Norms, activations and quantisation: the sizes of SmolLM2-135M, Llama 8B and 70B."""
    found = []
    for n in (576, 4096, 8192):
        x, weight = meta(64, n), meta(n)
        smoothing = meta(n, dtype=F32)
        found += [
            Case(f"rms_norm {n}", partial(rms_norm.rms_norm, x, weight, 1e-5)),
            Case(
                f"rms_norm {n}, residual, rotation, int8",
                partial(
                    rms_norm.rms_norm_quantize, x, weight, 1e-5, residual=x, smoothing=smoothing,
                    rotation=math.gcd(n, 512),
                ),
            ),
        ]  # fmt: skip
    x = meta(64, 2 * 14336)
    found += [
        Case("silu_and_mul 14336", partial(act_and_mul.act_and_mul, x, "silu")),
        Case("silu_and_mul 14336, rotation, int8", partial(act_and_mul.act_and_mul_quantize, x, "silu", rotation=512)),
        Case("gelu_and_mul 14336, int8", partial(act_and_mul.act_and_mul_quantize, x, "gelu_tanh")),
        Case("quantize_rows 4096", partial(quantize.quantize_rows, meta(64, 4096))),
        Case("quantize_rows 4096, rotation", partial(quantize.quantize_rows, meta(64, 4096), rotation=512)),
    ]
    return found


def paged_kv(num_kv_heads: int, head_dim: int, dtype: torch.dtype = BF16, block_size: int = 64) -> PagedKV:
    """A cache without memory."""
    return PagedKV.empty(1000, block_size, num_kv_heads, head_dim, dtype, "meta")


def rope_cases() -> list[Case]:
    """Llama 8B, SmolLM2, a partial rotary embedding, Qwen3's norms, and INT8 caches."""
    found = []
    for name, num_heads, num_kv_heads, head_dim, half, interleaved, norms, dtype in (
        ("32/8 heads of 128", 32, 8, 128, 64, False, False, BF16),
        ("32/8 heads of 128, norms, int8", 32, 8, 128, 64, False, True, I8),
        ("9/3 heads of 64", 9, 3, 64, 32, False, False, BF16),
        ("32/32 heads of 80, rotary 32", 32, 32, 80, 16, False, False, BF16),
        ("32/4 heads of 128, interleaved, int8", 32, 4, 128, 64, True, False, I8),
    ):
        fused = meta(64, num_heads + 2 * num_kv_heads, head_dim)
        q, k, v = fused[:, :num_heads], fused[:, num_heads:-num_kv_heads], fused[:, -num_kv_heads:]
        norm = meta(head_dim) if norms else None
        rope = Rope(meta(4096, half, dtype=F32), meta(4096, half, dtype=F32), interleaved, norm, norm)
        run = partial(
            rope_and_kv_write,
            q,
            k,
            v,
            meta(64, dtype=I32),
            meta(64, dtype=I32),
            rope,
            paged_kv(num_kv_heads, head_dim, dtype),
        )
        found.append(Case(f"rope_and_kv_write {name}", run))
        write = partial(kv_write, k, v, meta(64, dtype=I32), paged_kv(num_kv_heads, head_dim, dtype))
        found.append(Case(f"kv_write {name}", write))
    return found


def attention_cases() -> list[Case]:
    """Decode, prefill and mixed steps at the sizes of well-known models."""
    decode = [QuerySpan(i, 1, 2000, i) for i in range(8)]
    prefill = [QuerySpan(0, 512, 1024, 0)]
    mixed = [*decode, QuerySpan(8, 512, 1024, 8)]
    found = []
    for name, spans, heads, kv_heads, head_dim, dtype, block_size, window, softcap in (
        ("decode 32/8 heads of 128", decode, 32, 8, 128, BF16, 64, None, None),
        ("decode 32/8 heads of 128, int8", decode, 32, 8, 128, I8, 64, None, None),
        ("decode 9/3 heads of 64, block 16", decode, 9, 3, 64, BF16, 16, None, None),
        ("decode 64/8 heads of 64, window, block 128", decode, 64, 8, 64, BF16, 128, 128, None),
        ("prefill 32/8 heads of 128", prefill, 32, 8, 128, BF16, 64, None, None),
        ("prefill 32/8 heads of 128, int8", prefill, 32, 8, 128, I8, 64, None, None),
        ("prefill 32/32 heads of 80", prefill, 32, 32, 80, BF16, 64, None, None),
        ("prefill 8/4 heads of 256, window, softcap", prefill, 8, 4, 256, BF16, 64, 4096, 50.0),
        ("mixed 32/8 heads of 128", mixed, 32, 8, 128, BF16, 64, None, None),
        ("mixed 28/4 heads of 128, int8, block 16", mixed, 28, 4, 128, I8, 16, None, None),
    ):
        plan = plan_attention(spans, group_size=heads // kv_heads, sliding_window=window).to("meta")
        num_tokens = sum(span.num_queries for span in spans)
        run = partial(
            paged_attention,
            meta(num_tokens, heads, head_dim),
            paged_kv(kv_heads, head_dim, dtype, block_size),
            meta(len(spans), 64, dtype=I32),
            meta(num_tokens, dtype=I32),
            plan,
            AttentionForm(head_dim**-0.5, window, softcap, meta(heads, dtype=F32) if window else None),
        )
        # the merge reads its states' log-sum-exps one at a time, each a 128th of what it belongs to
        found.append(Case(f"attention {name}", run, {0: (r"mma",), 90: (r"cp\.async",)}, max_scalar_loads_in_loops=4))
    return found


def gemm_cases() -> list[Case]:
    """The linears of an 8B model for few and for many tokens, and SmolLM2's odd width."""
    found = []
    for m, n, k, fused in (
        (16, 4096, 4096, True),
        (64, 28672, 4096, False),
        (64, 576, 576, True),
        (2048, 4096, 14336, False),
    ):
        rows, columns = meta(m, dtype=F32), meta(n, dtype=F32)
        bias, residual = (meta(n), meta(m, n)) if fused else (None, None)
        w8a8 = partial(
            int8_gemm, meta(m, k, dtype=I8), meta(n, k, dtype=I8), columns, a_scale=rows, bias=bias, residual=residual
        )
        units: dict[int, tuple[str, ...]] = S8_UNITS if m > 32 else {0: (r"mma\.sync\S*s8",)}
        found.append(Case(f"w8a8 {m} x {n} x {k}{', bias, residual' if fused else ''}", w8a8, units, is_int8=True))
        if k == 576:
            continue
        w8a16 = partial(int8_gemm, meta(m, k), meta(n, k, dtype=I8), columns)
        found.append(Case(f"w8a16 {m} x {n} x {k}", w8a16, {0: (r"mma\S*bf16|tcgen05",)}))
        fp8 = partial(fp8_gemm, meta(m, k, dtype=FP8), meta(n, k, dtype=FP8), rows, columns)
        # few rows: Triton widens e4m3 to float16 for mma.sync, which loses nothing, and waits for the weights anyway
        found.append(Case(f"fp8 {m} x {n} x {k}", fp8, {0: (r"mma\S*e4m3|tcgen05|mma\S*f16",)}, archs=(89, 90, 100)))
        w4a16 = partial(int4_gemm, meta(m, k), meta(n, k // 2, dtype=torch.uint8), meta(k // 128, n, dtype=F32))
        found.append(Case(f"w4a16 {m} x {n} x {k}", w4a16, {0: (r"mma\S*bf16|tcgen05",)}))
    for m, n, k, num_scales in ((16, 4096, 4096, 1), (2048, 4096, 14336, 4096)):
        run = partial(
            int8_gemm, meta(m, k, dtype=I8), meta(n, k, dtype=I8), meta(n, dtype=F32), a_scale=meta(m, dtype=F32),
            bias=meta(n), out_dtype=I8, out_scale=meta(num_scales, dtype=F32),
        )  # fmt: skip
        kind = "int8 result" if num_scales == 1 else "int8 result a channel"
        units = S8_UNITS if m > 32 else {0: (r"mma\.sync\S*s8",)}
        found.append(Case(f"w8a8 {m} x {n} x {k}, bias, {kind}", run, units, is_int8=True))
    # in equal shares of all tiles: the first on sm_90, sm_100 and MI300, the others on all but sm_90. Their outer loop is
    # over tiles: it loads the scales of a tile's rows and columns
    shared = partial(Case, expect=S8_UNITS, max_scalar_loads_in_loops=16, is_int8=True)
    down = partial(
        int8_gemm, meta(128, 14336, dtype=I8), meta(4096, 14336, dtype=I8), meta(4096, dtype=F32),
        a_scale=meta(128, dtype=F32), residual=meta(128, 4096),
    )  # fmt: skip
    found.append(shared("w8a8 128 x 4096 x 14336, residual", down))
    down = partial(
        int8_gemm,
        meta(256, 8192, dtype=I8),
        meta(2048, 8192, dtype=I8),
        meta(2048, dtype=F32),
        a_scale=meta(256, dtype=F32),
    )
    found.append(shared("w8a8 256 x 2048 x 8192", down))
    down = partial(down, bias=meta(2048), residual=meta(256, 2048), out_dtype=I8, out_scale=meta(2048, dtype=F32))
    # as of the next case's bias
    found.append(shared("w8a8 256 x 2048 x 8192, bias, residual, int8 result a channel", down, max_narrow_loads=1))
    many = partial(
        int8_gemm, meta(2048, 14336, dtype=I8), meta(4096, 14336, dtype=I8), meta(4096, dtype=F32),
        a_scale=meta(2048, dtype=F32), bias=meta(4096), residual=meta(2048, 4096),
    )  # fmt: skip
    # a program's stretch of the bias is as wide as its threads are many
    found.append(Case("w8a8 2048 x 4096 x 14336, bias, residual", many, S8_UNITS, max_narrow_loads=1, is_int8=True))
    return found


def expert_cases() -> list[Case]:
    """Qwen3-30B-A3B's experts (128, 8 a token) and Mixtral's (8, 2 a token), for few and for many tokens."""
    found = []
    for num_tokens, num_experts, top_k, n, k in ((16, 128, 8, 1536, 2048), (2048, 8, 2, 28672, 4096)):
        pairs = num_tokens * top_k
        sent = Routing(meta(num_tokens, top_k, dtype=F32), meta(pairs, dtype=I32), meta(num_experts + 1, dtype=I32))
        name = f"{num_experts} experts, {num_tokens} x {top_k} tokens"
        product = partial(grouped_gemm, routing=sent)
        up = partial(product, meta(num_tokens, k), meta(num_experts, n, k), gather=True, scatter=False)
        many = num_tokens > 64
        found.append(Case(f"grouped bf16, {name}", up, UNITS if many else {0: (r"mma",)}))
        down = partial(
            product, meta(pairs, n // 2, dtype=I8), meta(num_experts, k, n // 2, dtype=I8), gather=False, scatter=True,
            a_scale=meta(pairs, dtype=F32), w_scale=meta(num_experts, k, dtype=F32),
        )  # fmt: skip
        found.append(Case(f"grouped w8a8, {name}", down, S8_UNITS if many else {0: (r"mma\S*s8",)}, is_int8=True))
        combine = partial(
            combine_experts, meta(pairs, k), meta(num_tokens, top_k, dtype=F32), residual=meta(num_tokens, k)
        )
        found.append(Case(f"combine, {name}", combine))
    return found


def lora_cases() -> list[Case]:
    """Eight adapters over an 8B model's linears: a decode step's rows, and a prompt's; INT8 rows."""
    found = []
    numbers = meta(8, dtype=torch.int64)
    for m, n, k, rank in ((64, 6144, 4096, 48), (2048, 4096, 14336, 64)):
        rows = LoraRows(meta(m, dtype=I32), meta(9, dtype=I32))
        table = LoraTable(numbers, numbers, numbers, rank, BF16)
        run = partial(lora_add, meta(m, n), meta(m, k), rows, table)
        found.append(Case(f"lora {m} x {n} x {k}, rank {rank}", run, {0: (r"mma",)}))
    int8 = partial(
        lora_add, meta(64, 6144), meta(64, 4096, dtype=I8), LoraRows(meta(64, dtype=I32), meta(9, dtype=I32)),
        LoraTable(numbers, numbers, numbers, 16, BF16), x_scale=meta(64, dtype=F32),
    )  # fmt: skip
    found.append(Case("lora 64 x 6144 x 4096, rank 16, int8 rows", int8, {0: (r"mma",)}))
    return found


def head_cases() -> list[Case]:
    """Llama 3's vocabulary."""
    floats, integers, longs = (meta(64, dtype=dtype) for dtype in (F32, I32, torch.int64))
    doubles = meta(64, dtype=torch.float64)
    rows = SamplingRows(floats, integers, doubles, doubles, longs, integers)
    bias, seen = (Entries(meta(65, dtype=I32), meta(5000, dtype=I32), meta(5000, dtype=kind)) for kind in (F32, I32))
    changes = LogitChanges(integers, bias, seen, floats, floats, floats, meta(64, 4008, dtype=I32))
    return [
        Case("embedding 128256 x 4096", partial(embedding, integers, meta(128256, 4096))),
        Case(
            "lm_head_argmax 64 x 128256 x 4096",
            partial(lm_head_argmax, meta(64, 4096), meta(128256, 4096)),
            UNITS,
            small=("reduce",),
        ),
        Case(
            "lm_head_reduce w8a8 64 x 128256 x 4096, 20 largest, some logits",
            partial(
                lm_head_reduce,
                meta(64, 4096, dtype=I8),
                HeadWeights(meta(128256, 4096, dtype=I8), meta(128256, dtype=F32)),
                x_scale=floats,
                top_k=20,
                place=integers,
                logits=meta(8, 128256, dtype=F32),
            ),
            S8_UNITS,
            small=("reduce",),
            is_int8=True,
        ),
        # the chosen token's own logit is one number of two bytes
        Case("sample 128256", partial(sample, meta(64, 128256), rows), max_narrow_loads=1),
        Case("sample 128256, float32", partial(sample, meta(64, 128256, dtype=F32), rows)),
        Case(
            "token_logprobs 128256, 20 largest",
            partial(token_logprobs, meta(64, 128256), integers, 20),
            max_narrow_loads=1,
        ),
        # lists of a few tokens, wherever they lie; and a mask that eight threads share a word of
        Case(
            "change_logits 128256",
            partial(change_logits, meta(64, 128256, dtype=F32), changes),
            max_scalar_loads_in_loops=24,
            small=("bias", "penalty", "mask"),
        ),
    ]


def all_cases() -> list[Case]:
    """Every case of the gate."""
    return rows_cases() + rope_cases() + attention_cases() + gemm_cases() + expert_cases() + lora_cases() + head_cases()
