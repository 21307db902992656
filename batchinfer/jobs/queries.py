"""Reads that only views need; whatever writes, and whatever decides, is the ledger's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import func, select

from batchinfer.db.session import read_transaction
from batchinfer.db.tables import Job, Part, RowErrorRow, Shard, StoredFile, WebhookDeliveryRow, Worker
from batchinfer.db.tables.webhooks import IS_PENDING

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Engine

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


def has_key(engine: Engine, stored_key: str) -> bool:
    """Whether a job was submitted under this key, as :func:`~batchinfer.jobs.ledger_jobs.stored_key` gives it."""
    with read_transaction(engine) as connection:
        return connection.scalar(select(Job.id).where(Job.idempotency_key == stored_key)) is not None


def has_file(engine: Engine, caller: Caller, location: str) -> bool:
    """Whether a stored file that the caller may see lies at this path or URI."""
    query = caller.only(select(StoredFile.id).where(StoredFile.location == location), StoredFile.tenant_id)
    with read_transaction(engine) as connection:
        return connection.scalar(query.limit(1)) is not None


def recent_work(engine: Engine, job_id: str, since: datetime) -> RecentWork:
    """Rows and generated tokens of the parts committed since a moment."""
    newest = select(func.max(Part.id)).scalar_subquery()
    query = select(func.coalesce(func.sum(Part.num_rows), 0), func.coalesce(func.sum(Part.completion_tokens), 0)).where(
        Part.id > newest - RECENT_PARTS, Part.job_id == job_id, Part.created_at >= since
    )
    with read_transaction(engine) as connection:
        rows, tokens = connection.execute(query).one()
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


def pending_deliveries(engine: Engine) -> int:
    """Webhooks' messages that are not delivered yet."""
    with read_transaction(engine) as connection:
        return int(connection.scalar(select(func.count()).select_from(WebhookDeliveryRow).where(IS_PENDING)) or 0)
