"""The fused decoder on one rank: its partial products are summed over the ranks, its words are those of all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from batchinfer.models.fused.linear import WrappedLinear
from batchinfer_kernels.cpu import LogitsReduction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.models.fused.head import Head
    from batchinfer.models.fused.layer import FusedLayer
    from batchinfer.models.fused.linear import Linear, Operand
    from batchinfer.models.fused.mlp import Mlp
    from batchinfer.models.fused.spec import DecoderSpec, Norm
    from batchinfer.models.parallel.peers import Peers
    from batchinfer.models.parallel.words import Words
    from batchinfer_kernels.cpu.operands import Activations


def share_layer(layer: FusedLayer, peers: Peers) -> FusedLayer:
    """The layer with its two products behind divided inputs summed over the ranks."""
    return replace(layer, o=SummedLinear(layer.o, peers), mlp=SummedMlp(layer.mlp, peers))


class SummedLinear(WrappedLinear):
    """A product of which each rank has a share of the inputs; the shares are exchanged in the type that they come in."""

    def __init__(self, inner: Linear, peers: Peers) -> None:
        super().__init__(inner)
        self._peers = peers

    def split(self, columns: int) -> Sequence[Linear]:
        """See :meth:`~batchinfer.models.fused.linear.Linear.split`."""
        return [SummedLinear(part, self._peers) for part in self._inner.split(columns)]

    def __call__(self, x: Operand) -> torch.Tensor:
        """See :meth:`~batchinfer.models.fused.linear.Linear.__call__`; float32."""
        return _sum(self._peers, self._inner(x))


class SummedMlp:
    """An MLP of which each rank has a share of the columns."""

    def __init__(self, inner: Mlp, peers: Peers) -> None:
        self._inner = inner
        self._peers = peers

    def norm(self, x: Activations, norm: Norm, residual: torch.Tensor | None) -> Operand:
        """See :meth:`~batchinfer.models.fused.mlp.Mlp.norm`."""
        return self._inner.norm(x, norm, residual)

    def convert(self, x: Activations) -> Operand:
        """See :meth:`~batchinfer.models.fused.mlp.Mlp.convert`."""
        return self._inner.convert(x)

    def __call__(self, x: Operand) -> torch.Tensor:
        """See :meth:`~batchinfer.models.fused.mlp.Mlp.__call__`; float32."""
        return _sum(self._peers, self._inner(x))

    def timed(self, spent: dict[str, int]) -> SummedMlp:
        """See :meth:`~batchinfer.models.fused.mlp.Mlp.timed`."""
        return SummedMlp(self._inner.timed(spent), self._peers)


def _sum(peers: Peers, product: Activations) -> torch.Tensor:
    assert isinstance(product, torch.Tensor), "INT8 products are refused with tensor parallelism"
    return peers.sum(product)


class SharedEmbedding:
    """The first residual of tokens whose words are divided between the ranks."""

    def __init__(self, spec: DecoderSpec, words: Words, peers: Peers) -> None:
        self._spec = spec
        self._words = words
        self._peers = peers

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See :meth:`~batchinfer.models.fused.spec.DecoderSpec.embed`."""
        local, is_elsewhere = self._words.localize(token_ids)
        return self._peers.sum(self._spec.embed(local).masked_fill_(is_elsewhere.unsqueeze(1), 0.0))


class SharedHead:
    """The LM head whose words are divided between the ranks: all know the best word, rank 0 the logits."""

    def __init__(self, head: Head, words: Words, peers: Peers) -> None:
        """``words`` are those of ``head``."""
        self._head = head
        self._words = words
        self._peers = peers

    def norm(self, x: Activations, norm: Norm, residual: torch.Tensor | None) -> Operand:
        """See :meth:`~batchinfer.models.fused.head.Head.norm`."""
        return self._head.norm(x, norm, residual)

    def __call__(self, x: Operand, num_rows: int, kept: Sequence[int]) -> LogitsReduction:
        """See :meth:`~batchinfer.models.fused.head.Head.__call__`; on ranks other than 0 the kept logits are empty."""
        own = self._head(x, num_rows, kept)
        # a float32 is a double exactly: one exchange carries all three
        words = torch.where(own.best_index < 0, -1, own.best_index + self._words.start)
        packed = torch.stack([own.best.double().view(torch.int64), words, own.has_nan.long()])
        merged = LogitsReduction(num_rows, kept=kept, device=own.best.device)
        for best, index, has_nan in self._peers.all_gather(packed):
            value = best.view(torch.float64).float()
            is_better = value > merged.best  # not where equal: the lower word wins
            merged.best = torch.where(is_better, value, merged.best)
            merged.best_index = torch.where(is_better, index, merged.best_index)
            merged.has_nan = merged.has_nan | has_nan.bool()
        if kept:
            logits = self._words.join_first(own.logits)
            if logits is not None:
                merged.logits = logits
        return merged
