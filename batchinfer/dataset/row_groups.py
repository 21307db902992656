"""Writing Parquet in row groups of a sensible size, whatever the size of the batches that come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.dataset.schema import footer_metadata
from batchinfer.dataset.staged_file import StagedFile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from batchinfer.dataset.filesystem import Location

_GROUP_ROWS = 1 << 16
_GROUP_BYTES = 32 << 20
WRITE_OPTIONS = {"compression": "zstd", "write_page_checksum": True}
"""How all our files are written; checksums make a flipped bit an error instead of another value."""


class RowGroupWriter:
    """Context manager that writes one Parquet file; leaves with an exception: no file.

    Each write to a ParquetWriter makes a row group of its own, so batches are collected first: to 65,536 rows or
    32 MiB, which also bounds the memory.
    """

    def __init__(self, destination: Location, schema: pa.Schema, metadata: Mapping[str, str] | None = None) -> None:
        self._schema = schema
        self._metadata = footer_metadata(metadata)
        self._staged = StagedFile(destination)
        self._writer = pq.ParquetWriter(self._staged, schema, **WRITE_OPTIONS)
        self._batches: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0
        self.num_rows = 0

    @property
    def num_bytes(self) -> int:
        """Size of the file, once it is closed."""
        return self._staged.num_bytes

    @property
    def sha256(self) -> str:
        """Hex digest of the file, once it is closed."""
        return self._staged.sha256

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a batch of exactly the writer's schema."""
        if not batch.num_rows:
            return
        self._batches.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        self.num_rows += batch.num_rows
        if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._batches:
            table = pa.Table.from_batches(self._batches, schema=self._schema)
            self._writer.write_table(table, row_group_size=_GROUP_ROWS)
        self._batches = []
        self._rows = self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._flush()
                if self._metadata:
                    self._writer.add_key_value_metadata(self._metadata)
            self._writer.close()
        except BaseException as failed:
            self._staged.__exit__(type(failed), failed, failed.__traceback__)
            raise
        self._staged.__exit__(kind, error, trace)
