"""Rows of a shard that need not run: their answers are in earlier results, or another row of the shard has the same."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from batchinfer import __version__
from batchinfer.dataset.filesystem import Location
from batchinfer.dataset.key_index import NOWHERE, KeyIndex, KeyRun, split_keys
from batchinfer.dataset.manifest import read_manifest
from batchinfer.dataset.reused_rows import ReusedRow, copy_rows, iter_keys, origin_of
from batchinfer.dataset.row_keys import RowKeys, make_scope
from batchinfer.dataset.schema import ROW_KEY
from batchinfer.engine.model_identity import model_revision, model_stamp
from batchinfer.errors import UserError
from batchinfer.jobs.reuse import scope_parts
from batchinfer.money import nanos_to_usd
from batchinfer.types import RowStatus
from batchinfer_workers.result_rows import with_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    import numpy.typing as npt

    from batchinfer.dataset.manifest import Manifest
    from batchinfer.dataset.prompt import RowInput
    from batchinfer.dataset.schema import ResultRow
    from batchinfer.jobs.records import JobRecord
    from batchinfer.jobs.reuse import KeyIndexes, KeySource
    from batchinfer_workers.result_rows import ResultRows

CANNOT_READ = (OSError, KeyError, ValueError, pa.ArrowException, UserError)
"""A source that is gone, cut off or not what it was: its rows are computed."""
_log = logging.getLogger(__name__)


def scope_of(job: JobRecord) -> str | None:
    """Scope of the job's keys with the model as it is now; None where its revision is not known here."""
    revision = model_revision(job.model)
    return None if revision is None else make_scope(scope_parts(job, revision=revision, version=__version__))


@dataclass(slots=True)
class ShardKeys:
    """Keys of a shard's remaining rows: 16 bytes each, and 8 for the row."""

    rows: npt.NDArray[np.int64]
    keys: bytes
    warnings: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Of the few rows that have any."""

    def key(self, place: int) -> bytes:
        """Key of the row at a place."""
        return self.keys[place * 16 : place * 16 + 16]


class RowReuse:
    """What one attempt reuses. ``stamp`` is that of the model whose answers the keys stand for."""

    def __init__(self, job: JobRecord, scope: str, indexes: KeyIndexes) -> None:
        self.stamp = model_stamp(job.model)
        self._job = job
        self._scope = scope
        self._indexes = indexes
        self._keys = ShardKeys(np.empty(0, np.int64), b"")
        self._followers: dict[int, list[int]] = {}
        self.is_valid = True
        """Whether what the engine computes may carry keys; not if it has other weights than the files have now."""

    @classmethod
    def of(cls, job: JobRecord, indexes: KeyIndexes) -> RowReuse | None:
        """None where the job does not ask for it, or the model's revision is not known here."""
        if not job.spec.reuse_results:
            return None
        scope = scope_of(job)
        if scope is None:
            _log.warning("job %s reuses nothing: the revision of %s is not known here", job.id, job.model)
            return None
        return cls(job, scope, indexes)

    # -- before the engine --------------------------------------------------------------------------------------------
    def look_at(self, inputs: Iterable[RowInput]) -> None:
        """Make the keys of the rows that can run."""
        maker = RowKeys(self._scope)
        contents: dict[str, str | None] = {}
        rows, keys = [], bytearray()
        for row in inputs:
            if row.request is None:
                continue
            request = row.request
            params = with_seed(request.params, self._job.spec.seed, row.row_index)
            if params.adapter is not None:
                path = params.adapter
                if path not in contents:
                    contents[path] = model_revision(path)
                if contents[path] is None:
                    continue  # the row will fail
                params = params.model_copy(update={"adapter": contents[path]})
            key = maker.of(request if params is request.params else replace(request, params=params))
            if key is None:
                continue
            rows.append(row.row_index)
            keys += key
            if row.warnings:
                self._keys.warnings[row.row_index] = row.warnings
        self._keys = ShardKeys(np.array(rows, np.int64), bytes(keys), self._keys.warnings)

    def copies(self, rows: ResultRows, own_files: Iterable[str]) -> Iterator[ResultRow]:
        """Outcomes of rows that are in this job's ``own_files`` (parts, committed shards) or in finished jobs' results."""
        missing = np.arange(len(self._keys.rows))
        prefix = self._job.spec.column_prefix
        for path in own_files:
            missing = yield from self._from(missing, rows, partial(_JobFile, path, prefix, self._job.id))
        for source in self._indexes.find_key_indexes(self._job.tenant_id, self._scope):
            if source.job_id != self._job.id:
                missing = yield from self._from(missing, rows, partial(_FinishedJob, source))
        self._group(missing)

    def _from(
        self, missing: npt.NDArray[np.int64], rows: ResultRows, open_: Callable[[], _JobFile | _FinishedJob]
    ) -> Generator[ResultRow, None, npt.NDArray[np.int64]]:
        """Copy what one source has; return the places that are still missing."""
        if not len(missing):
            return missing
        done: set[int] = set()
        try:
            source = open_()
            high, low = split_keys(b"".join(self._keys.key(int(place)) for place in missing))
            found = source.find(high, low)
            hits = np.flatnonzero(found != NOWHERE)
            wanted = [(int(missing[hit]), int(found[hit]), self._keys.key(int(missing[hit]))) for hit in hits]
            for place, reused in source.copy(wanted):
                done.add(place)
                yield self._row(rows, place, reused)
        except CANNOT_READ as error:
            _log.warning("job %s: a source of results is of no use, its rows are computed: %s", self._job.id, error)
        return missing[[place not in done for place in missing.tolist()]] if done else missing

    def _row(self, rows: ResultRows, place: int, reused: ReusedRow) -> ResultRow:
        row_index = int(self._keys.rows[place])
        return rows.deduplicated(row_index, reused, self._keys.key(place), self._keys.warnings.get(row_index, ()))

    def _group(self, missing: npt.NDArray[np.int64]) -> None:
        """Of rows with one key, the first runs and the others follow it."""
        leaders: dict[bytes, int] = {}
        for place in missing.tolist():
            row = int(self._keys.rows[place])
            leader = leaders.setdefault(self._keys.key(place), row)
            if leader != row:
                self._followers.setdefault(leader, []).append(row)

    # -- while it runs ------------------------------------------------------------------------------------------------
    @property
    def followers(self) -> list[int]:
        """Rows that wait for another row of the shard."""
        return [row for rows in self._followers.values() for row in rows]

    def key_of(self, row_index: int) -> bytes | None:
        """Key to be stored with a computed row."""
        if not self.is_valid:
            return None
        place = int(np.searchsorted(self._keys.rows, row_index))
        has_key = place < len(self._keys.rows) and self._keys.rows[place] == row_index
        return self._keys.key(place) if has_key else None

    def copies_of(self, rows: ResultRows, leader: ResultRow) -> Iterator[ResultRow]:
        """Outcomes of the rows that waited for this one; none if it failed, they then run themselves."""
        if leader.status is not RowStatus.SUCCEEDED:
            return
        origin = origin_of(self._job.id, leader.row_index, asdict(leader.usage), nanos_to_usd(leader.cost_nanos))
        clamped = leader.clamped_max_tokens
        warnings = leader.warnings if clamped is None else (*leader.warnings, f"max_tokens_clamped:{clamped}")
        reason = leader.finish_reason.value if leader.finish_reason else None
        extra = {name: value for name, value in leader.extra.items() if name != ROW_KEY}
        reused = ReusedRow(leader.output, reason, warnings, extra, origin)
        for row in self._followers.pop(leader.row_index, []):
            yield rows.deduplicated(row, reused, self.key_of(row), self._keys.warnings.get(row, ()))


class _JobFile:
    """A part or shard file of this job."""

    def __init__(self, path: str, prefix: str, job_id: str) -> None:
        self._path, self._prefix, self._job_id = path, prefix, job_id
        found = list(iter_keys(path, prefix))
        positions = np.concatenate([positions for _, positions in found]) if found else np.empty(0, np.int64)
        self._run = KeyRun.sort(*split_keys(b"".join(keys for keys, _ in found)), positions)

    def find(self, high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Positions in the file."""
        return self._run.find(high, low)

    def copy(self, wanted: list[tuple[int, int, bytes]]) -> Iterator[tuple[int, ReusedRow]]:
        """The rows."""
        return copy_rows(self._path, self._prefix, self._job_id, wanted) if wanted else iter(())


class _FinishedJob:
    """The results of a finished job, through its index and manifest."""

    def __init__(self, source: KeySource) -> None:
        self._source = source
        self._index = KeyIndex(Location.parse(source.path))

    def find(self, high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Row indexes."""
        return self._index.find(high, low)

    def copy(self, wanted: list[tuple[int, int, bytes]]) -> Iterator[tuple[int, ReusedRow]]:
        """The rows, file by file; a file that is gone or has another size than the manifest says is left out."""
        if not wanted:
            return
        manifest = read_manifest(self._source.output)
        for entry in manifest.files:
            here = [
                (place, row - entry.row_start, key)
                for place, row, key in wanted
                if entry.row_start <= row < entry.row_end
            ]
            if here:
                yield from self._copy_file(manifest, entry.name, entry.num_bytes, here)

    def _copy_file(
        self, manifest: Manifest, name: str, num_bytes: int, wanted: list[tuple[int, int, bytes]]
    ) -> Iterator[tuple[int, ReusedRow]]:
        output = Location.parse(self._source.output)
        where = output if name == output.name else output.child(name)
        try:
            if where.stat().size != num_bytes:
                raise OSError(f"{where.uri} is not as its manifest says")
            yield from copy_rows(where.uri, manifest.prefix, self._source.job_id, wanted)
        except CANNOT_READ as error:
            _log.warning("%s is of no use, its rows are computed: %s", where.uri, error)
