"""What the ledger keeps of files and of the batches that are jobs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, exists, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from batchinfer.db.tables import HAS_EXPIRY, Batch, FileUse, Job, JobEventRow, StoredFile
from batchinfer.errors import ConflictError, NotFoundError
from batchinfer.jobs.ledger_base import LedgerBase
from batchinfer.jobs.ledger_rows import job_record
from batchinfer.jobs.status import TERMINAL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection, Row

    from batchinfer.jobs.caller import Caller
    from batchinfer.jobs.records import JobRecord


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A stored file. ``location`` is a path or URI; ``job_id`` the batch whose output it is."""

    id: str
    tenant_id: str
    filename: str
    purpose: str
    num_bytes: int
    sha256: str
    location: str
    job_id: str | None = None
    created_at: datetime | None = None
    """None until it is stored."""
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class BatchTerms:
    """What a batch adds to its job; see :class:`batchinfer.db.tables.Batch`."""

    tenant_id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    model: str
    labels: Mapping[str, str]
    output_expires_s: int | None = None
    faults: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch, its job, and when the job first came (or last came back) to each state."""

    job: JobRecord
    terms: BatchTerms
    state_times: Mapping[str, datetime]


class Files(LedgerBase):
    """Files by id. Only what the caller may see is there."""

    def add_file(self, file: FileRecord, *, expires_after_s: int | None = None) -> FileRecord:
        """Store a file, or put it in the place of the one with its id (a batch that ends a second time)."""

        def work(connection: Connection, now: datetime) -> FileRecord:
            expires_at = None if expires_after_s is None else now + timedelta(seconds=expires_after_s)
            stored = replace(file, created_at=now, expires_at=expires_at)
            values = {name: getattr(stored, name) for name in FileRecord.__slots__}
            dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
            statement = dialect.insert(StoredFile).values(values)
            connection.execute(statement.on_conflict_do_update(index_elements=["id"], set_=values))
            return stored

        return self._write(work)

    def get_file(self, caller: Caller, file_id: str) -> FileRecord:
        """Raises NotFoundError."""

        def work(connection: Connection, now: datetime) -> FileRecord:
            return _file_record(_find_file(connection, caller, file_id, now))

        return self._read(work)

    def list_files(
        self, caller: Caller, *, purpose: str | None = None, sha256: str | None = None, limit: int,
        after: str | None = None, is_ascending: bool = False,
    ) -> list[FileRecord]:  # fmt: skip
        """Newest first, or oldest; ``after`` is the last id of the page before."""

        def work(connection: Connection, now: datetime) -> list[FileRecord]:
            # in the order of the index on (tenant_id, id): ids of one kind sort by time
            order = StoredFile.id.asc() if is_ascending else StoredFile.id.desc()
            query = caller.only(select(StoredFile), StoredFile.tenant_id).where(_is_there(now)).order_by(order)
            if purpose is not None:
                query = query.where(StoredFile.purpose == purpose)
            if sha256 is not None:
                query = query.where(StoredFile.sha256 == sha256)
            if after is not None:
                query = query.where(StoredFile.id > after if is_ascending else StoredFile.id < after)
            return [_file_record(row) for row in connection.execute(query.limit(limit))]

        return self._read(work)

    def delete_file(self, caller: Caller, file_id: str) -> FileRecord:
        """Forget a file; the caller removes its bytes.

        Raises:
            NotFoundError: no such file.
            ConflictError: ``file_in_use``: a job that has not ended reads it.
        """

        def work(connection: Connection, now: datetime) -> FileRecord:
            # locked first: a job that is about to read it either has written so, or finds it gone
            file = _find_file(connection, caller, file_id, now, lock=True)
            reader = connection.scalar(_open_readers(file_id).limit(1))
            if reader is not None:
                raise ConflictError(
                    f"file {file_id} is read by {reader}, which has not ended; cancel it first", code="file_in_use"
                )
            connection.execute(delete(StoredFile).where(StoredFile.id == file_id))
            return _file_record(file)

        return self._write(work)

    def expired_files(self, *, limit: int, after: str, grace: timedelta) -> list[FileRecord]:
        """Files by id, behind ``after``, that ended longer than ``grace`` ago and that no unfinished job reads."""

        def work(connection: Connection, now: datetime) -> list[FileRecord]:
            query = select(StoredFile).where(*_is_over(now - grace), StoredFile.id > after)
            return [_file_record(row) for row in connection.execute(query.order_by(StoredFile.id).limit(limit))]

        return self._read(work)

    def forget_expired(self, file_ids: Sequence[str], *, grace: timedelta) -> None:
        """Forget those of the files that are (still) over; their bytes are gone."""
        if not file_ids:
            return

        def work(connection: Connection, now: datetime) -> None:
            connection.execute(delete(StoredFile).where(StoredFile.id.in_(file_ids), *_is_over(now - grace)))

        self._write(work)


class Batches(LedgerBase):
    """Batches by their job's id. Only what the caller may see is there."""

    def batch_terms(self, job_id: str) -> BatchTerms | None:
        """None if the job is no batch."""

        def work(connection: Connection, _now: datetime) -> BatchTerms | None:
            row = connection.execute(select(Batch).where(Batch.job_id == job_id)).one_or_none()
            return None if row is None else _terms(row)

        return self._read(work)

    def get_batch(self, caller: Caller, job_id: str) -> BatchRecord | None:
        """None if there is no such batch."""
        return next(iter(self._batches(caller, Batch.job_id == job_id, limit=1)), None)

    def list_batches(self, caller: Caller, *, limit: int, after: str | None = None) -> list[BatchRecord]:
        """Newest first; ``after`` is the job id of the last one of the page before."""
        return self._batches(caller, *([] if after is None else [Batch.job_id < after]), limit=limit)

    def _batches(self, caller: Caller, *conditions: Any, limit: int) -> list[BatchRecord]:
        def work(connection: Connection, _now: datetime) -> list[BatchRecord]:
            query = caller.only(select(Batch), Batch.tenant_id).where(*conditions)
            query = query.order_by(Batch.job_id.desc()).limit(limit)
            batches = {row.job_id: _terms(row) for row in connection.execute(query)}
            jobs = {row.id: job_record(row) for row in connection.execute(select(Job).where(Job.id.in_(batches)))}
            times: dict[str, dict[str, datetime]] = {job_id: {} for job_id in batches}
            events = select(JobEventRow).where(JobEventRow.job_id.in_(batches), JobEventRow.kind == "state")
            for event in connection.execute(events.order_by(JobEventRow.id)):
                times[event.job_id][event.data["new"]] = event.at
            return [BatchRecord(jobs[job_id], terms, times[job_id]) for job_id, terms in batches.items()]

        return self._read(work)

    def set_batch_faults(self, job_id: str, faults: Sequence[Mapping[str, Any]]) -> None:
        """Keep what was wrong with a batch's lines."""

        def work(connection: Connection, _now: datetime) -> None:
            values = [dict(fault) for fault in faults]
            connection.execute(update(Batch).where(Batch.job_id == job_id).values(faults=values))

        self._write(work)


def attach_batch(connection: Connection, job_id: str, terms: BatchTerms) -> None:
    """Write a batch into the transaction that makes its job."""
    values = {name: getattr(terms, name) for name in BatchTerms.__slots__}
    values |= {"labels": dict(terms.labels), "faults": list(terms.faults)}
    connection.execute(insert(Batch).values(job_id=job_id, **values))


def attach_files(connection: Connection, job_id: str, file_ids: Sequence[str]) -> None:
    """Write into the transaction that makes a job that it reads files, and see that they are still there.

    Raises:
        NotFoundError: one was deleted meanwhile.
    """
    if not file_ids:
        return
    query = select(StoredFile.id).where(StoredFile.id.in_(file_ids)).with_for_update(key_share=True)
    missing = set(file_ids) - set(connection.execute(query).scalars())
    if missing:
        raise NotFoundError(f"no file {min(missing)}; upload it again", param="inputs")
    rows = [{"file_id": file_id, "job_id": job_id} for file_id in dict.fromkeys(file_ids)]
    connection.execute(insert(FileUse), rows)


def _open_readers(file_id: Any) -> Any:
    """Ids of jobs that read a file and have not ended."""
    ended = [state.value for state in TERMINAL]
    return (
        select(Job.id)
        .join(FileUse, FileUse.job_id == Job.id)
        .where(FileUse.file_id == file_id, Job.state.not_in(ended))
    )


def _is_over(moment: datetime) -> tuple[Any, ...]:
    """Conditions of files that ended by then and that no unfinished job reads."""
    return HAS_EXPIRY, StoredFile.expires_at <= moment, ~exists(_open_readers(StoredFile.id).correlate(StoredFile))


def _is_there(now: datetime) -> Any:
    return StoredFile.expires_at.is_(None) | (StoredFile.expires_at > now)


def _find_file(connection: Connection, caller: Caller, file_id: str, now: datetime, *, lock: bool = False) -> Row[Any]:
    query = caller.only(select(StoredFile), StoredFile.tenant_id).where(StoredFile.id == file_id, _is_there(now))
    file = connection.execute(query.with_for_update() if lock else query).one_or_none()
    if file is None:
        raise NotFoundError(f"no file {file_id[:60]!r}; GET /v1/files lists them", param="file_id")
    return file


def _file_record(row: Row[Any]) -> FileRecord:
    return FileRecord(**{name: getattr(row, name) for name in FileRecord.__slots__})


def _terms(row: Row[Any]) -> BatchTerms:
    return BatchTerms(**{name: getattr(row, name) for name in BatchTerms.__slots__})
