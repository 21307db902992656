"""Parts and input rows become the one file of a shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.dataset.filesystem import Location
from batchinfer.dataset.parquet_source import ParquetReader
from batchinfer.dataset.part_index import PartIndex
from batchinfer.dataset.row_groups import RowGroupWriter
from batchinfer.dataset.row_stream import RowStream
from batchinfer.dataset.schema import ROW_INDEX, STATUS, WARNINGS
from batchinfer.dataset.sink import PartFile
from batchinfer.dataset.text import REPLACED, repair_utf8
from batchinfer.errors import BatchInferError
from batchinfer.types import RowStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from batchinfer.dataset.layout import BaseFile
    from batchinfer.dataset.schema import ResultSchema
    from batchinfer.dataset.source import InputSource

_BATCH_ROWS = 4096


def base_rows_with_status(
    base: BaseFile, row_start: int, row_end: int, statuses: Collection[RowStatus], *, prefix: str = ""
) -> dict[int, RowStatus]:
    """Rows of the base within the range that have one of the statuses: what a retry runs again, and what it replaces."""
    found: dict[int, RowStatus] = {}
    wanted = pa.array([status.value for status in statuses], pa.large_string())
    names = [prefix + ROW_INDEX, prefix + STATUS]
    with ParquetReader(Location.parse(base.path)) as reader:
        for batch in reader.iter_batches(row_start - base.first_row, row_end - base.first_row, names, 1 << 16):
            rows, values = (batch.column(name) for name in names)
            mask = pc.is_in(values.cast(pa.large_string()), wanted)
            pairs = zip(rows.filter(mask).to_pylist(), values.filter(mask).to_pylist(), strict=True)
            found.update((row, RowStatus(status)) for row, status in pairs)
    return found


def merge_shard(  # noqa: PLR0917 -- the first six are what a merge is of, in the order in which one says it
    source: InputSource,
    schema: ResultSchema,
    row_start: int,
    row_end: int,
    parts: Sequence[str],
    destination: str,
    *,
    base: BaseFile | None = None,
    metadata: Mapping[str, str] | None = None,
) -> PartFile:
    """Join the input's columns with the results of ``[row_start, row_end)`` in input order, streaming, into one file.

    ``parts`` win over ``base``. ``destination`` is ``layout.merged_path(...)``; ``metadata`` goes into the footer
    (keys without the ``batchinfer.`` prefix: job_id, spec_hash, model, engine_version, ...), and the input's digest.

    Raises:
        BatchInferError: a row has no result, or two parts have the same row.
        InputError: code ``input_changed``.
    """
    index = PartIndex(parts, schema, row_start, row_end)
    missing = index.missing()
    if base is None and len(missing):
        raise BatchInferError(
            f"{len(missing)} rows have no outcome, the first is row {int(missing[0])}; nothing was written"
        )
    footer = {**(metadata or {}), "input_digest": source.digest()}
    with RowGroupWriter(Location.parse(destination), schema.output_schema, footer) as writer:
        earlier = None if base is None or not len(missing) else _BaseRows(base, schema, row_start, row_end)
        for start, batch in source.iter_batches(row_start, row_end, batch_rows=_BATCH_ROWS):
            stop = start + batch.num_rows
            results = index.rows(start, stop, None if earlier is None else earlier.pull(start, stop))
            writer.write(_join(batch, results, schema))
        if writer.num_rows != row_end - row_start:
            raise BatchInferError(f"the input has {writer.num_rows} of the rows {row_start} to {row_end}")
    return PartFile(destination, writer.num_rows, writer.num_bytes, writer.sha256)


def _join(batch: pa.RecordBatch, results: pa.Table, schema: ResultSchema) -> pa.RecordBatch:
    """Input columns, made valid UTF-8 (and flagged where that changed them), beside the result columns."""
    columns, changed = [], set()
    for column in batch.columns:
        repaired, positions = repair_utf8(column)
        columns.append(repaired)
        changed.update(positions)
    outcome = results.combine_chunks().to_batches()[0]
    added = {field.name: outcome.column(field.name) for field in schema.part_schema}
    if changed:
        name = schema.name(WARNINGS)
        added[name] = _with_flag(added[name], changed)
    return pa.RecordBatch.from_arrays([*columns, *added.values()], schema=schema.output_schema)


def _with_flag(warnings: pa.Array, positions: Collection[int]) -> pa.Array:
    notes = warnings.to_pylist()
    for position in positions:
        known = notes[position] or []
        notes[position] = known if REPLACED in known else [*known, REPLACED]
    return pa.array(notes, warnings.type)


class _BaseRows:
    """The earlier results of a shard, in order."""

    def __init__(self, base: BaseFile, schema: ResultSchema, row_start: int, row_end: int) -> None:
        self._path = base.path
        span = (row_start - base.first_row, row_end - base.first_row)
        self._rows = RowStream(Location.parse(base.path), schema.part_schema, *span)

    def pull(self, start: int, stop: int) -> pa.Table:
        """The next rows, which must be ``[start, stop)``.

        Raises:
            BatchInferError: the base does not hold them.
        """
        table = self._rows.pull(stop - start)
        if not np.array_equal(table.column(0).to_numpy(), np.arange(start, stop)):
            raise BatchInferError(f"{self._path} does not hold the rows {start} to {stop} in order")
        return table
