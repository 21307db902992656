"""Parts: the checkpoints of a running shard."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.dataset.filesystem import Location
from batchinfer.dataset.row_groups import WRITE_OPTIONS
from batchinfer.dataset.staged_file import StagedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from batchinfer.dataset.layout import OutputLayout
    from batchinfer.dataset.schema import ResultRow, ResultSchema

PART_GROUP_ROWS = 4096


@dataclass(frozen=True, slots=True)
class PartFile:
    """A written file: path or URI, rows, bytes and the SHA-256 of its content in hex."""

    path: str
    num_rows: int
    num_bytes: int
    sha256: str


class PartWriter:
    """Writes the parts of one attempt at one shard. Each part is complete, or not visible at all."""

    def __init__(self, layout: OutputLayout, schema: ResultSchema, shard_index: int, attempt_id: int) -> None:
        self._layout = layout
        self._schema = schema
        self._shard_index = shard_index
        self._attempt_id = attempt_id
        self._sequence = 0

    def write(self, rows: Sequence[ResultRow]) -> PartFile:
        """Write one part (fsync, rename), rows sorted by index.

        Raises:
            ValueError: no rows, or one row index twice.
        """
        ordered = sorted(rows, key=lambda row: row.row_index)
        if not ordered:
            raise ValueError("a part needs at least one row")
        if any(left.row_index == right.row_index for left, right in pairwise(ordered)):
            raise ValueError("a part has one outcome a row, but a row index comes twice")
        batch = self._schema.to_batch(ordered)
        path = self._layout.part_path(self._shard_index, self._attempt_id, self._sequence)
        self._sequence += 1
        with StagedFile(Location.parse(path)) as staged:
            pq.write_table(pa.Table.from_batches([batch]), staged, row_group_size=PART_GROUP_ROWS, **WRITE_OPTIONS)
        return PartFile(path, len(ordered), staged.num_bytes, staged.sha256)


def read_part(path: str) -> pa.Table:
    """Read a part whole.

    Raises:
        FileNotFoundError: it is not there.
    """
    with Location.parse(path).open_input() as stream:
        return pq.ParquetFile(stream, pre_buffer=False).read(use_threads=False)


def iter_done_rows(paths: Iterable[str]) -> npt.NDArray[np.int64]:
    """Sorted row indexes that the parts hold (reads only that column); 8 bytes a row."""
    found = [_row_indexes(path) for path in paths]
    return np.sort(np.concatenate(found)) if found else np.empty(0, np.int64)


def _row_indexes(path: str) -> npt.NDArray[np.int64]:
    """The row index is a part's first column, whatever prefix its name has."""
    with Location.parse(path).open_input() as stream:
        file = pq.ParquetFile(stream, pre_buffer=False)
        table = file.read(columns=file.schema_arrow.names[:1], use_threads=False)
    return np.asarray(table.column(0).to_numpy(), np.int64)
