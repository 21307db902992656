"""The kernels as ops of ``torch.ops.batchinfer``: ``torch.compile`` and CUDA graphs see one node with known shapes.

Each takes tensors and plain numbers only, says what it writes to, and has a fake implementation that gives shapes without
running anything. Importing this module registers them; the Python functions beside it take the same in records.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from batchinfer_kernels import act_and_mul as _act
from batchinfer_kernels import embedding as _embedding
from batchinfer_kernels import fp8_gemm as _fp8
from batchinfer_kernels import grouped_gemm as _grouped
from batchinfer_kernels import int4_gemm as _int4
from batchinfer_kernels import int8_gemm as _int8
from batchinfer_kernels import kv_write as _kv_write
from batchinfer_kernels import lm_head as _lm_head
from batchinfer_kernels import logit_changes as _changes
from batchinfer_kernels import logprobs as _logprobs
from batchinfer_kernels import lora as _lora
from batchinfer_kernels import merge_states as _merge
from batchinfer_kernels import paged_attention as _attention
from batchinfer_kernels import quantize as _quantize
from batchinfer_kernels import rms_norm as _rms_norm
from batchinfer_kernels import rope_and_kv_write as _rope
from batchinfer_kernels import sampler as _sampler
from batchinfer_kernels.attention_plan import AttentionPlan
from batchinfer_kernels.paged_kv import PagedKV
from batchinfer_kernels.routing import Routing

NAMESPACE = "batchinfer"


def _like(x: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return x.new_empty(shape, dtype=dtype or x.dtype)


def _int8_rows(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    return _like(x, x.shape[0], n, dtype=torch.int8), _like(x, x.shape[0], dtype=torch.float32)


@custom_op(f"{NAMESPACE}::rms_norm", mutates_args=("residual",))
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0, residual: Tensor | None = None
) -> Tensor:
    """See :func:`batchinfer_kernels.rms_norm.rms_norm`."""
    return _rms_norm.rms_norm(x, weight, eps, weight_offset=weight_offset, residual=residual)


rms_norm.register_fake(lambda x, *_: _like(x, *x.shape))


@custom_op(f"{NAMESPACE}::rms_norm_quantize", mutates_args=("residual",))
def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0, residual: Tensor | None = None,
    smoothing: Tensor | None = None, rotation: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See :func:`batchinfer_kernels.rms_norm.rms_norm_quantize`."""
    return _rms_norm.rms_norm_quantize(
        x, weight, eps, weight_offset=weight_offset, residual=residual, smoothing=smoothing, rotation=rotation
    )


rms_norm_quantize.register_fake(lambda x, *_: _int8_rows(x, x.shape[1]))


@custom_op(f"{NAMESPACE}::act_and_mul", mutates_args=())
def act_and_mul(x: Tensor, activation: str) -> Tensor:
    """See :func:`batchinfer_kernels.act_and_mul.act_and_mul`."""
    return _act.act_and_mul(x, activation)


act_and_mul.register_fake(lambda x, *_: _like(x, x.shape[0], x.shape[1] // 2))


@custom_op(f"{NAMESPACE}::act_and_mul_quantize", mutates_args=())
def act_and_mul_quantize(
    x: Tensor, activation: str, smoothing: Tensor | None = None, rotation: int = 0, groups: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See :func:`batchinfer_kernels.act_and_mul.act_and_mul_quantize`."""
    return _act.act_and_mul_quantize(x, activation, smoothing=smoothing, rotation=rotation, groups=groups)


act_and_mul_quantize.register_fake(lambda x, *_: _int8_rows(x, x.shape[1] // 2))


@custom_op(f"{NAMESPACE}::quantize_rows", mutates_args=())
def quantize_rows(
    x: Tensor, smoothing: Tensor | None = None, rotation: int = 0, source: Tensor | None = None, groups: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See :func:`batchinfer_kernels.quantize.quantize_rows`."""
    return _quantize.quantize_rows(x, smoothing=smoothing, rotation=rotation, source=source, groups=groups)


@quantize_rows.register_fake
def _(
    x: Tensor, smoothing: Tensor | None = None, rotation: int = 0, source: Tensor | None = None, groups: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    del smoothing, rotation, groups
    return _int8_rows(x if source is None else source, x.shape[1])


@custom_op(f"{NAMESPACE}::int8_gemm", mutates_args=())
def int8_gemm(
    a: Tensor, w: Tensor, w_scale: Tensor, out_dtype: torch.dtype, a_scale: Tensor | None = None,
    bias: Tensor | None = None, residual: Tensor | None = None, out_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See :func:`batchinfer_kernels.int8_gemm.int8_gemm`."""
    return _int8.int8_gemm(
        a, w, w_scale, a_scale=a_scale, bias=bias, residual=residual, out_dtype=out_dtype, out_scale=out_scale
    )


int8_gemm.register_fake(lambda a, w, _w_scale, out_dtype, *_: _like(a, a.shape[0], w.shape[0], dtype=out_dtype))


@custom_op(f"{NAMESPACE}::fp8_gemm", mutates_args=())
def fp8_gemm(
    a: Tensor, w: Tensor, a_scale: Tensor, w_scale: Tensor, out_dtype: torch.dtype,
    bias: Tensor | None = None, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See :func:`batchinfer_kernels.fp8_gemm.fp8_gemm`."""
    return _fp8.fp8_gemm(a, w, a_scale, w_scale, bias=bias, residual=residual, out_dtype=out_dtype)


fp8_gemm.register_fake(
    lambda a, w, _a_scale, _w_scale, out_dtype, *_: _like(a, a.shape[0], w.shape[0], dtype=out_dtype)
)


@custom_op(f"{NAMESPACE}::int4_gemm", mutates_args=())
def int4_gemm(a: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :func:`batchinfer_kernels.int4_gemm.int4_gemm`."""
    return _int4.int4_gemm(a, w, scale, bias=bias)


int4_gemm.register_fake(lambda a, w, *_: _like(a, a.shape[0], w.shape[0]))


@custom_op(f"{NAMESPACE}::grouped_gemm", mutates_args=())
def grouped_gemm(
    a: Tensor, w: Tensor, weights: Tensor, order: Tensor, offsets: Tensor, gather: bool, scatter: bool,
    out_dtype: torch.dtype, a_scale: Tensor | None = None, w_scale: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See :func:`batchinfer_kernels.grouped_gemm.grouped_gemm`; ``weights``, ``order`` and ``offsets`` are the routing."""
    return _grouped.grouped_gemm(
        a, w, Routing(weights, order, offsets), gather=gather, scatter=scatter, a_scale=a_scale, w_scale=w_scale,
        bias=bias, out_dtype=out_dtype,
    )  # fmt: skip


grouped_gemm.register_fake(
    lambda a, w, _weights, order, _offsets, _gather, _scatter, out_dtype, *_: _like(
        a, order.shape[0], w.shape[1], dtype=out_dtype
    )
)


@custom_op(f"{NAMESPACE}::combine_experts", mutates_args=())
def combine_experts(y: Tensor, weights: Tensor, out_dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
    """See :func:`batchinfer_kernels.grouped_gemm.combine_experts`."""
    return _grouped.combine_experts(y, weights, residual=residual, out_dtype=out_dtype)


combine_experts.register_fake(lambda y, weights, out_dtype, *_: _like(y, weights.shape[0], y.shape[1], dtype=out_dtype))


@custom_op(f"{NAMESPACE}::lora_add", mutates_args=("out",))
def lora_add(
    out: Tensor, x: Tensor, order: Tensor, offsets: Tensor, downs: Tensor, ups: Tensor, ranks: Tensor, max_rank: int,
    dtype: torch.dtype, x_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """See :func:`batchinfer_kernels.lora.lora_add`; what ``downs`` and ``ups`` point to is read unseen."""
    table = _lora.LoraTable(downs, ups, ranks, max_rank, dtype)
    _lora.lora_add(out, x, _lora.LoraRows(order, offsets), table, x_scale=x_scale)


lora_add.register_fake(lambda *_: None)


@custom_op(f"{NAMESPACE}::kv_write", mutates_args=("keys", "values", "key_scale", "value_scale"))
def kv_write(
    k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, values: Tensor,
    key_scale: Tensor | None = None, value_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """See :func:`batchinfer_kernels.kv_write.kv_write`; ``keys`` and so on are the cache's."""
    _kv_write.kv_write(k, v, slots, PagedKV(keys, values, key_scale, value_scale))


kv_write.register_fake(lambda *_: None)


@custom_op(f"{NAMESPACE}::rope_and_kv_write", mutates_args=("keys", "values", "key_scale", "value_scale"))
def rope_and_kv_write(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, slots: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
    key_scale: Tensor | None = None, value_scale: Tensor | None = None, interleaved: bool = False,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, norm_offset: float = 0.0, norm_eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """See :func:`batchinfer_kernels.rope_and_kv_write.rope_and_kv_write`."""
    rope = _rope.Rope(cos, sin, interleaved, q_norm, k_norm, norm_offset, norm_eps)
    cache = PagedKV(keys, values, key_scale, value_scale)
    return _rope.rope_and_kv_write(q, k, v, positions, slots, rope, cache)


rope_and_kv_write.register_fake(lambda q, *_: _like(q, *q.shape))


@custom_op(f"{NAMESPACE}::paged_attention", mutates_args=())
def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, key_scale: Tensor | None, value_scale: Tensor | None, block_tables: Tensor,
    positions: Tensor, items: Tensor, queries: Tensor, merges: Tensor, num_partials: int, tiles: list[int], scale: float,
    sliding_window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See :func:`batchinfer_kernels.paged_attention.paged_attention`.

    ``tiles`` are a plan's ``small_tile``, ``large_tile``, ``has_small`` and ``has_large`` as integers.
    """
    small, large, has_small, has_large = tiles
    plan = AttentionPlan(items, queries, merges, num_partials, small, large, bool(has_small), bool(has_large))
    form = _attention.AttentionForm(scale, sliding_window, softcap, sinks)
    return _attention.paged_attention(
        q, PagedKV(keys, values, key_scale, value_scale), block_tables, positions, plan, form
    )


paged_attention.register_fake(lambda q, *_: _like(q, *q.shape))


@custom_op(f"{NAMESPACE}::merge_states", mutates_args=())
def merge_states(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`batchinfer_kernels.merge_states.merge_states`."""
    return _merge.merge_states(outputs, lses)


merge_states.register_fake(lambda outputs, lses: (_like(outputs, *outputs.shape[1:]), _like(lses, *lses.shape[1:])))


@custom_op(f"{NAMESPACE}::embedding", mutates_args=())
def embedding(ids: Tensor, table: Tensor, scale: float = 1.0, first_id: int = 0) -> Tensor:
    """See :func:`batchinfer_kernels.embedding.embedding`."""
    return _embedding.embedding(ids, table, scale=scale, first_id=first_id)


embedding.register_fake(lambda ids, table, *_: _like(table, ids.shape[0], table.shape[1]))


@custom_op(f"{NAMESPACE}::lm_head_argmax", mutates_args=())
def lm_head_argmax(x: Tensor, w: Tensor, scale: float = 1.0, softcap: float | None = None) -> tuple[Tensor, Tensor]:
    """See :func:`batchinfer_kernels.lm_head.lm_head_argmax`."""
    return _lm_head.lm_head_argmax(x, w, scale=scale, softcap=softcap)


lm_head_argmax.register_fake(
    lambda x, *_: (_like(x, x.shape[0], dtype=torch.int32), _like(x, x.shape[0], dtype=torch.float32))
)


@custom_op(f"{NAMESPACE}::lm_head_reduce", mutates_args=("logits",))
def lm_head_reduce(
    x: Tensor, w: Tensor, x_scale: Tensor | None = None, w_scale: Tensor | None = None, bias: Tensor | None = None,
    scale: float = 1.0, softcap: float | None = None, top_k: int = 0, place: Tensor | None = None, logits: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See :func:`batchinfer_kernels.lm_head.lm_head_reduce`; the fields of its result."""
    head = _lm_head.HeadWeights(w, w_scale, bias, scale, softcap)
    found = _lm_head.lm_head_reduce(x, head, x_scale=x_scale, top_k=top_k, place=place, logits=logits)
    return found.best, found.token, found.logprob, found.top_values.contiguous(), found.top_tokens


@lm_head_reduce.register_fake
def _(
    x: Tensor, _w: Tensor, _x_scale: Tensor | None = None, _w_scale: Tensor | None = None, _bias: Tensor | None = None,
    _scale: float = 1.0, _softcap: float | None = None, top_k: int = 0, *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    m = x.shape[0]
    floats = [_like(x, *shape, dtype=torch.float32) for shape in ((m,), (m,), (m, top_k))]
    return floats[0], _like(x, m, dtype=torch.int32), floats[1], floats[2], _like(x, m, top_k, dtype=torch.int32)


@custom_op(f"{NAMESPACE}::sample", mutates_args=())
def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """See :func:`batchinfer_kernels.sampler.sample`."""
    return _sampler.sample(logits, _sampler.SamplingRows(temperature, top_k, top_p, min_p, seed, position))


sample.register_fake(
    lambda logits, *_: (
        _like(logits, logits.shape[0], dtype=torch.int32),
        _like(logits, logits.shape[0], dtype=torch.float32),
    )
)


@custom_op(f"{NAMESPACE}::token_logprobs", mutates_args=())
def token_logprobs(
    logits: Tensor, tokens: Tensor, num_top: int, rows: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`batchinfer_kernels.logprobs.token_logprobs`."""
    return _logprobs.token_logprobs(logits, tokens, num_top, rows=rows)


@token_logprobs.register_fake
def _(logits: Tensor, tokens: Tensor, num_top: int, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    n = tokens.shape[0]
    chosen, top = _like(logits, n, dtype=torch.float32), _like(logits, n, num_top, dtype=torch.float32)
    return chosen, _like(logits, n, num_top, dtype=torch.int32), top


@custom_op(f"{NAMESPACE}::change_logits", mutates_args=("logits",))
def change_logits(
    logits: Tensor, rows: Tensor, bias: list[Tensor], seen: list[Tensor], penalties: list[Tensor], mask: Tensor | None = None
) -> None:  # fmt: skip
    """See :func:`batchinfer_kernels.logit_changes.change_logits`.

    ``bias`` and ``seen`` are starts, ids and values; ``penalties`` repetition, frequency and presence; empty where unused.
    """
    repetition, frequency, presence = penalties or (None, None, None)
    _changes.change_logits(
        logits,
        _changes.LogitChanges(
            rows,
            _changes.Entries(*bias) if bias else None,
            _changes.Entries(*seen) if seen else None,
            repetition,
            frequency,
            presence,
            mask,
        ),
    )


change_logits.register_fake(lambda *_: None)
