"""Result rows as they are stored, one by one or a few of them. pyarrow loads when a function runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchinfer.errors import ConflictError, InputError, NotFoundError
from batchinfer.jobs.result_files import ranged_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from batchinfer.jobs.records import JobRecord, ShardRecord

_BATCH_ROWS = 128


def stored_row(job: JobRecord, shards: Iterable[ShardRecord], row_index: int) -> dict[str, Any]:
    """The result columns of one row, by their names without the job's prefix.

    Raises:
        NotFoundError: the job has no such row.
        ConflictError: the row has no published result yet.
        InputError: its file cannot be read from this machine.
    """
    if row_index < 0 or (job.num_rows is not None and row_index >= job.num_rows):
        last = "no row" if not job.num_rows else f"rows 0 to {job.num_rows - 1}"
        raise NotFoundError(f"job {job.id} has no row {row_index}: it has {last}", param="row")
    found = next(stored_rows(job, shards, [row_index]), None)
    if found is None:
        raise ConflictError(f"row {row_index} of job {job.id} has no published result yet", code="row_not_finished")
    return found


def stored_rows(job: JobRecord, shards: Iterable[ShardRecord], row_indexes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The result columns of rows, given by ascending indexes; rows that are not published yet are left out.

    Raises:
        InputError: a file cannot be read from this machine.
    """
    at = 0
    for ranged in ranged_files(job, shards):
        first = at
        while at < len(row_indexes) and row_indexes[at] < ranged.row_end:
            at += 1
        wanted = [row for row in row_indexes[first:at] if row >= ranged.row_start]
        if wanted:
            try:
                stages = [stage.name for stage in job.spec.stages]
                yield from rows_of_file(ranged.file.path, job.spec.column_prefix, ranged.row_start, wanted, stages)
            except OSError as error:
                raise InputError(f"the results cannot be read from this machine: {error}") from None
        if at == len(row_indexes):
            return


def rows_of_file(
    path: str, prefix: str, row_start: int, wanted: Sequence[int], stages: Iterable[str] = ()
) -> Iterator[dict[str, Any]]:
    """Result columns of the ``wanted`` rows, ascending, of a result file whose first row is ``row_start``.

    ``stages`` are the names of a job's stages.

    Raises:
        OSError: it cannot be read.
    """
    import pyarrow.parquet as pq  # noqa: PLC0415 -- pyarrow loads when it is used

    from batchinfer.dataset.filesystem import open_filesystem  # noqa: PLC0415 -- see above
    from batchinfer.dataset.schema import RESULT_COLUMNS  # noqa: PLC0415 -- see above

    filesystem, inner = open_filesystem(path)
    with filesystem.open_input_file(inner) as stream:
        file = pq.ParquetFile(stream, pre_buffer=False)
        names = dict.fromkeys((*RESULT_COLUMNS, *stages))
        columns = [prefix + name for name in names if prefix + name in file.schema_arrow.names]
        row = row_start
        left = set(wanted)
        for number in range(file.metadata.num_row_groups):
            end = row + file.metadata.row_group(number).num_rows
            if any(row <= index < end for index in left):
                for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[number], columns=columns):
                    here = sorted(index for index in left if row <= index < row + batch.num_rows)
                    for index in here:
                        values = batch.slice(index - row, 1).to_pylist()[0]
                        yield {name.removeprefix(prefix): value for name, value in values.items()}
                    left.difference_update(here)
                    row += batch.num_rows
            row = end
