"""The inputs of captured decode batches: buffers on the device that never move, filled by one copy a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from batchinfer.engine.gpu.decode_plan import plan_decode
from batchinfer.engine.gpu.transfer import empty_on_host, mark
from batchinfer.engine.triton_attention import TritonContext, prefix_groups, query_spans
from batchinfer_kernels.attention_plan import ITEM_FIELDS, AttentionPlan, QuerySpan, plan_attention, tile_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from batchinfer.engine.attention_groups import Span
    from batchinfer.engine.gpu.seats import Seats
    from batchinfer.engine.gpu.transfer import Event
    from batchinfer.engine.triton_attention import PlanKind, TritonAttention
    from batchinfer_kernels.attention_plan import PrefixGroup

    Ints = npt.NDArray[np.int32]

ALIGNMENT = 64
"""Sections begin at multiples of so many int32: 256 bytes, as torch's own tensors do."""
SHARED_SPLITS = 16
"""Splits of a shared prefix that a batch's plan has room for, a row: 8,192 tokens with splits of 512."""
QUERY_FIELDS, MERGE_FIELDS = 2, 3


@dataclass(frozen=True, slots=True)
class PlanRoom:
    """How much a plan for a batch of ``size`` rows can hold."""

    items: int
    partials: int
    queries: int
    merges: int

    @classmethod
    def of(cls, size: int, max_model_len: int, kv_tokens: int, split: int) -> PlanRoom:
        """Room for what ``kv_tokens`` slots can hold; contexts that share blocks can be more, and then run eagerly."""
        most = size * -(-max_model_len // split)
        items = min(most, size + kv_tokens // split)
        partials = min(most, items + SHARED_SPLITS * size)
        return cls(items, partials, partials + size, size)

    def holds(self, plan: AttentionPlan) -> bool:
        """Whether a plan fits."""
        return (
            len(plan.items) <= self.items
            and plan.num_partials <= self.partials
            and len(plan.queries) <= self.queries
            and len(plan.merges) <= self.merges
        )


class DecodeBatch:
    """Token ids, positions, slots and attention plans of a batch in which each sequence has one token.

    Everything lies in one int32 buffer with the same layout for all sizes, so that one copy from pinned memory fills it.
    Two host buffers take turns: one is written while the copy of the other may still be under way. A token id below 0
    stands for the last sampled token of the sequence in seat ``-1 - id``.
    """

    def __init__(
        self,
        max_size: int,
        kinds: Sequence[PlanKind],
        attention: TritonAttention,
        seats: Seats,
        max_model_len: int,
    ) -> None:
        device = seats.tables.device
        self._attention = attention
        self._seats = seats
        self._kinds = kinds
        self._max_model_len = max_model_len
        self._at: dict[tuple[str, int], int] = {}
        length = 0
        room = self.room(max_size)
        sections = [(name, 0, max_size) for name in ("token_ids", "positions", "slots")]
        for i in range(len(kinds)):
            sections += [
                ("items", i, room.items * ITEM_FIELDS),
                ("queries", i, room.queries * QUERY_FIELDS),
                ("merges", i, room.merges * MERGE_FIELDS),
            ]
        for name, kind, size in sections:
            self._at[name, kind] = length
            length += -(-size // ALIGNMENT) * ALIGNMENT
        self.buffer = torch.zeros(length, dtype=torch.int32, device=device)
        self.sampling = torch.arange(max_size, dtype=torch.int64, device=device)
        self._hosts = [empty_on_host((length,), torch.int32, device).zero_() for _ in range(2)]
        self._copied: list[Event | None] = [None, None]
        self._turn = 0

    def room(self, size: int) -> PlanRoom:
        """What the plan of a batch of ``size`` rows can hold."""
        attention = self._attention
        return PlanRoom.of(size, self._max_model_len, attention.num_blocks * attention.block_size, attention.split)

    def token_ids(self, size: int) -> torch.Tensor:
        """int64 ``[size]``, computed anew from the buffers."""
        ids = self._section("token_ids", 0, size)
        last = self._seats.sampled.index_select(0, (-1 - ids).clamp_(min=0))
        return torch.where(ids < 0, last, ids)

    def positions(self, size: int) -> torch.Tensor:
        """int64 ``[size]``, computed anew from the buffers."""
        return self._section("positions", 0, size).long()

    def context(self, size: int) -> TritonContext:
        """The attention's context over the buffers."""
        room = self.room(size)
        plans = {}
        for i, kind in enumerate(self._kinds):
            small, large = tile_rows(kind.group_size)
            plans[kind] = AttentionPlan(
                items=self._section("items", i, room.items * ITEM_FIELDS).view(-1, ITEM_FIELDS),
                queries=self._section("queries", i, room.queries * QUERY_FIELDS).view(-1, QUERY_FIELDS),
                merges=self._section("merges", i, room.merges * MERGE_FIELDS).view(-1, MERGE_FIELDS),
                num_partials=room.partials,
                small_tile=small,
                large_tile=large,
                has_small=True,
                has_large=True,
            )
        return TritonContext(
            self._attention,
            num_tokens=size,
            slots=self._section("slots", 0, size),
            positions=self._section("positions", 0, size),
            block_tables=self._seats.tables,
            plans=plans,
        )

    def fill(self, size: int, token_ids: Sequence[int], spans: Sequence[Span], rows: Sequence[int]) -> bool:
        """Send a step's inputs to the device; False, and nothing is sent, if its plan has no room.

        Padding rows are sequences of one token in the trash block: what they compute is finite, and nobody reads it.
        """
        count, block_size = len(spans), self._attention.block_size
        groups = prefix_groups(spans, block_size, self._attention.split)
        room = self.room(size)
        plans = []
        for kind in self._kinds:
            plan = self._plan(kind, size, spans, rows, groups)
            if not room.holds(plan):
                return False
            plans.append(plan)
        host = self._next_host()
        trash = self._attention.trash_block * block_size
        slots = [s.block_table[s.start // block_size] * block_size + s.start % block_size for s in spans]
        self._write(host, ("token_ids", 0), size, token_ids)
        self._write(host, ("positions", 0), size, [s.start for s in spans])
        self._write(host, ("slots", 0), size, [*slots, *range(trash, trash + size - count)])
        for i, plan in enumerate(plans):
            self._write(host, ("items", i), room.items * ITEM_FIELDS, plan.items.flatten().numpy())
            self._write(host, ("queries", i), room.queries * QUERY_FIELDS, plan.queries.flatten().numpy())
            self._write(host, ("merges", i), room.merges * MERGE_FIELDS, plan.merges.flatten().numpy(), rest=-1)
        self.buffer.copy_(self._hosts[self._turn], non_blocking=True)
        self._copied[self._turn] = mark(self.buffer.device)
        return True

    def _plan(
        self, kind: PlanKind, size: int, spans: Sequence[Span], rows: Sequence[int], groups: Sequence[PrefixGroup]
    ) -> AttentionPlan:
        """The work of a kind of layer, padding included."""
        padding, trash_row, split = size - len(spans), self._seats.trash_row, self._attention.split
        window = kind.sliding_window
        if not groups:
            contexts = np.array([s.context for s in spans] + [1] * padding)
            tables = np.array([*rows, *[trash_row] * padding])
            return plan_decode(contexts, tables, group_size=kind.group_size, sliding_window=window, split=split)
        pads = [QuerySpan(row, 1, 1, trash_row) for row in range(len(spans), size)]
        return plan_attention(
            [*query_spans(spans, rows), *pads],
            group_size=kind.group_size,
            sliding_window=window,
            prefix_groups=groups,
            split=split,
        )

    def _section(self, name: str, kind: int, size: int) -> torch.Tensor:
        at = self._at[name, kind]
        return self.buffer[at : at + size]

    def _next_host(self) -> Ints:
        """The host buffer that was copied longest ago."""
        self._turn = 1 - self._turn
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        found: Ints = self._hosts[self._turn].numpy()
        return found

    def _write(
        self, host: Ints, section: tuple[str, int], size: int, values: Sequence[int] | Ints, *, rest: int = 0
    ) -> None:
        at = self._at[section]
        host[at : at + len(values)] = values
        host[at + len(values) : at + size] = rest
