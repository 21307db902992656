"""How attempts end without a commit: given back, failed, or lost with their worker."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, select, update

from batchinfer.db.tables import RUNNING, Attempt, Shard
from batchinfer.errors import FencedError
from batchinfer.jobs.isolation import Isolation, after_death, after_fault, after_release, fault_delay_s
from batchinfer.jobs.ledger_base import LedgerBase
from batchinfer.jobs.ledger_rows import attempt_record, shard_record
from batchinfer.jobs.status import (
    JOB_TRANSITIONS,
    AttemptState,
    FailureKind,
    JobState,
    LeaseMode,
    ShardState,
)
from batchinfer.money import NS_PER_HOUR

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection, Row

    from batchinfer.jobs.records import AttemptRecord, ShardRecord

AGAIN_FIRST = 0
"""``turn`` of shards that come back from a dead attempt: their rows have waited longest."""
IN_ORDER = 1
"""``turn`` of all others; also of suspects, so that a row that kills engines does not get them all, one by one."""

# made once, as all that a ticker asks every second: building a query takes longer than an answer of nothing
_EXPIRED = (
    select(Attempt.id)
    .where(RUNNING, Attempt.lease_expires_at <= bindparam("now"))
    .order_by(Attempt.lease_expires_at)
    .limit(bindparam("limit"))
)


class Endings(LedgerBase):
    """Release, fail and reap."""

    def release(self, attempt_id: int, metered_ns: int, *, device_fault: str | None = None) -> None:
        """Give the rest back at once (drain, pause, probe done); not counted as a failure. Raises FencedError.

        ``device_fault`` is what failed of the worker's device, if that is why: no row is to blame, and the job's events say
        so.
        """

        def work(connection: Connection, now: datetime) -> None:
            if _has_ended(connection, attempt_id, AttemptState.RELEASED):
                return
            job, attempt, shard = self._fence(connection, attempt_id)
            self._end_attempt(
                connection, attempt, now, state=AttemptState.RELEASED, metered_ns=metered_ns, error=device_fault
            )
            if device_fault is not None:
                self._tell(
                    connection, job.id, now, "device_failed",
                    shard=shard.shard_index, attempt=attempt_id, worker=attempt.worker_id, reason=device_fault,
                )  # fmt: skip
            known = after_release(_isolation(shard), probe_done=attempt.done_rows)
            _give_back(connection, shard, known, turn=shard.turn)

        self._write(work)

    def fail(
        self, attempt_id: int, reason: str, metered_ns: int, *, kind: FailureKind = FailureKind.ENGINE
    ) -> ShardRecord:
        """End the attempt as failed; the shard goes back, perhaps to be probed or quarantined. Raises FencedError."""

        def work(connection: Connection, now: datetime) -> ShardRecord:
            if not _has_ended(connection, attempt_id, AttemptState.FAILED):
                job, attempt, shard = self._fence(connection, attempt_id)
                self._end_attempt(
                    connection, attempt, now, state=AttemptState.FAILED, metered_ns=metered_ns, error=reason
                )
                self._put_back(connection, now, job=job, attempt=attempt, shard=shard, kind=kind, reason=reason)
            shard_id = select(Attempt.shard_id).where(Attempt.id == attempt_id).scalar_subquery()
            return shard_record(connection.execute(select(Shard).where(Shard.id == shard_id)).one())

        return self._write(work)

    def reap_expired(self, *, limit: int = 100) -> list[AttemptRecord]:
        """End attempts whose lease expired as ``lost``, each counted as an engine failure of its shard."""

        def expired(connection: Connection, now: datetime) -> list[int]:
            return list(connection.scalars(_EXPIRED, {"now": now, "limit": limit}))

        # one transaction each: a transaction holds one job's lock at most
        reaped = [self._reap(attempt_id) for attempt_id in self._read(expired)]
        return [attempt for attempt in reaped if attempt is not None]

    def _reap(self, attempt_id: int) -> AttemptRecord | None:
        """End one attempt, unless it was renewed, ended or reaped meanwhile."""

        def work(connection: Connection, now: datetime) -> AttemptRecord | None:
            try:
                job, attempt, shard = self._fence(connection, attempt_id)
            except FencedError:
                return None
            if attempt.lease_expires_at > now:
                return None
            reason = f"worker {attempt.worker_id} did not renew its lease"
            self._end_attempt(connection, attempt, now, state=AttemptState.LOST, metered_ns=0, error=reason)
            kind = FailureKind.ENGINE
            self._put_back(connection, now, job=job, attempt=attempt, shard=shard, kind=kind, reason=reason)
            return attempt_record(connection.execute(select(Attempt).where(Attempt.id == attempt_id)).one())

        return self._write(work)

    # -- what all endings do ------------------------------------------------------------------------------------------
    def _end_attempt(
        self, connection: Connection, attempt: Row[Any], now: datetime, *, state: AttemptState, metered_ns: int,
        error: str | None = None, result_path: str | None = None,
    ) -> None:  # fmt: skip
        """Close a locked attempt; the device time that none of its parts paid for is overhead.

        Its price is the difference of two roundings, so that parts and lost work sum to the attempt's whole time.
        """
        # heartbeats estimate the share of unfinished rows; an attempt that commits its shard has none, and lost nothing
        is_committed = state is AttemptState.COMMITTED
        metered_ns = attempt.device_ns if is_committed else max(attempt.metered_ns, metered_ns)
        connection.execute(
            update(Attempt)
            .where(Attempt.id == attempt.id)
            .values(state=state, metered_ns=metered_ns, ended_at=now, error=error, result_path=result_path)
        )
        if (lost_ns := metered_ns - attempt.device_ns) > 0:
            price = attempt.nanos_per_hour
            nanos = metered_ns * price // NS_PER_HOUR - attempt.device_ns * price // NS_PER_HOUR
            self._charge_overhead(
                connection, attempt.job_id, now, source_id=f"attempt:{attempt.id}:lost", kind="lost",
                device_ns=lost_ns, nanos=nanos, worker_id=attempt.worker_id,
            )  # fmt: skip

    def _put_back(
        self, connection: Connection, now: datetime, *, job: Row[Any], attempt: Row[Any], shard: Row[Any],
        kind: FailureKind, reason: str,
    ) -> None:  # fmt: skip
        """Decide what a failure means for a locked shard."""
        is_fault = kind is FailureKind.SHARD or attempt.mode == LeaseMode.CLOSE
        known = _after_failure(job, attempt, shard, is_fault=is_fault)
        self._tell(
            connection, job.id, now, "shard_failed",
            shard=shard.shard_index, attempt=attempt.id, cause=kind, reason=reason, probe_rows=known.probe_rows,
        )  # fmt: skip
        for row in known.poisoned_rows[len(shard.poisoned_rows) :]:
            self._tell(connection, job.id, now, "row_poisoned", row=row, shard=shard.shard_index)
        has_faulted = known.num_faults > shard.num_faults
        _give_back(
            connection, shard, known,
            turn=AGAIN_FIRST if known.probe_rows is None and not has_faulted else IN_ORDER,
            retry_at=now + timedelta(seconds=fault_delay_s(known.num_faults)) if has_faulted else None,
        )  # fmt: skip
        if known.is_quarantined:
            self._quarantine(connection, job, shard, now, reason)

    def _quarantine(self, connection: Connection, job: Row[Any], shard: Row[Any], now: datetime, reason: str) -> None:
        job = self._lock_job(connection, job.id)
        self._tell(connection, job.id, now, "shard_quarantined", shard=shard.shard_index, reason=reason)
        if JobState.FAILED in JOB_TRANSITIONS[JobState(job.state)]:
            message = f"shard {shard.shard_index} failed again and again, at last with: {reason}"
            self._fail_job(connection, job, now, "shard_failed", message)


def _has_ended(connection: Connection, attempt_id: int, state: AttemptState) -> bool:
    """Whether this very ending has happened: then its message to the worker was lost, and it asks again."""
    query = select(Attempt.id).where(Attempt.id == attempt_id, Attempt.state == state)
    return connection.execute(query).one_or_none() is not None


def _isolation(shard: Row[Any]) -> Isolation:
    return Isolation(shard.num_failures, shard.num_faults, shard.probe_rows, tuple(shard.poisoned_rows))


def _after_failure(job: Row[Any], attempt: Row[Any], shard: Row[Any], *, is_fault: bool) -> Isolation:
    if is_fault:
        return after_fault(_isolation(shard), max_attempts=job.max_attempts)
    return after_death(
        _isolation(shard),
        remaining_rows=shard.todo_rows - shard.done_rows,
        succeeded_rows=shard.rows_succeeded,
        probe_done=attempt.done_rows,
        probe_row=attempt.probe_row,
        max_attempts=job.max_attempts,
    )


def _give_back(
    connection: Connection, shard: Row[Any], known: Isolation, *, turn: int, retry_at: datetime | None = None
) -> None:
    """Let others lease the shard (or no one, if it is quarantined)."""
    connection.execute(
        update(Shard)
        .where(Shard.id == shard.id, Shard.state == ShardState.LEASED)
        .values(
            state=ShardState.QUARANTINED if known.is_quarantined else ShardState.PENDING,
            turn=turn,
            retry_at=retry_at,
            num_failures=known.num_failures,
            num_faults=known.num_faults,
            probe_rows=known.probe_rows,
            poisoned_rows=list(known.poisoned_rows),
        )
    )
