"""The end of a job's output: everything visible, counted, and listed in the manifest."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from batchinfer.dataset.filesystem import Location
from batchinfer.dataset.manifest import Manifest, ManifestFile, write_manifest
from batchinfer.dataset.parquet_source import ParquetReader
from batchinfer.dataset.row_groups import RowGroupWriter
from batchinfer.dataset.schema import STATUS, STOPPED_AT, own_metadata
from batchinfer.dataset.source import conform
from batchinfer.dataset.stage_columns import count_stops, stops_table
from batchinfer.dataset.staged_file import write_file
from batchinfer.errors import BatchInferError
from batchinfer.types import RowStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa

    from batchinfer.dataset.layout import OutputLayout

_BATCH_ROWS = 8192


@dataclass(frozen=True, slots=True)
class ShardResultFile:
    """A committed shard as the ledger knows it: index, row range and the committed ``result_path``, bytes and hash."""

    index: int
    row_start: int
    row_end: int
    path: str
    num_bytes: int
    sha256: str


def finalize_output(
    layout: OutputLayout,
    shards: Sequence[ShardResultFile],
    *,
    num_rows: int,
    output_schema: pa.Schema | None = None,
    prefix: str = "",
    input_fingerprint: Mapping[str, Any] | None = None,
    job: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
    has_stages: bool = False,
) -> Manifest:
    """Finish an output whose shards are all committed; idempotent, and right again after a retry.

    Publishes what is not published yet, writes the single file if asked for, counts statuses, writes the manifest,
    sweeps garbage, writes ``_SUCCESS`` (in this order). ``output_schema`` is needed only for a job without rows, whose output is
    one file without rows. ``metadata`` goes into the footer of a single file,
    over that of its first shard. With ``has_stages`` the manifest's ``job`` also says at which stages rows ended.

    Raises:
        BatchInferError: a committed file is gone or does not have its rows.
    """
    ordered = sorted(shards, key=lambda shard: shard.row_start)
    _publish_all(layout, ordered)
    garbage = layout.leftovers()
    if not ordered:
        name = layout.output if layout.is_single_file else layout.folder.child("shard-00000.parquet")
        files = [_write_empty(name, output_schema, metadata)]
    elif layout.is_single_file:
        files = [_write_single(layout, ordered, num_rows, metadata)]
    else:
        files = [_published(layout, shard) for shard in ordered]
    written = [layout.manifest.parent.child(file.name) for file in files]
    stops = {STOPPED_AT: stops_table(_count_stops(written, prefix))} if has_stages else {}
    manifest = Manifest(
        job_id=layout.job_id,
        num_rows=num_rows,
        files=tuple(files),
        counts=_count_statuses(written, prefix),
        prefix=prefix,
        input_fingerprint=dict(input_fingerprint or {}),
        job={**(job or {}), **stops},
    )
    write_manifest(layout.manifest, manifest)
    layout.sweep_garbage(garbage=garbage)
    if not layout.is_single_file:
        write_file(layout.success, b"")
    return manifest


def _publish_all(layout: OutputLayout, shards: Sequence[ShardResultFile]) -> None:
    """Publish what a crash left unpublished. After a retry, the rows of the others may be in the single file only."""
    for shard in shards:
        try:
            layout.publish_shard(shard.path)
        except BatchInferError:
            if not layout.is_single_file or layout.output.kind() is None:
                raise


def _published(layout: OutputLayout, shard: ShardResultFile) -> ManifestFile:
    """The visible file of a shard, which must be the one that the ledger committed."""
    where = Location.parse(layout.shard_path(shard.index))
    if where.stat().size != shard.num_bytes:
        raise BatchInferError(f"{where.uri} has {where.stat().size} bytes, but {shard.num_bytes} were committed")
    with ParquetReader(where) as reader:
        if reader.num_rows != shard.row_end - shard.row_start:
            raise BatchInferError(f"{where.uri} has {reader.num_rows} rows, not {shard.row_end - shard.row_start}")
    return ManifestFile(where.name, shard.row_start, shard.row_end, shard.num_bytes, shard.sha256)


def _write_empty(where: Location, schema: pa.Schema | None, metadata: Mapping[str, str] | None) -> ManifestFile:
    if schema is None:
        raise BatchInferError(f"{where.uri} cannot be written: without rows, its columns are not known")
    with RowGroupWriter(where, schema, metadata) as writer:
        pass
    return ManifestFile(where.name, 0, 0, writer.num_bytes, writer.sha256)


def _write_single(
    layout: OutputLayout, shards: Sequence[ShardResultFile], num_rows: int, metadata: Mapping[str, str] | None
) -> ManifestFile:
    """One file from all shards in order. After a retry, shards that did not run again come from the earlier file."""
    sources = [_rows_of(layout, shard) for shard in shards]
    with ParquetReader(sources[0][0]) as reader:
        schema = reader.schema.remove_metadata()
        footer = {**own_metadata(reader.schema), **(metadata or {})}
    with RowGroupWriter(layout.output, schema, footer) as writer:
        for where, start, stop in sources:
            for batch in _read(where, start, stop):
                writer.write(conform(batch, schema, where.uri))
        if writer.num_rows != num_rows:
            raise BatchInferError(f"the shards of {layout.output.uri} have {writer.num_rows} rows, not {num_rows}")
    return ManifestFile(layout.output.name, 0, num_rows, writer.num_bytes, writer.sha256)


def _rows_of(layout: OutputLayout, shard: ShardResultFile) -> tuple[Location, int, int]:
    """Where the rows of a shard are: file, first and last row in it (half-open)."""
    base = layout.base(shard.index, shard.row_start)
    return Location.parse(base.path), shard.row_start - base.first_row, shard.row_end - base.first_row


def _read(where: Location, start: int, stop: int) -> Iterator[pa.RecordBatch]:
    with ParquetReader(where) as reader:
        yield from reader.iter_batches(start, stop, reader.schema.names, _BATCH_ROWS)


def _count_statuses(files: Sequence[Location], prefix: str) -> dict[str, int]:
    counts = dict.fromkeys((status.value for status in RowStatus), 0)
    for where in files:
        with ParquetReader(where) as reader:
            for batch in reader.iter_batches(0, reader.num_rows, [prefix + STATUS], 1 << 16):
                for entry in pc.value_counts(batch.column(0)).to_pylist():
                    counts[entry["values"]] += entry["counts"]
    return counts


def _count_stops(files: Sequence[Location], prefix: str) -> Counter[tuple[str, str]]:
    stops: Counter[tuple[str, str]] = Counter()
    for where in files:
        with ParquetReader(where) as reader:
            for batch in reader.iter_batches(0, reader.num_rows, [prefix + STATUS, prefix + STOPPED_AT], 1 << 16):
                stops.update(count_stops(*batch.columns))
    return stops
