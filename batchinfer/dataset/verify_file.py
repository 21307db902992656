"""One result file against its entry in the manifest."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.dataset.parquet_source import ParquetReader
from batchinfer.dataset.schema import ROW_INDEX, STATUS, STOPPED_AT
from batchinfer.dataset.stage_columns import count_stops
from batchinfer.errors import InputError
from batchinfer.types import RowStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from batchinfer.dataset.filesystem import Location
    from batchinfer.dataset.manifest import ManifestFile

_CHUNK_BYTES = 1 << 20
_BATCH_ROWS = 1 << 16
_MAX_NAMED = 5


@dataclass(slots=True)
class FileFindings:
    """Problems of one file, its rows by status, and whether it has exactly its rows, in order."""

    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    stops: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Rows by the stage where they ended and their status, where the job had stages."""
    has_all_rows: bool = False


def check_file(where: Location, entry: ManifestFile, prefix: str, *, has_stages: bool = False) -> FileFindings:
    """Check that a file is there with its size and hash, and that it has each of its rows exactly once."""
    findings = FileFindings()
    try:
        size, sha256 = _hash(where)
    except FileNotFoundError:
        findings.problems.append(f"{entry.name} is missing, with the rows {entry.row_start} to {entry.row_end - 1}")
        return findings
    except OSError as error:
        findings.problems.append(f"{entry.name} cannot be read: {error}")
        return findings
    changed = sha256 != entry.sha256
    if changed:
        sizes = f"{size} bytes" if size == entry.num_bytes else f"{size} bytes instead of {entry.num_bytes}"
        findings.problems.append(f"{entry.name} was changed after it was finished: {sizes}, SHA-256 {sha256[:12]}...")
    names = [ROW_INDEX, STATUS, *([STOPPED_AT] if has_stages else [])]
    try:
        _check_rows(where, entry, [prefix + name for name in names], findings)
    except InputError as error:
        findings.problems.append(error.message)
    if changed and findings.has_all_rows:
        findings.problems[0] += "; its rows are all there, so values in them were edited"
    return findings


def _hash(where: Location) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    with where.open_input() as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def _check_rows(where: Location, entry: ManifestFile, names: list[str], findings: FileFindings) -> None:
    seen = _SeenRows(entry)
    with ParquetReader(where) as reader:
        absent = [name for name in names if name not in reader.schema.names]
        if absent:
            findings.problems.append(f"{entry.name} has no column {', '.join(absent)}")
            return
        for batch in reader.iter_batches(0, reader.num_rows, names, _BATCH_ROWS):
            try:
                seen.add(batch.column(names[0]).cast(pa.int64()))
            except pa.ArrowException:
                findings.problems.append(f"{entry.name}: column {names[0]} holds no row indexes")
                return
            for pair in pc.value_counts(batch.column(names[1])).to_pylist():
                findings.counts[str(pair["values"])] += pair["counts"]
            for name in names[2:]:
                try:
                    findings.stops.update(count_stops(batch.column(names[1]), batch.column(name)))
                except pa.ArrowException:
                    findings.problems.append(f"{entry.name}: column {name} holds no names of stages")
                    return
    unknown = sorted(set(findings.counts) - {status.value for status in RowStatus})
    if unknown:
        findings.problems.append(f"{entry.name} has rows of unknown status {', '.join(unknown)}")
    problems = list(seen.problems())
    findings.problems += problems
    findings.has_all_rows = not problems


class _SeenRows:
    """How often each row of a file's range came: one byte a row, and only from the first row out of order on."""

    def __init__(self, entry: ManifestFile) -> None:
        self._entry = entry
        self._next = entry.row_start
        self._times: npt.NDArray[np.uint8] | None = None
        self._strange: list[int] = []
        self._num_strange = 0

    def add(self, column: pa.Array) -> None:
        rows = column.fill_null(-1).to_numpy()
        if self._times is None:
            if np.array_equal(rows, np.arange(self._next, self._next + len(rows))) and (
                self._next + len(rows) <= self._entry.row_end
            ):
                self._next += len(rows)
                return
            self._times = np.zeros(self._entry.num_rows, np.uint8)
            self._times[: self._next - self._entry.row_start] = 1
        inside = (rows >= self._entry.row_start) & (rows < self._entry.row_end)
        strange = rows[~inside]
        self._num_strange += len(strange)
        self._strange += strange[: _MAX_NAMED - len(self._strange)].tolist()
        local, times = np.unique(rows[inside] - self._entry.row_start, return_counts=True)
        self._times[local] = np.minimum(self._times[local].astype(np.int64) + times, 2)

    def problems(self) -> Iterator[str]:
        """Missing, repeated and strange rows; or that rows are merely out of order."""
        name = self._entry.name
        if self._times is None:
            if self._next < self._entry.row_end:
                yield f"{name}: {_listed(range(self._next, self._entry.row_end))} without an outcome"
            return
        before = self._num_strange
        for times, what in ((0, "without an outcome"), (2, "with more than one outcome")):
            rows = np.flatnonzero(self._times == times) + self._entry.row_start
            before += len(rows)
            if len(rows):
                yield f"{name}: {_listed(rows.tolist())} {what}"
        if self._num_strange:
            yield f"{name}: {self._num_strange} row(s) that belong to another file, such as {self._strange}"
        if not before:
            yield f"{name}: the rows are all there, but not in input order"


def _listed(rows: range | list[int]) -> str:
    shown = ", ".join(map(str, rows[:_MAX_NAMED]))
    return f"{len(rows)} row(s) ({shown}{', ...' if len(rows) > _MAX_NAMED else ''})"
