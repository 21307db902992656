"""Copies outcomes out of result files: each row only if it carries the key that was asked for, and did succeed."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.dataset.filesystem import Location
from batchinfer.dataset.schema import OPTIONAL_COLUMNS, REUSED_FROM, ROW_KEY, STATUS
from batchinfer.types import RowStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

_COLUMNS = ("row_index", "status", "output", "finish_reason", "usage", "cost_usd", "warnings")
REUSABLE = frozenset({RowStatus.SUCCEEDED.value, RowStatus.DEDUPLICATED.value})


@dataclass(frozen=True, slots=True)
class ReusedRow:
    """An outcome to copy; ``reused_from`` is the value of that column: the row that was computed, and what it cost."""

    output: str | None
    finish_reason: str | None
    warnings: tuple[str, ...]
    extra: dict[str, Any]
    reused_from: dict[str, Any]

    @property
    def cost_nanos(self) -> int:
        """What computing it cost, in nano-dollars."""
        return int(Decimal(self.reused_from["cost_usd"]).scaleb(9))


def iter_keys(path: str, prefix: str) -> Iterator[tuple[bytes, npt.NDArray[np.int64]]]:
    """Yield keys of the reusable rows of a result file or part, and their positions in it, piece by piece.

    Raises:
        OSError: it cannot be read.
    """
    reusable = pa.array(sorted(REUSABLE), pa.large_string())
    start = 0
    with Location.parse(path).open_input() as stream:
        file = pq.ParquetFile(stream, pre_buffer=False)
        for batch in file.iter_batches(1 << 16, columns=[prefix + STATUS, prefix + ROW_KEY]):
            status, key = batch.column(prefix + STATUS), batch.column(prefix + ROW_KEY)
            is_good = pc.and_(pc.is_in(status.cast(pa.large_string()), reusable), key.is_valid())
            yield b"".join(key.filter(is_good).to_pylist()), np.flatnonzero(is_good.to_numpy(False)) + start
            start += batch.num_rows


def copy_rows(
    path: str, prefix: str, job_id: str, wanted: Sequence[tuple[int, int, bytes]]
) -> Iterator[tuple[int, ReusedRow]]:
    """Yield ``(row, outcome)`` for those ``(row, position in the file, key)`` whose place still holds the key.

    One row group is in memory at a time.

    Raises:
        OSError: the file cannot be read (any more).
    """
    wanted = sorted(wanted, key=lambda one: one[1])
    with Location.parse(path).open_input() as stream:
        file = pq.ParquetFile(stream, pre_buffer=False, page_checksum_verification=True)
        names = [prefix + name for name in (*_COLUMNS, *OPTIONAL_COLUMNS) if prefix + name in file.schema_arrow.names]
        start = at = 0
        for group in range(file.metadata.num_row_groups):
            stop = start + file.metadata.row_group(group).num_rows
            chosen = []
            while at < len(wanted) and wanted[at][1] < stop:
                chosen.append(wanted[at])
                at += 1
            if chosen:
                table = file.read_row_group(group, columns=names, use_threads=False)
                places = pa.array([position - start for _, position, _ in chosen])
                for (row, _, key), found in zip(chosen, table.take(places).to_pylist(), strict=True):
                    reused = _reused({name.removeprefix(prefix): found[name] for name in names}, key, job_id)
                    if reused is not None:
                        yield row, reused
            start = stop


def _reused(row: dict[str, Any], key: bytes, job_id: str) -> ReusedRow | None:
    if row.get(ROW_KEY) != key or row["status"] not in REUSABLE:
        return None
    extra = {name: row[name] for name in OPTIONAL_COLUMNS if name in row and name not in (ROW_KEY, REUSED_FROM)}
    origin = row.get(REUSED_FROM) or origin_of(job_id, row["row_index"], row["usage"], row["cost_usd"])
    return ReusedRow(row["output"], row["finish_reason"], tuple(row["warnings"] or ()), extra, origin)


def origin_of(job_id: str, row_index: int, usage: dict[str, int] | None, cost_usd: Decimal | None) -> dict[str, Any]:
    """Value of ``reused_from`` for copies of a row that was computed."""
    return {"job_id": job_id, "row_index": row_index, "usage": usage, "cost_usd": cost_usd or Decimal(0)}
