"""Finds each row's result among the parts of a shard, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.dataset.filesystem import Location
from batchinfer.dataset.sink import PART_GROUP_ROWS, iter_done_rows
from batchinfer.errors import BatchInferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.dataset.schema import ResultSchema

_CACHE_BYTES = 64 << 20
_NOWHERE = -1


class PartIndex:
    """Where each row of ``[row_start, row_end)`` lies: part and position, 8 bytes a row.

    Rows end roughly in input order, so a few row groups serve many rows; the least recently used are dropped beyond
    64 MiB.

    Raises:
        BatchInferError: a row twice, or one that is not of this shard.
    """

    def __init__(self, paths: Sequence[str], schema: ResultSchema, row_start: int, row_end: int) -> None:
        self._paths = paths
        self._schema = schema
        self._row_start = row_start
        self._part = np.full(row_end - row_start, _NOWHERE, np.int32)
        self._position = np.zeros(row_end - row_start, np.int32)
        self._cache: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()
        self._cached_bytes = 0
        for number, path in enumerate(paths):
            self._add(number, path)

    def _add(self, number: int, path: str) -> None:
        # A part is sorted by row index, so its order in the file is the order of the sorted indexes.
        local = iter_done_rows([path]) - self._row_start
        if len(local) and (local[0] < 0 or local[-1] >= len(self._part)):
            raise BatchInferError(f"part {path} has rows that are not of its shard")
        repeated = np.concatenate((local[1:][local[1:] == local[:-1]], local[self._part[local] != _NOWHERE]))
        if len(repeated):
            raise BatchInferError(f"row {self._row_start + int(repeated[0])} has two outcomes, one of them in {path}")
        self._part[local] = number
        self._position[local] = np.arange(len(local), dtype=np.int32)

    def missing(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Global indexes of the rows that no part has, ascending."""
        return np.flatnonzero(self._part == _NOWHERE) + self._row_start

    def rows(self, start: int, stop: int, base: pa.Table | None) -> pa.Table:
        """Results of the rows ``[start, stop)`` in order; those that no part has come from ``base`` (the same rows)."""
        span = slice(start - self._row_start, stop - self._row_start)
        part, position = self._part[span], self._position[span]
        found = part != _NOWHERE
        group = position // PART_GROUP_ROWS
        keys = sorted(set(zip(part[found].tolist(), group[found].tolist(), strict=True)))
        tables = [self._group(key) for key in keys]
        take = np.zeros(stop - start, np.int64)
        offset = 0
        for key, table in zip(keys, tables, strict=True):
            here = found & (part == key[0]) & (group == key[1])
            take[here] = offset + position[here] % PART_GROUP_ROWS
            offset += table.num_rows
        if base is not None:
            tables.append(base)
            take[~found] = offset + np.flatnonzero(~found)
        return pa.concat_tables(tables).take(pa.array(take))

    def _group(self, key: tuple[int, int]) -> pa.Table:
        """One row group of one part."""
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        with Location.parse(self._paths[key[0]]).open_input() as stream:
            table = pq.ParquetFile(stream, pre_buffer=False).read_row_group(key[1], use_threads=False)
        table = table.select(self._schema.part_schema.names).cast(self._schema.part_schema)
        self._cache[key] = table
        self._cached_bytes += table.nbytes
        while self._cached_bytes > _CACHE_BYTES and len(self._cache) > 1:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= dropped.nbytes
        return table
