"""A decoder of the Llama shape as few, large operations: what the fused path runs instead of transformers' modules."""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from batchinfer.models.fused.head import Head
from batchinfer.models.fused.layer import LayerRunner, Step
from batchinfer.models.fused.program import program_of
from batchinfer.models.fused.timed import HEAD_KINDS, OPS_KINDS, Timed
from batchinfer.models.parallel.fused import SharedEmbedding, SharedHead
from batchinfer.models.parallel.words import Words
from batchinfer_kernels.cpu import Accumulated, LogitsReduction

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchinfer.models.fused.adapted import AdapterGroup, AdapterSlots
    from batchinfer.models.fused.layer import FusedLayer, StepContext
    from batchinfer.models.fused.linear import Linear
    from batchinfer.models.fused.spec import DecoderSpec
    from batchinfer.models.parallel.peers import Peers
    from batchinfer_kernels.cpu import Ops
    from batchinfer_kernels.cpu.operands import Activations


class FusedDecoder:
    """Embeddings, layers and head. The residual stream is float32 in every precision."""

    def __init__(
        self,
        ops: Ops,
        spec: DecoderSpec,
        layers: Sequence[FusedLayer],
        head: Linear,
        dtype: torch.dtype,
        *,
        adapters: AdapterSlots,
        peers: Peers | None = None,
    ) -> None:
        """``dtype`` is that of queries and of the KV cache; ``adapters`` knows the linears of ``layers``.

        With ``peers`` embeddings and head are those of a rank's words.
        """
        self._ops = ops
        self._run_layer = LayerRunner(ops, dtype)
        self._spec = spec
        self._layers = layers
        self._program = program_of(ops, layers, dtype)
        self._spent: dict[str, int] | None = None
        own_head = Head(ops, head, spec.head.out_features, spec.logits_scale, spec.logits_softcap)
        self._head: Head | SharedHead = own_head
        self._embed: Callable[[torch.Tensor], torch.Tensor] = spec.embed
        if peers is not None:
            words = Words(spec.head.out_features, peers)
            self._head, self._embed = SharedHead(own_head, words, peers), SharedEmbedding(spec, words, peers)
        self._dtype = dtype
        self.adapters = adapters

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        sampling: torch.Tensor,
        context: StepContext,
        kept: Sequence[int],
        *,
        groups: Sequence[AdapterGroup] = (),
    ) -> LogitsReduction:
        """The best token of each row in ``sampling``, and the logits of those at the places ``kept`` of it.

        ``token_ids``, ``positions`` and ``sampling`` are int64; the first two have a row each of the packed batch.
        ``groups`` are those rows of it that use adapters.
        """
        self.adapters.groups = groups
        residual, x = self._body(token_ids, positions, context)
        if not _is_every(sampling, len(residual)):
            return self._reduce(residual, x, sampling, kept)
        return self._reduce_rows(residual, x, kept)  # nobody reads them again

    def with_hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: StepContext,
        hidden: torch.Tensor,
        *,
        groups: Sequence[AdapterGroup] = (),
    ) -> tuple[Callable[[torch.Tensor, Sequence[int]], LogitsReduction], torch.Tensor]:
        """What a call's head makes of ``sampling`` and ``kept``, and hidden states.

        These are of the rows in ``hidden``, after the last norm: float32 ``[rows, hidden_size]``.
        """
        self.adapters.groups = groups
        residual, x = self._body(token_ids, positions, context)
        states = residual.index_select(0, hidden)
        if x is not None:
            states += self._ops.convert(_rows(x, hidden), torch.float32)
        norm = self._spec.final_norm
        hidden_states = self._ops.rms_norm(
            states, norm.weight, norm.eps, weight_offset=norm.offset, out_dtype=torch.float32
        )
        return partial(self._reduce, residual, x), hidden_states

    def _body(
        self, token_ids: torch.Tensor, positions: torch.Tensor, context: StepContext
    ) -> tuple[torch.Tensor, Activations | None]:
        """The residual stream after the layers, and what the last one still has to add to it."""
        residual = self._embed(token_ids)
        x: Activations | None = None
        if self._program is not None and not self.adapters.groups and len(residual):
            x = self._program(residual, positions, context)
            self._note(self._program.take_spent())
            return residual, x
        step = Step(residual, positions, context)
        for index, layer in enumerate(self._layers):
            x = self._run_layer(index, layer, x, step)
        return residual, x

    def _reduce(
        self, residual: torch.Tensor, x: Activations | None, sampling: torch.Tensor, kept: Sequence[int]
    ) -> LogitsReduction:
        if not len(sampling):
            return LogitsReduction(0)
        return self._reduce_rows(residual.index_select(0, sampling), None if x is None else _rows(x, sampling), kept)

    def _reduce_rows(self, residual: torch.Tensor, x: Activations | None, kept: Sequence[int]) -> LogitsReduction:
        """Of every row; ``residual`` is changed."""
        norm = self._spec.final_norm
        rows = self._head.norm(residual, norm, None) if x is None else self._head.norm(x, norm, residual)
        return self._head(rows, len(residual), kept)

    def _note(self, parts: Mapping[str, int]) -> None:
        if self._spent is not None:
            for part, nanoseconds in parts.items():
                self._spent[part] = self._spent.get(part, 0) + nanoseconds

    def timed(self, spent: dict[str, int]) -> FusedDecoder:
        """The same decoder, same weights, that adds its parts' nanoseconds to ``spent``; slower by their overhead."""
        twin = copy(self)
        ops: Any = Timed(self._ops, OPS_KINDS, spent)
        head = Timed(self._head, HEAD_KINDS, spent)
        layers = [layer.timed(spent) for layer in self._layers]
        vars(twin).update(_run_layer=LayerRunner(ops, self._dtype), _head=head, _layers=layers, _spent=spent)
        return twin


def _is_every(rows: torch.Tensor, count: int) -> bool:
    """Whether these are all rows in their order, as in a step that only decodes."""
    return 0 < len(rows) == count and rows.device.type == "cpu" and torch.equal(rows, torch.arange(count))


def _rows(x: Activations, rows: torch.Tensor) -> Activations:
    if isinstance(x, Accumulated):
        return Accumulated(x.values.index_select(0, rows), x.row_scale.index_select(0, rows), x.column_scale, x.bias)
    return x.index_select(0, rows)
