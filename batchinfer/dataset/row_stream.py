"""A Parquet file read once, in order, in pieces of the reader's choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from batchinfer.dataset.parquet_source import ParquetReader
from batchinfer.dataset.source import conform

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchinfer.dataset.filesystem import Location

_BATCH_ROWS = 4096


class RowStream:
    """Rows ``[start, stop)`` of a file, with the columns and types of ``schema``.

    Raises:
        InputError: the file cannot be read, or does not have such columns.
    """

    def __init__(self, location: Location, schema: pa.Schema, start: int, stop: int) -> None:
        self._location = location
        self._schema = schema
        self._batches = self._read(start, stop)
        self._rest: pa.RecordBatch | None = None

    def _read(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        with ParquetReader(self._location) as reader:
            for batch in reader.iter_batches(start, stop, self._schema.names, _BATCH_ROWS):
                yield conform(batch, self._schema, self._location.uri)

    def pull(self, num_rows: int) -> pa.Table:
        """The next ``num_rows`` rows; fewer where the file ends."""
        pieces: list[pa.RecordBatch] = []
        while num_rows:
            batch = self._rest if self._rest is not None else next(self._batches, None)
            if batch is None:
                break
            pieces.append(batch.slice(0, num_rows))
            taken = pieces[-1].num_rows
            num_rows -= taken
            self._rest = batch.slice(taken) if taken < batch.num_rows else None
        return pa.Table.from_batches(pieces, schema=self._schema)
