"""How a decoder's weights are divided between the ranks of tensor parallelism.

As in Megatron-LM (https://arxiv.org/abs/1909.08053): queries, keys, values, gate and up by their outputs (whole heads),
the products behind them by their inputs, so that a layer needs two sums over the ranks; embeddings and head by words.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from batchinfer.errors import ModelError
from batchinfer.models.fused.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.models.deferred import Index
    from batchinfer.models.skeleton import Loader, Loaders

UNDIVIDED = {
    "olmo2": "it norms all heads of a token together",
    "mixtral": "its experts are not divided yet",
    "qwen3_moe": "its experts are not divided yet",
}
"""Families with fused layers that run on one device only, and why."""
PARALLEL_FAMILIES = FAMILIES - UNDIVIDED.keys()
MAX_RANKS = 64
WHOLE = slice(None)


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a model: that of ``rank`` (from 0) of ``size``."""

    rank: int
    size: int

    def part(self, length: int) -> slice:
        """The rank's part of a dimension; parts differ by one at most."""
        return slice(length * self.rank // self.size, length * (self.rank + 1) // self.size)


def why_undivided(config: Any, size: int) -> str | None:
    """Why a model cannot run on ``size`` ranks; None if it can. ``config`` is transformers'."""
    family = config.model_type
    if family not in PARALLEL_FAMILIES:
        reason = UNDIVIDED.get(family, f"families that can are {', '.join(sorted(PARALLEL_FAMILIES))}")
        return f"a {family} model cannot be divided between devices: {reason}; use tensor_parallel_size 1"
    if _divides(config, size):
        return None
    heads, kv_heads = config.num_attention_heads, _num_kv_heads(config)
    sizes = ", ".join(str(n) for n in range(1, MAX_RANKS + 1) if _divides(config, n))
    return (
        f"the model's {heads} query heads, {kv_heads} KV heads and {config.intermediate_size} MLP columns "
        f"do not divide by {size}; tensor_parallel_size can be {sizes}"
    )


def _divides(config: Any, size: int) -> bool:
    """Whether each rank gets whole heads; a KV head may be held by several ranks."""
    kv_heads = _num_kv_heads(config)
    return not (
        config.num_attention_heads % size
        or (kv_heads % size and size % kv_heads)
        or config.intermediate_size % size
        or config.vocab_size < size
    )


def _num_kv_heads(config: Any) -> int:
    return getattr(config, "num_key_value_heads", None) or int(config.num_attention_heads)


class Division:
    """One rank's share of a model: a config of its sizes, and where its part of each tensor lies.

    Raises:
        ModelError: the model cannot be divided so; the message names sizes that can.
    """

    def __init__(self, config: Any, shard: Shard) -> None:
        """``config`` is that of the whole model, which is left as it is."""
        if (reason := why_undivided(config, shard.size)) is not None:
            raise ModelError(reason, param="tensor_parallel_size")
        self.shard = shard
        self._vocab_size: int = config.vocab_size
        num_heads, num_kv_heads = config.num_attention_heads, _num_kv_heads(config)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        self.config = deepcopy(config)
        self.config.head_dim = head_dim
        self.config.num_attention_heads = num_heads // shard.size
        self.config.num_key_value_heads = max(1, num_kv_heads // shard.size)
        self.config.intermediate_size = config.intermediate_size // shard.size
        queries = shard.part(num_heads * head_dim)
        first = num_kv_heads * shard.rank // shard.size * head_dim
        keys = slice(first, first + self.config.num_key_value_heads * head_dim)
        mlp, words = shard.part(config.intermediate_size), self.words
        q_end, k_end = num_heads * head_dim, (num_heads + num_kv_heads) * head_dim
        self._rows: dict[str, list[slice]] = {
            "q_proj": [queries],
            "k_proj": [keys],
            "v_proj": [keys],
            "qkv_proj": [queries, _moved(keys, q_end), _moved(keys, k_end)],
            "gate_proj": [mlp],
            "up_proj": [mlp],
            "gate_up_proj": [mlp, _moved(mlp, config.intermediate_size)],
            "embed_tokens": [words],
            "lm_head": [words],
        }
        """By module, the outputs of this rank."""
        self._columns = {"o_proj": queries, "down_proj": mlp}
        """By module, the inputs of this rank."""

    @property
    def words(self) -> slice:
        """The rank's part of the vocabulary."""
        return self.shard.part(self._vocab_size)

    def narrow(self, skeleton: Any) -> None:
        """Give embeddings and head of a skeleton the rank's number of words; the config's stays the vocabulary's."""
        num_words = self.words.stop - self.words.start
        embed = skeleton.model.embed_tokens
        embed.padding_idx = None  # only of use in training, and of no word of this rank
        for module in (embed, skeleton.lm_head):
            empty = torch.empty(num_words, module.weight.shape[1], dtype=module.weight.dtype, device="meta")
            module.weight = torch.nn.Parameter(empty, requires_grad=False)

    def loaders(self, whole: Loaders) -> Loaders:
        """Loaders that read the rank's part of each tensor alone."""
        return _ShardedLoaders(self, whole)

    def loader(self, name: str, load: Loader) -> Loader:
        """What reads the rank's part of the parameter ``name``; all of it where every rank needs all."""
        module, kind = name.split(".")[-2:]
        if module in self._rows:
            return _joined(load, [(rows, WHOLE) if kind == "weight" else (rows,) for rows in self._rows[module]])
        if module in self._columns:
            if kind == "weight":
                return _joined(load, [(WHOLE, self._columns[module])])
            return load if self.shard.rank == 0 else lambda _index: torch.zeros_like(load(None))  # added once
        return load


class _ShardedLoaders:
    """Loaders of a rank's parts, by parameter."""

    def __init__(self, division: Division, whole: Loaders) -> None:
        self._division = division
        self._whole = whole

    def __getitem__(self, name: str, /) -> Loader:
        return self._division.loader(name, self._whole[name])


def _joined(load: Loader, parts: Sequence[tuple[slice, ...]]) -> Loader:
    def load_parts(index: Index) -> torch.Tensor:
        assert index is None, "a part of a part is not read"
        found = [load(part) for part in parts]
        return found[0] if len(found) == 1 else torch.cat(found)

    return load_parts


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
