"""Pages of result rows, read from the files in bounded memory and time. pyarrow loads when a function runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchinfer.jobs.result_files import ranged_files, result_row, result_row_columns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow.parquet as pq

    from batchinfer.jobs.records import JobRecord, ShardRecord
    from batchinfer.jobs.result_files import RangedFile
    from batchinfer.jobs.spec import JobSpec
    from batchinfer.jobs.views import PreviewRow
    from batchinfer.types import RowStatus

MAX_SCANNED_ROWS = 200_000
"""Rows looked at for one page: rows of a rare status are found over several requests, never in one endless one."""
MAX_PAGE_CHARS = 4 * 2**20
"""A page ends early once its prompts and answers have so many characters."""
_BATCH_ROWS = 128


@dataclass(frozen=True, slots=True)
class Rows:
    """A page. ``next_after`` is where the next one begins; None at the end of what there is now."""

    rows: list[PreviewRow]
    next_after: int | None


def read_rows(
    job: JobRecord, shards: Iterable[ShardRecord], *, after: int = -1, status: RowStatus | None = None, limit: int = 20
) -> Rows:
    """Result rows with an index above ``after``, in input order; of one status, or all.

    Raises:
        OSError: a file cannot be read from this machine.
    """
    rows: list[PreviewRow] = []
    num_scanned = num_chars = 0
    last = after
    for found in _scan(job.spec, ranged_files(job, shards), after, status):
        if isinstance(found, int):
            num_scanned, last = num_scanned + 1, found
        else:
            if len(rows) == limit:
                return Rows(rows, rows[-1].row_index)
            rows.append(found)
            num_chars += len(found.prompt or "") + len(found.output or "")
            num_scanned, last = num_scanned + 1, found.row_index
        if num_scanned >= MAX_SCANNED_ROWS or num_chars >= MAX_PAGE_CHARS:
            return Rows(rows, last)
    return Rows(rows, None)


def _scan(
    spec: JobSpec, files: Iterable[RangedFile], after: int, status: RowStatus | None
) -> Iterator[PreviewRow | int]:
    """Rows that fit; of those that do not, only the index."""
    import pyarrow.parquet as pq  # noqa: PLC0415 -- pyarrow loads when it is used

    from batchinfer.dataset.filesystem import open_filesystem  # noqa: PLC0415 -- pyarrow loads when it is used

    index_column, status_column = spec.column_prefix + "row_index", spec.column_prefix + "status"
    for ranged in files:
        if ranged.row_end <= after + 1:
            continue
        filesystem, inner = open_filesystem(ranged.file.path)
        with filesystem.open_input_file(inner) as stream:
            file = pq.ParquetFile(stream, pre_buffer=False)
            groups = _groups(file, index_column, status_column, after, status)
            if not groups:
                continue
            columns = [name for name in result_row_columns(spec) if name in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=groups, columns=columns):
                for row in batch.to_pylist():
                    if row[index_column] <= after:
                        continue
                    fits = status is None or row[status_column] == status
                    yield result_row(row, spec) if fits else row[index_column]


def _groups(
    file: pq.ParquetFile, index_column: str, status_column: str, after: int, status: RowStatus | None
) -> list[int]:
    """Row groups that can hold rows of the page, by their statistics."""
    positions = {file.metadata.schema.column(i).path: i for i in range(file.metadata.num_columns)}
    wanted = []
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        index = group.column(positions[index_column]).statistics
        state = group.column(positions[status_column]).statistics
        is_before = index is not None and index.has_min_max and index.max <= after
        is_other = status is not None and _bounds_exclude(state, str(status))
        if not is_before and not is_other:
            wanted.append(number)
    return wanted


def _bounds_exclude(statistics: Any, value: str) -> bool:
    return statistics is not None and statistics.has_min_max and not statistics.min <= value <= statistics.max
