"""What people ask of a job, and what its deadline does."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, bindparam, select, update

from batchinfer.db.tables import HAS_OPEN_DEADLINE, Job, Shard
from batchinfer.errors import ConflictError
from batchinfer.jobs.lease_order import EVERYONE, rejoin
from batchinfer.jobs.ledger_base import LedgerBase
from batchinfer.jobs.ledger_endings import IN_ORDER
from batchinfer.jobs.ledger_rows import STATUS_COLUMNS, job_record, row_counts
from batchinfer.jobs.spending import tenant_overspend
from batchinfer.jobs.status import HELD, RUNNABLE, JobState, ShardState
from batchinfer.money import format_usd
from batchinfer.types import RowStatus

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from sqlalchemy import Connection, Row

    from batchinfer.jobs.records import JobRecord

RETRIED = (RowStatus.ERRORED, RowStatus.EXPIRED, RowStatus.CANCELLED)
"""Statuses that a plain ``retry`` runs again."""

_IS_DUE = and_(
    # planned jobs with rows that could still run
    HAS_OPEN_DEADLINE,
    Job.deadline_at <= bindparam("now"),
    Job.state.in_((*RUNNABLE, *HELD)),
    Job.planned_at.is_not(None),
)
_DUE = select(Job.id).where(_IS_DUE).order_by(Job.deadline_at)


class Control(LedgerBase):
    """Cancel, pause, resume, retry, expire."""

    def cancel(self, job_id: str) -> JobRecord:
        """Stop a job; rows that ended are kept. Asking again changes nothing. Raises ConflictError, NotFoundError."""

        def work(connection: Connection, now: datetime) -> JobRecord:
            job = self._lock_job(connection, job_id)
            if job.state not in (JobState.CANCELLING, JobState.CANCELLED):
                self._cancel(connection, job, now)
            return job_record(self._lock_job(connection, job_id))

        return self._write(work)

    def pause(self, job_id: str) -> JobRecord:
        """Hold a job. Asking again changes nothing. Raises ConflictError, NotFoundError."""

        def work(connection: Connection, now: datetime) -> JobRecord:
            job = self._lock_job(connection, job_id)
            if job.state != JobState.PAUSED:
                if job.closing is not None and job.state in RUNNABLE:
                    raise ConflictError(f"job {job_id} has {job.closing} and is ending; it cannot become paused")
                self._set_state(connection, job, JobState.PAUSED, now)
                self._set_queue(connection, job_id, None)
            return job_record(self._lock_job(connection, job_id))

        return self._write(work)

    def resume(self, job_id: str, *, budget_nanos: int | None = None) -> JobRecord:
        """Go on with a ``paused``, ``budget_exhausted`` or ``failed`` job, with a new budget if one is given.

        Raises:
            ConflictError: another state, or the budget is already spent.
            NotFoundError: no such job.
        """

        def work(connection: Connection, now: datetime) -> JobRecord:
            job = self._lock_job(connection, job_id)
            if job.state not in (*HELD, JobState.FAILED):
                raise ConflictError(f"job {job_id} is {job.state}; only a held or failed job can be resumed")
            budget = job.budget_nanos if budget_nanos is None else budget_nanos
            _check_budget(job, budget)
            _check_tenant_budget(connection, job, now)
            changes = {"budget_nanos": budget, "error_code": None, "error_message": None, "finished_at": None}
            self._set_state(connection, job, _resumed_state(job), now, **changes)
            _forgive_shards(connection, job_id)
            if job.closing is None:
                rejoin(connection, job, Shard.state != ShardState.COMMITTED, now)
            self._set_queue(connection, job_id, job.model if job.closing is None else EVERYONE)
            return job_record(self._lock_job(connection, job_id))

        return self._write(work)

    def retry(self, job_id: str, statuses: Iterable[RowStatus] = RETRIED) -> int:
        """Run a finished job's rows of these statuses again; return how many. 0 changes nothing.

        A deadline that has passed is dropped. Raises ConflictError, NotFoundError.
        """
        wanted = sorted(set(statuses))

        def work(connection: Connection, now: datetime) -> int:
            job = self._lock_job(connection, job_id)
            if job.state not in (JobState.COMPLETED, JobState.CANCELLED, JobState.EXPIRED):
                raise ConflictError(f"job {job_id} is {job.state} and cannot become queued for a retry until it ended")
            num_rows = sum(row_counts(job)[status] for status in wanted)
            if num_rows:
                self._retry(connection, job, wanted, now)
            return num_rows

        return self._write(work)

    def fail_job(self, job_id: str, code: str, message: str) -> JobRecord:
        """The job as a whole cannot go on (its input changed, its model is gone). Raises ConflictError."""

        def work(connection: Connection, now: datetime) -> JobRecord:
            job = self._lock_job(connection, job_id)
            if job.state != JobState.FAILED:
                self._fail_job(connection, job, now, code, message)
            return job_record(self._lock_job(connection, job_id))

        return self._write(work)

    def expire_due(self) -> list[str]:
        """Start closing the jobs whose deadline has passed; return their ids."""

        def due(connection: Connection, now: datetime) -> list[str]:
            return list(connection.scalars(_DUE, {"now": now}))

        return [job_id for job_id in self._read(due) if self._expire(job_id)]

    # -- how ----------------------------------------------------------------------------------------------------------
    def _cancel(self, connection: Connection, job: Row[Any], now: datetime) -> None:
        if job.state == JobState.FAILED:
            raise ConflictError(f"job {job.id} is failed and cannot become cancelled; resume it first")
        if job.planned_at is None:
            outcome = {"outcome": "none", "closing": RowStatus.CANCELLED, "finished_at": now}
            self._set_state(connection, job, JobState.CANCELLED, now, **outcome)
            return
        self._set_state(connection, job, JobState.CANCELLING, now, closing=RowStatus.CANCELLED)
        self._set_queue(connection, job.id, EVERYONE)

    def _expire(self, job_id: str) -> bool:
        def work(connection: Connection, now: datetime) -> bool:
            self._lock_job(connection, job_id)
            job = connection.execute(select(Job).where(Job.id == job_id, _IS_DUE), {"now": now}).one_or_none()
            if job is None:
                return False
            if JobState(job.state) in HELD:
                self._set_state(connection, job, JobState.IN_PROGRESS, now, started_at=job.started_at or now)
            connection.execute(update(Job).where(Job.id == job_id).values(closing=RowStatus.EXPIRED))
            self._set_queue(connection, job_id, EVERYONE)
            self._tell(connection, job_id, now, "deadline_passed")
            return True

        return self._write(work)

    def _retry(self, connection: Connection, job: Row[Any], statuses: list[RowStatus], now: datetime) -> None:
        rows_to_run = reduce(add, (getattr(Shard, STATUS_COLUMNS[status]) for status in statuses))
        generation = job.retry_generation + 1
        deadline = job.deadline_at if job.deadline_at is not None and job.deadline_at > now else None
        rejoin(connection, job, rows_to_run > 0, now)
        num_shards = connection.execute(
            update(Shard)
            .where(Shard.job_id == job.id, rows_to_run > 0)
            .values(
                state=ShardState.PENDING, queue=job.model, turn=IN_ORDER, pressure=0,
                generation=generation, retry_statuses=list(statuses), todo_rows=rows_to_run, done_rows=0,
                num_failures=0, num_faults=0, probe_rows=None, poisoned_rows=[],
            )
        ).rowcount  # fmt: skip
        self._set_state(
            connection, job, JobState.QUEUED, now, retry_generation=generation, open_shards=num_shards,
            closing=None, outcome=None, finished_at=None, deadline_at=deadline,
        )  # fmt: skip
        self._tell(connection, job.id, now, "retry", generation=generation, statuses=statuses, shards=num_shards)
        self._hold_if_spent(connection, job.id, now)


def _check_budget(job: Row[Any], budget_nanos: int | None) -> None:
    spent = job.metered_nanos + job.overhead_nanos
    if budget_nanos is not None and spent >= budget_nanos and job.open_shards:
        raise ConflictError(
            f"job {job.id} has spent {format_usd(spent)} of its budget of {format_usd(budget_nanos)}; "
            "resume it with a higher --budget",
            code="budget_spent",
        )


def _check_tenant_budget(connection: Connection, job: Row[Any], now: datetime) -> None:
    over = tenant_overspend(connection, job.tenant_id, now) if job.open_shards and job.closing is None else None
    if over is not None:
        raise ConflictError(
            f"tenant {job.tenant_id} has spent {format_usd(over.spent_nanos)} of its {format_usd(over.limit_nanos)} for "
            f"{over.month}; raise it with `batchinfer budget set`, then resume the job",
            code="budget_spent",
        )


def _resumed_state(job: Row[Any]) -> JobState:
    """Where a held or failed job goes on."""
    if job.planned_at is None:
        return JobState.VALIDATING
    if job.open_shards == 0:
        return JobState.FINALIZING
    if job.closing == RowStatus.CANCELLED:
        return JobState.CANCELLING
    return JobState.QUEUED


def _forgive_shards(connection: Connection, job_id: str) -> None:
    """Give quarantined shards another chance; rows known to be poisoned stay so."""
    connection.execute(
        update(Shard)
        .where(Shard.job_id == job_id, Shard.state == ShardState.QUARANTINED)
        .values(state=ShardState.PENDING, num_failures=0, num_faults=0, probe_rows=None, retry_at=None)
    )
