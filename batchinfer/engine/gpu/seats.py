"""Where sequences sit in the tables that lie on the device from step to step."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from batchinfer.engine.gpu.transfer import upload

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchinfer.engine.sequence import Sequence as Running


@dataclass(slots=True)
class _Seat:
    row: int
    num_cuts: int
    num_written: int = 0
    """Blocks of the sequence's table that the device knows."""


class Seats:
    """Rows of ``tables`` and ``sampled`` for the sequences of this step and of the one before.

    Block tables are only appended to, so a step sends the blocks that are new. A seat is taken from whoever has been out
    of the batch for longest; nobody says goodbye.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, trash_block: int, device: torch.device) -> None:
        """``max_blocks`` are those of the longest sequence; padding reads ``trash_block``."""
        num_seats = 2 * max_num_seqs  # a step's sequences and those of the step that still runs
        self.trash_row = num_seats
        """The row of padding: its table is all trash, its token is 0."""
        self.tables = torch.full((num_seats + 1, max_blocks), trash_block, dtype=torch.int32, device=device)
        """Block tables ``[num_seats + 1, max_blocks]``, int32."""
        self.sampled = torch.zeros(num_seats + 1, dtype=torch.int64, device=device)
        """The token that each sequence sampled last, int64 ``[num_seats + 1]``."""
        self._free = list(range(num_seats))
        self._of: OrderedDict[Running, _Seat] = OrderedDict()

    def rows(self, sequences: Iterable[Running]) -> list[int]:
        """Rows of sequences that are seated."""
        return [self._of[sequence].row for sequence in sequences]

    def seat(self, sequences: Sequence[Running]) -> None:
        """Give each sequence of a step a row, and the device the blocks that it does not know."""
        places: list[int] = []
        blocks: list[int] = []
        width = self.tables.shape[1]
        for sequence in sequences:
            seat = self._seat_of(sequence)
            if fresh := sequence.block_table[seat.num_written :]:
                first = seat.row * width + seat.num_written
                places += range(first, first + len(fresh))
                blocks += fresh
                seat.num_written += len(fresh)
        if places:
            device = self.tables.device
            at, values = upload(places, torch.int64, device), upload(blocks, torch.int32, device)
            self.tables.view(-1).index_copy_(0, at, values)

    def keep(self, sequences: Iterable[Running], tokens: torch.Tensor) -> None:
        """Remember sampled ``tokens [n]`` (int64, on the device) of seated sequences."""
        rows = upload(self.rows(sequences), torch.int64, self.sampled.device)
        self.sampled.index_copy_(0, rows, tokens)

    def _seat_of(self, sequence: Running) -> _Seat:
        seat = self._of.get(sequence)
        if seat is None:
            row = self._free.pop() if self._free else self._of.popitem(last=False)[1].row
            seat = self._of[sequence] = _Seat(row, sequence.num_cuts)
            return seat
        self._of.move_to_end(sequence)
        if seat.num_cuts != sequence.num_cuts:  # its blocks are others now
            seat.num_cuts, seat.num_written = sequence.num_cuts, 0
        return seat
