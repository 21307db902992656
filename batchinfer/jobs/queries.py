"""Reads that only views need; whatever writes, and whatever decides, is the ledger's."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import JSON, Text, bindparam, cast, func, select

from batchinfer.db.session import read_transaction
from batchinfer.db.tables import Job, Part, RowErrorRow, Shard, StoredFile, WebhookDeliveryRow, Worker
from batchinfer.db.tables.webhooks import IS_PENDING
from batchinfer.db.types import UtcDateTime
from batchinfer.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy import Connection, Engine

    from batchinfer.jobs.caller import Caller

RECENT_PARTS = 2000
"""How many of the newest parts of all jobs are looked at for speed; keeps a poll cheap in a large database."""


@dataclass(frozen=True, slots=True)
class RecentWork:
    """What a job's parts since a moment add up to."""

    num_rows: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """How many samples of one code are kept."""

    code: str
    num_samples: int


@dataclass(frozen=True, slots=True)
class JobVersion:
    """Equal while a job's row says the same."""

    version: str
    has_ended: bool


_SAME_FOR_EVER = frozenset(
    {"spec", "spec_hash", "body_hash", "idempotency_key", "fingerprint", "model_revision", "max_attempts"}
)
"""Columns that no view shows, or that never change; as are those of the planner's and finalizer's lease."""
_VERSIONS = select(
    Job.id,
    Job.tenant_id,
    Job.finished_at.is_not(None),
    # as text what costs time to read: nobody looks into it
    *(
        cast(column, Text) if isinstance(column.type, JSON | UtcDateTime) else column
        for column in Job.__table__.columns
        if column.name not in _SAME_FOR_EVER and not column.name.startswith("step_")
    ),
).where(Job.id.in_(bindparam("job_ids", expanding=True)))


def job_versions(engine: Engine, asked: Sequence[tuple[str, Caller]]) -> list[JobVersion | NotFoundError]:
    """Of jobs that callers ask for, in one statement: a job's row is read once by its key, and nothing parsed."""
    job_ids = list({job_id for job_id, _ in asked})
    with read_transaction(engine) as connection:
        rows = {row[0]: row for row in connection.execute(_VERSIONS, {"job_ids": job_ids})}
    versions = {job_id: _version(row) for job_id, row in rows.items()}
    found: list[JobVersion | NotFoundError] = []
    for job_id, caller in asked:
        try:
            _check_seen(rows.get(job_id), job_id, caller)
            found.append(versions[job_id])
        except NotFoundError as error:
            found.append(error)
    return found


def _check_seen(row: Sequence[Any] | None, job_id: str, caller: Caller) -> None:
    missing = f"no job {job_id}; `batchinfer ls` lists them"
    if row is None:
        raise NotFoundError(missing, param="job_id")
    caller.check_sees(row[1], missing, param="job_id")


def _version(row: Sequence[Any]) -> JobVersion:
    digest = hashlib.blake2b(repr(tuple(row)).encode(errors="replace"), digest_size=9)
    return JobVersion(digest.hexdigest(), bool(row[2]))


def has_key(engine: Engine, stored_key: str) -> bool:
    """Whether a job was submitted under this key, as :func:`~batchinfer.jobs.ledger_jobs.stored_key` gives it."""
    with read_transaction(engine) as connection:
        return connection.scalar(select(Job.id).where(Job.idempotency_key == stored_key)) is not None


def has_file(engine: Engine, caller: Caller, location: str) -> bool:
    """Whether a stored file that the caller may see lies at this path or URI."""
    query = caller.only(select(StoredFile.id).where(StoredFile.location == location), StoredFile.tenant_id)
    with read_transaction(engine) as connection:
        return connection.scalar(query.limit(1)) is not None


_RECENT = select(func.coalesce(func.sum(Part.num_rows), 0), func.coalesce(func.sum(Part.completion_tokens), 0)).where(
    Part.id > select(func.max(Part.id)).scalar_subquery() - RECENT_PARTS,
    Part.job_id == bindparam("job_id"),
    Part.created_at >= bindparam("since"),
)


def recent_work(source: Engine | Connection, job_id: str, since: datetime) -> RecentWork:
    """Rows and generated tokens of the parts committed since a moment."""
    with read_transaction(source) as connection:
        rows, tokens = connection.execute(_RECENT, {"job_id": job_id, "since": since}).one()
    return RecentWork(int(rows), int(tokens))


def error_counts(engine: Engine, job_id: str) -> list[ErrorCount]:
    """Kept samples by code, the most frequent first."""
    number = func.count()
    query = (
        select(RowErrorRow.code, number)
        .where(RowErrorRow.job_id == job_id)
        .group_by(RowErrorRow.code)
        .order_by(number.desc(), RowErrorRow.code)
    )
    with read_transaction(engine) as connection:
        return [ErrorCount(code, int(found)) for code, found in connection.execute(query)]


def jobs_by_state(engine: Engine) -> dict[str, int]:
    """Number of jobs in each state that occurs."""
    with read_transaction(engine) as connection:
        return {
            state: int(found)
            for state, found in connection.execute(select(Job.state, func.count()).group_by(Job.state))
        }


def shards_by_state(engine: Engine, job_id: str) -> dict[str, int]:
    """Number of a job's shards in each state that occurs."""
    query = select(Shard.state, func.count()).where(Shard.job_id == job_id).group_by(Shard.state)
    with read_transaction(engine) as connection:
        return {state: int(found) for state, found in connection.execute(query)}


def workers_seen_since(engine: Engine, since: datetime) -> int:
    """Number of workers that gave a sign of life since a moment."""
    with read_transaction(engine) as connection:
        return int(connection.scalar(select(func.count()).where(Worker.last_seen_at >= since)) or 0)


def unhealthy_workers_since(engine: Engine, since: datetime) -> int:
    """Of the workers that gave a sign of life since a moment, how many say that their device is not well."""
    with read_transaction(engine) as connection:
        found = connection.execute(select(Worker.stats).where(Worker.last_seen_at >= since)).scalars()
        return sum(bool(stats.get("device_fault")) for stats in found)


def pending_deliveries(engine: Engine) -> int:
    """Webhooks' messages that are not delivered yet."""
    with read_transaction(engine) as connection:
        return int(connection.scalar(select(func.count()).select_from(WebhookDeliveryRow).where(IS_PENDING)) or 0)
