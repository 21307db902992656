"""Causal attention over paged KV, for a packed mix of prefill chunks and decode tokens.

This is the reference: plain torch, float32 accumulation, any device. It is registered with transformers under
:data:`ATTENTION_NAME`, receives queries and keys after RoPE, and finds the step's layout in the keyword
``paged_context`` that every decoder of transformers hands through to its attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from batchinfer.engine.attention_groups import AttentionGroup
    from batchinfer.engine.kv_cache import KVCache

ATTENTION_NAME = "batchinfer_paged"
MAX_SCORES = 4 * 1024 * 1024
"""Attention scores held at once: 16 MB of float32, so that a long chunk over a long context stays small."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer's attention adds to the plain one. ``sinks`` is ``[num_heads]`` (gpt-oss), in float32."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class PagedContext(Protocol):
    """What an attention layer calls during a forward pass."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Attention output ``[T, num_heads, v_head_dim]`` of one layer.

        ``query [T, num_heads, head_dim]``, ``key [T, num_kv_heads, head_dim]``, ``value [T, num_kv_heads, v_head_dim]``
        are those of the packed tokens.
        """


def register_attention() -> None:
    """Make :data:`ATTENTION_NAME` known to transformers. May be called again.

    The mask function is registered too, and gives None: causality and windows are this module's affair, and a mask of
    ``[T, T]`` over packed sequences would be large and wrong.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: PLC0415 -- seconds to import
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415 -- seconds to import

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _paged_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    paged_context: PagedContext,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The signature transformers calls: ``query [1, num_heads, T, head_dim]``; returns ``[1, T, num_heads, v_head_dim]``."""
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise NotImplementedError(f"{type(module).__name__} asks for attention that is not plainly causal")
    options = AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.float(),
    )
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return paged_context.attend(module.layer_idx, q, k, v, options).unsqueeze(0), None


class BatchContext:
    """A step's layout: where new keys and values go, and which queries read which slots."""

    def __init__(self, kv_cache: KVCache, slots: torch.Tensor, groups: list[AttentionGroup]) -> None:
        """``slots [num_tokens]`` are those of the packed tokens; tokens beyond them are padding, and read nothing."""
        self._kv_cache = kv_cache
        self._slots = slots
        self._groups = groups

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Write the new KV, then read it back with what was there; see :meth:`PagedContext.attend`.

        All is written before anything is read, so a sequence may share blocks that another computes in this very step.
        """
        keys, values = self._kv_cache.layer(layer)
        num_tokens = len(self._slots)
        keys.index_copy_(0, self._slots, key[:num_tokens].to(keys.dtype))
        values.index_copy_(0, self._slots, value[:num_tokens].to(values.dtype))
        output = query.new_zeros(query.shape[0], query.shape[1], value.shape[-1])
        for group in self._groups:
            attended = attend_group(query, keys, values, group, options)
            output.index_copy_(0, group.rows, attended.to(output.dtype))
        return output


def attend_group(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: AttentionGroup, options: AttentionOptions
) -> torch.Tensor:
    """Attention of one group's queries, ``[num_rows, num_heads, v_head_dim]`` in float32, in the order of ``group.rows``.

    ``keys [num_slots, num_kv_heads, head_dim]`` and ``values`` are a layer's whole cache.
    """
    num_sequences, num_queries = group.query_rows.shape
    num_kv_heads = keys.shape[1]
    view = group.view(options.sliding_window, num_kv_heads)
    k = _gather(keys, view.rows)
    v = _gather(values, view.rows)
    q = query[group.query_rows].float() * options.scaling
    q = q.view(num_sequences, num_queries, num_kv_heads, -1, q.shape[-1]).permute(2, 0, 3, 1, 4)
    sinks = None if options.sinks is None else options.sinks.view(num_kv_heads, 1, -1, 1, 1)
    tile = max(1, MAX_SCORES // (query.shape[1] * num_sequences * view.rows.shape[2]))
    outputs = []
    for at in range(0, num_queries, tile):
        hidden = view.hidden[:, :, at : at + tile]
        weights = _weights(q[..., at : at + tile, :], k, hidden, options.softcap, sinks)
        outputs.append(torch.bmm(weights.flatten(2, 3).flatten(0, 1), v.flatten(0, 1)).view(*weights.shape[:-1], -1))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=3)
    # [kv_head, sequence, group, query, dim] -> [sequence, query, head, dim]; padding queries are dropped
    output = output.permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)
    return output if group.kept is None else output[group.kept]


def _gather(cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Vectors of ``cache [num_slots, num_kv_heads, dim]`` at ``rows [num_kv_heads, n, context]``, in float32.

    Rows count slots times heads: one contiguous read and write, laid out as the batched products want it. (Selecting
    along the slots of a transposed view copies the whole cache first: seconds instead of microseconds.)
    """
    return cache.flatten(0, 1).index_select(0, rows.flatten()).view(*rows.shape, -1).float()


def _weights(
    q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention weights ``[kv_head, n, group, query, context]``.

    ``q [kv_head, n, group, query, dim]``, ``k [kv_head, n, context, dim]``; ``hidden [n, 1, query, context]`` is True
    where a query may not look.
    """
    folded = q.flatten(2, 3).flatten(0, 1)
    scores = torch.bmm(folded, k.flatten(0, 1).transpose(1, 2)).view(*q.shape[:-1], -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores.masked_fill_(hidden, float("-inf"))
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    # a sink takes its share of the softmax and gives nothing
    peak = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks)
    weights = torch.exp(scores - peak)
    return weights / (weights.sum(dim=-1, keepdim=True) + torch.exp(sinks - peak))
