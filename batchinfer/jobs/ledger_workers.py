"""Who works, and what there is to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, bindparam, delete, func, or_, select, true, update

from batchinfer.db.tables import CLAIMABLE, RUNNING, WAITS_FOR_MANIFEST, WAITS_FOR_PLAN, Attempt, Job, Shard, Worker
from batchinfer.errors import NotFoundError
from batchinfer.jobs.lease_order import EVERYONE
from batchinfer.jobs.ledger_base import LedgerBase, insert_once
from batchinfer.jobs.ledger_rows import worker_record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import ColumnElement, Connection, TextClause

    from batchinfer.jobs.records import WorkerRecord
    from batchinfer.jobs.serving import Serves

MAX_ENGINES = 8
"""Engines of a job whose reports are kept, the latest ones."""

_NOW = bindparam("now", type_=Job.__table__.c.step_expires_at.type)
_ADDRESS = (Shard.queue, Shard.needs, Shard.model)


def _lanes(condition: ColumnElement[bool]) -> Any:
    """Counts of shards by their address."""
    return select(*_ADDRESS, func.count()).where(condition).group_by(*_ADDRESS)


def _waiting(jobs: TextClause) -> Any:
    is_free = or_(Job.step_expires_at.is_(None), Job.step_expires_at <= _NOW)
    return select(func.count()).select_from(Job).where(jobs, is_free).scalar_subquery()


# made once: tickers ask these every second
_LANES = (
    _lanes(and_(CLAIMABLE, or_(Shard.retry_at.is_(None), Shard.retry_at <= _NOW))),
    _lanes(
        and_(
            Shard.id.in_(select(Attempt.shard_id).where(RUNNING, Attempt.lease_expires_at <= _NOW)),
            Shard.queue.is_not(None),
        )
    ),
)
"""Shards that wait, and shards whose lease has expired; of all jobs, ..."""
_LANES_OF_JOB = tuple(query.where(Shard.job_id == bindparam("job")) for query in _LANES)
"""... and of one."""
_CONTROL = select(_waiting(WAITS_FOR_PLAN), _waiting(WAITS_FOR_MANIFEST))


@dataclass(frozen=True, slots=True)
class Lane:
    """Waiting shards of one model with the same needs. ``is_for_everyone``: they need no engine any more."""

    model: str
    needs: str
    is_for_everyone: bool
    count: int


class Workers(LedgerBase):
    """Registered workers and waiting work."""

    def register_worker(
        self,
        worker_id: str,
        *,
        hostname: str,
        pid: int,
        nanos_per_hour: int,
        device: str = "",
        version: str = "",
        models: Sequence[str] = (),
        serves: Serves | None = None,
    ) -> WorkerRecord:
        """Add the worker, or refresh it. ``models`` are loaded, ``serves`` says what it may run."""
        values: dict[str, Any] = {
            "hostname": hostname, "pid": pid, "device": device, "version": version,
            "nanos_per_hour": nanos_per_hour, "models": list(models), "stats": {},
            "serves": None if serves is None else serves.to_json(),
        }  # fmt: skip

        def work(connection: Connection, now: datetime) -> WorkerRecord:
            times = {"started_at": now, "last_seen_at": now}
            if not insert_once(connection, Worker, {"id": worker_id} | values | times):
                connection.execute(update(Worker).where(Worker.id == worker_id).values(values | times))
            return worker_record(connection.execute(select(Worker).where(Worker.id == worker_id)).one())

        return self._write(work)

    def note_engine(self, job_id: str, engine_id: str, report: Mapping[str, Any]) -> None:
        """Keep how an engine was used by a job; the newest report of an engine replaces its older ones."""

        def work(connection: Connection, now: datetime) -> None:
            del now
            job = self._lock_job(connection, job_id)
            others = [known for known in job.engines or () if known["id"] != engine_id]
            engines = [*others[1 - MAX_ENGINES :], {"id": engine_id, **report}]
            connection.execute(update(Job).where(Job.id == job_id).values(engines=engines))

        self._write(work)

    def worker_heartbeat(self, worker_id: str, *, models: Sequence[str], stats: Mapping[str, Any]) -> None:
        """Say that the worker lives. Raises NotFoundError."""

        def work(connection: Connection, now: datetime) -> None:
            known = update(Worker).where(Worker.id == worker_id)
            values = {"models": list(models), "stats": dict(stats), "last_seen_at": now}
            if not connection.execute(known.values(values)).rowcount:
                raise NotFoundError(f"worker {worker_id} is not registered", param="worker_id")

        self._write(work)

    def list_workers(self) -> list[WorkerRecord]:
        """All registered workers, newest first; ``last_seen_at`` tells the living."""

        def work(connection: Connection, _now: datetime) -> list[WorkerRecord]:
            query = select(Worker).order_by(Worker.started_at.desc(), Worker.id)
            return [worker_record(row) for row in connection.execute(query)]

        return self._read(work)

    def drop_worker(self, worker_id: str) -> None:
        """Forget the worker. Its attempts stay."""

        def work(connection: Connection, _now: datetime) -> None:
            connection.execute(delete(Worker).where(Worker.id == worker_id))

        self._write(work)

    def pending_models(self, job_id: str | None = None) -> dict[str, int]:
        """Model to number of shards that a worker could lease now, expired leases included; of all jobs or one."""
        is_of_job = true() if job_id is None else Shard.job_id == job_id

        def work(connection: Connection, now: datetime) -> dict[str, int]:
            is_due = or_(Shard.retry_at.is_(None), Shard.retry_at <= now)
            waiting = select(Shard.model, func.count()).where(CLAIMABLE, is_due, is_of_job).group_by(Shard.model)
            expired = (
                select(Shard.model, func.count())
                .where(Shard.id.in_(select(Attempt.shard_id).where(RUNNING, Attempt.lease_expires_at <= now)))
                .where(Shard.queue.is_not(None), is_of_job)
                .group_by(Shard.model)
            )
            models: dict[str, int] = {}
            for query in (waiting, expired):
                for model, count in connection.execute(query):
                    models[model] = models.get(model, 0) + count
            return models

        return self._read(work)

    def pending_lanes(self, job_id: str | None = None) -> list[Lane]:
        """Shards that a worker could lease now, by what they need; of all jobs or one."""

        def work(connection: Connection, now: datetime) -> list[Lane]:
            counts: dict[tuple[str, str, bool], int] = {}
            values = {"now": now} if job_id is None else {"now": now, "job": job_id}
            for query in _LANES if job_id is None else _LANES_OF_JOB:
                for queue, needs, model, count in connection.execute(query, values):
                    lane = (model, needs, queue == EVERYONE)
                    counts[lane] = counts.get(lane, 0) + count
            return [Lane(*lane, count) for lane, count in counts.items()]

        return self._read(work)

    def pending_control(self) -> tuple[int, int]:
        """Jobs that wait for a planner, and jobs that wait for a finalizer, now."""

        def work(connection: Connection, now: datetime) -> tuple[int, int]:
            plans, finals = connection.execute(_CONTROL, {"now": now}).one()
            return plans, finals

        return self._read(work)
