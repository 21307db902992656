"""The long form of a job with several samples a row: one row a sample, in a file beside the results.

The results themselves keep one row an input row, so that every proof of them holds; this file is made from them when
the job is finished, and again after a retry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.dataset.layout import is_single_file
from batchinfer.dataset.parquet_source import ParquetReader
from batchinfer.dataset.row_groups import RowGroupWriter
from batchinfer.dataset.schema import METADATA_PREFIX, SAMPLES_TYPE
from batchinfer.errors import BatchInferError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from batchinfer.dataset.filesystem import Location

_BATCH_ROWS = 256
_MAX_ROWS = 2048
"""Rows made at a time: each repeats the columns of its input row."""
_OF_SAMPLE = ("output", "finish_reason", "token_ids", "cumulative_logprob", "logprobs",
    "reasoning", "reasoning_tokens", "tool_calls")  # fmt: skip
_OF_ROW = ("usage", "cost_usd", "list_cost_usd")
"""Said once a row, by its first sample: sums over the file are those of the job."""


def long_location(output: Location) -> Location:
    """Where the long form of an output lies: ``x.parquet`` and the folder ``x`` both have ``x.samples.parquet``."""
    name = output.name.removesuffix(".parquet") if is_single_file(output.uri) else output.name
    return output.parent.child(f"{name}.samples.parquet")


def write_long(files: Sequence[Location], where: Location, prefix: str, metadata: Mapping[str, str]) -> None:
    """Write the long form of result files, streaming. ``metadata`` goes into the footer and has the ``job_id``.

    Raises:
        BatchInferError: the file is there and is another job's.
    """
    _refuse_strange(where, metadata["job_id"])
    with ParquetReader(files[0]) as reader:
        schema = reader.schema.remove_metadata()
    with RowGroupWriter(where, long_schema(schema, prefix), metadata) as writer:
        for batch in _read(files, schema.names, prefix + "samples"):
            writer.write(explode(batch, prefix))


def long_schema(schema: pa.Schema, prefix: str) -> pa.Schema:
    """The schema of results with ``sample_index`` in the place of ``samples``."""
    place = schema.get_field_index(prefix + "samples")
    return schema.set(place, pa.field(prefix + "sample_index", pa.int32()))


def explode(batch: pa.RecordBatch, prefix: str) -> pa.RecordBatch:
    """One row a sample, in order; a row without samples (an error) stays one row, its ``sample_index`` null."""
    samples = batch.column(prefix + "samples").cast(SAMPLES_TYPE)
    lengths = pc.fill_null(pc.list_value_length(samples), 0).to_numpy()
    parents = np.repeat(np.arange(batch.num_rows), np.maximum(lengths, 1))
    has_sample = np.repeat(lengths > 0, np.maximum(lengths, 1))
    sample = samples.flatten().take(pa.array(np.cumsum(has_sample) - 1, mask=~has_sample))
    is_first = np.concatenate(([True], parents[1:] != parents[:-1]))
    schema = long_schema(batch.schema, prefix)
    columns = []
    for field in schema:
        if field.name == prefix + "sample_index":
            columns.append(pc.struct_field(sample, "sample_index"))
            continue
        column = batch.column(field.name)
        if field.name in [prefix + own for own in _OF_ROW]:
            columns.append(column.take(pa.array(parents, mask=~is_first)))
        elif field.name in [prefix + own for own in _OF_SAMPLE]:
            own = pc.struct_field(sample, field.name.removeprefix(prefix)).cast(field.type)
            columns.append(_either(has_sample, own, column.take(pa.array(parents))))
        else:
            columns.append(column.take(pa.array(parents)))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _either(mask: np.ndarray[tuple[int], np.dtype[np.bool_]], yes: pa.Array, no: pa.Array) -> pa.Array:
    """Element by element one or the other; unlike Arrow's own, for nested types too."""
    places = np.arange(len(mask)) + np.where(mask, 0, len(mask))
    return pa.concat_arrays([yes, no]).take(pa.array(places))


def _read(files: Sequence[Location], names: Sequence[str], samples: str) -> Iterator[pa.RecordBatch]:
    """Batches so small that their long form is bounded."""
    for where in files:
        with ParquetReader(where) as reader:
            for batch in reader.iter_batches(0, reader.num_rows, names, _BATCH_ROWS):
                most = pc.max(pc.list_value_length(batch.column(samples))).as_py() or 1
                step = max(1, _MAX_ROWS // most)
                for start in range(0, batch.num_rows, step):
                    yield batch.slice(start, step)


def _refuse_strange(where: Location, job_id: str) -> None:
    if where.kind() is None:
        return
    try:
        with where.open_input() as stream:
            footer = pq.read_metadata(stream).metadata or {}
    except pa.ArrowInvalid:  # no Parquet file
        footer = {}
    owner = footer.get(f"{METADATA_PREFIX}job_id".encode(), b"").decode()
    if owner != job_id:
        raise BatchInferError(f"{where.uri} is there already and not of this job: move it away, then resume the job")
