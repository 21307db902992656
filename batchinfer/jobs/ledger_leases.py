"""Leasing shards, and keeping a lease."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, case, insert, select, update

from batchinfer.db.tables import Attempt, BudgetRow, Job
from batchinfer.errors import FencedError
from batchinfer.jobs.lease_order import ANYTHING, EVERYONE, Offer, charge, claim_statement
from batchinfer.jobs.leases import HeartbeatReply, Lease
from batchinfer.jobs.ledger_endings import Endings
from batchinfer.jobs.ledger_rows import job_record, shard_record
from batchinfer.jobs.prices import hourly_price
from batchinfer.jobs.spending import tenant_overspend, tenant_overspend_of_job
from batchinfer.jobs.status import HELD, RUNNABLE, Action, AttemptState, JobState, LeaseMode
from batchinfer.types import RowStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, Row

_WITH_BUDGET = select(BudgetRow.tenant_id).distinct()
_metered = bindparam("metered", type_=Attempt.__table__.c.metered_ns.type)
_RENEW = (
    update(Attempt)
    .where(Attempt.id == bindparam("attempt"), Attempt.state == AttemptState.RUNNING)
    .values(
        lease_expires_at=bindparam("until"),
        metered_ns=case((Attempt.metered_ns < _metered, _metered), else_=Attempt.metered_ns),
    )
    .returning(Attempt)
)


class _Overspent(Exception):  # noqa: N818 -- no error, a way out of a transaction
    """The claimed shard's tenant has spent its budget: the claim is rolled back."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id)
        self.job_id = job_id


class Leases(Endings):
    """Claim and heartbeat."""

    def lease_shard(
        self,
        worker_id: str,
        *,
        models: Sequence[str] | None = None,
        job_id: str | None = None,
        offer: Offer = ANYTHING,
        lease_seconds: float = 60.0,
    ) -> Lease | None:
        """Lease the best shard there is; ``models`` and ``job_id`` narrow the ``offer`` down.

        Shards to be closed match every worker.

        Order: shards whose lease expired or failed, then deadlines in danger, then priority; then what the worker would
        rather do; then the tenant that was served least for its weight; then the turns of its jobs, see
        :mod:`~batchinfer.jobs.lease_order`.

        Raises:
            NotFoundError: the worker is not registered.
        """
        self.reap_expired()
        wanted = offer
        if models is not None:
            wanted = replace(wanted, models=tuple(models))
        if job_id is not None:
            wanted = replace(wanted, job_id=job_id)

        def work(connection: Connection, now: datetime) -> Lease | None:
            price = hourly_price(connection, worker_id, now)
            shard = connection.execute(claim_statement(now, wanted, dialect=connection.dialect.name)).one_or_none()
            if shard is None:
                return None
            if tenant_overspend_of_job(connection, shard.job_id, now):
                raise _Overspent(shard.job_id)
            lease = _open_attempt(
                connection, now, job=self._start_job(connection, shard.job_id, now), shard=shard,
                worker_id=worker_id, nanos_per_hour=price, lease_seconds=lease_seconds,
            )  # fmt: skip
            if shard.queue != EVERYONE:
                charge(connection, shard, now)
            return lease

        while True:
            try:
                return self._write(work)
            except _Overspent as held:
                # not in the same transaction: whoever holds the job's lock may wait for the shard that was claimed
                if not self.hold_if_spent(held.job_id):
                    return None

    def hold_if_spent(self, job_id: str) -> bool:
        """Hold a job whose budget, or whose tenant's, is spent; whether no shard of it can be leased now."""

        def work(connection: Connection, now: datetime) -> bool:
            self._lock_job(connection, job_id)
            self._hold_if_spent(connection, job_id, now)
            return self._lock_job(connection, job_id).state not in RUNNABLE

        return self._write(work)

    def hold_overspent(self) -> list[str]:
        """Hold the jobs of tenants that have spent their month's budget; return the ids of those that are held now."""

        def running(connection: Connection, now: datetime) -> list[str]:
            tenants = connection.scalars(_WITH_BUDGET).all()
            over = [tenant for tenant in tenants if tenant_overspend(connection, tenant, now)]
            query = select(Job.id).where(Job.tenant_id.in_(over), Job.state.in_(RUNNABLE), Job.closing.is_(None))
            return list(connection.execute(query).scalars()) if over else []

        return [job_id for job_id in self._read(running) if self.hold_if_spent(job_id)]

    def heartbeat(self, attempt_id: int, metered_ns: int, *, lease_seconds: float = 60.0) -> HeartbeatReply:
        """Renew the lease. ``metered_ns``: device time this attempt has used so far. Raises FencedError."""

        def work(connection: Connection, now: datetime) -> HeartbeatReply:
            until = now + timedelta(seconds=lease_seconds)
            values = {"attempt": attempt_id, "until": until, "metered": metered_ns}
            attempt = connection.execute(_RENEW, values).one_or_none()
            if attempt is None:
                raise FencedError(f"attempt {attempt_id} no longer holds its shard; stop working on it")
            job = self._find_job(connection, attempt.job_id)
            return HeartbeatReply(_action(job, attempt, now), attempt.lease_expires_at)

        return self._write(work)

    def announce_probe(self, attempt_id: int, row_index: int) -> None:
        """Say which single row a probe is about to run, so that its death can be blamed on it. Raises FencedError."""

        def work(connection: Connection, _now: datetime) -> None:
            changed = connection.execute(
                update(Attempt)
                .where(Attempt.id == attempt_id, Attempt.state == AttemptState.RUNNING)
                .values(probe_row=row_index)
            ).rowcount
            if not changed:
                raise FencedError(f"attempt {attempt_id} no longer holds its shard; do not run row {row_index}")

        self._write(work)

    def _start_job(self, connection: Connection, job_id: str, now: datetime) -> Row[Any]:
        """Read the claimed shard's job and move it from ``queued`` to ``in_progress``.

        Who holds the job's lock may wait for our shard (a pause); then the job is left as it is, since to wait for it
        would be a deadlock. A later lease or commit makes up for it.
        """
        queued = select(Job).where(Job.id == job_id, Job.state == JobState.QUEUED)
        job = connection.execute(queued.with_for_update(skip_locked=True, key_share=True)).one_or_none()
        if job is not None:
            self._start(connection, job, now)
        return connection.execute(select(Job).where(Job.id == job_id)).one()


def closing_status(job: Row[Any], now: datetime) -> RowStatus | None:
    """How the job's remaining rows are to be written, if they are not to run any more."""
    if job.closing is not None:
        return RowStatus(job.closing)
    return RowStatus.EXPIRED if job.deadline_at is not None and job.deadline_at <= now else None


def _open_attempt(
    connection: Connection,
    now: datetime,
    *,
    job: Row[Any],
    shard: Row[Any],
    worker_id: str,
    nanos_per_hour: int,
    lease_seconds: float,
) -> Lease:
    status = closing_status(job, now)
    mode = LeaseMode.RUN if status is None else LeaseMode.CLOSE
    expires_at = now + timedelta(seconds=lease_seconds)
    attempt_id = connection.execute(
        insert(Attempt)
        .values(
            job_id=job.id, shard_id=shard.id, worker_id=worker_id, mode=mode, state=AttemptState.RUNNING,
            generation=shard.generation, probe_rows=shard.probe_rows, nanos_per_hour=nanos_per_hour,
            started_at=now, lease_expires_at=expires_at,
        )
        .returning(Attempt.id)
    ).scalar_one()  # fmt: skip
    record = shard_record(shard)
    return Lease(
        attempt_id=attempt_id,
        attempt_number=shard.num_attempts,
        worker_id=worker_id,
        job=job_record(job),
        shard=record,
        mode=mode,
        close_status=status,
        probe_rows=shard.probe_rows if mode is LeaseMode.RUN else None,
        poisoned_rows=record.poisoned_rows,
        generation=shard.generation,
        retry_statuses=record.retry_statuses,
        base_path=shard.result_path,
        nanos_per_hour=nanos_per_hour,
        expires_at=expires_at,
    )


def _action(job: Row[Any], attempt: Row[Any], now: datetime) -> Action:
    """What the job's state means for a running attempt."""
    state = JobState(job.state)
    if state is JobState.FAILED or (state in HELD and state is not JobState.BUDGET_EXHAUSTED):
        return Action.STOP_PAUSE
    if state is JobState.BUDGET_EXHAUSTED:
        return Action.STOP_BUDGET
    if attempt.mode == LeaseMode.CLOSE:
        return Action.CONTINUE
    status = closing_status(job, now)
    if status is RowStatus.CANCELLED:
        return Action.STOP_CANCEL
    if status is RowStatus.EXPIRED and (state in RUNNABLE):
        return Action.STOP_EXPIRED
    return Action.CONTINUE
