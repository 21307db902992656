"""Planning and finalizing: a job's steps before and after its shards, each leased to one worker by a token."""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import TextClause, select, true, update
from sqlalchemy.orm import aliased

from batchinfer.db.tables import WAITS_FOR_MANIFEST, WAITS_FOR_PLAN, Job
from batchinfer.errors import FencedError
from batchinfer.jobs.forecasts import note_outcome
from batchinfer.jobs.leases import FinalizeLease, PlanLease
from batchinfer.jobs.ledger_base import LedgerBase
from batchinfer.jobs.ledger_rows import job_record, row_counts
from batchinfer.jobs.status import JobState, Outcome
from batchinfer.types import RowStatus

if TYPE_CHECKING:
    from sqlalchemy import Connection, Row

    from batchinfer.jobs.records import JobRecord, RowCounts

MAX_STEP_ATTEMPTS = 5
"""Leases of one step that may be lost before the job fails: its input or output ends the workers."""


class Steps(LedgerBase):
    """Leases of whole jobs, for the planner and the finalizer."""

    def lease_planning(
        self, worker_id: str, *, job_id: str | None = None, lease_seconds: float = 60.0
    ) -> PlanLease | None:
        """Lease the best job that waits for a plan; with ``job_id``, only that one."""
        found = self._lease_step(worker_id, WAITS_FOR_PLAN, "planning_lost", lease_seconds, job_id)
        return None if found is None else PlanLease(job_record(found), found.step_token, found.step_expires_at)

    def heartbeat_planning(self, job_id: str, token: str, *, lease_seconds: float = 60.0) -> None:
        """Keep the planning lease. Raises FencedError (also when the job was cancelled or paused meanwhile)."""
        self._heartbeat_step(job_id, token, JobState.VALIDATING, lease_seconds)

    def fail_planning(self, job_id: str, token: str, code: str, message: str) -> JobRecord:
        """The job cannot be planned: it becomes ``failed``. Raises FencedError."""
        return self._fail_step(job_id, token, JobState.VALIDATING, code, message)

    def lease_finalizing(
        self, worker_id: str, *, job_id: str | None = None, lease_seconds: float = 60.0
    ) -> FinalizeLease | None:
        """Lease a job whose rows have all ended; with ``job_id``, only that one."""
        found = self._lease_step(worker_id, WAITS_FOR_MANIFEST, "finalizing_lost", lease_seconds, job_id)
        return None if found is None else FinalizeLease(job_record(found), found.step_token, found.step_expires_at)

    def heartbeat_finalizing(self, job_id: str, token: str, *, lease_seconds: float = 60.0) -> None:
        """Keep the lease. Raises FencedError."""
        self._heartbeat_step(job_id, token, JobState.FINALIZING, lease_seconds)

    def finish(self, job_id: str, token: str, manifest_path: str) -> JobRecord:
        """The manifest is out: the job becomes completed, cancelled or expired and gets its outcome, once.

        Raises FencedError.
        """

        def work(connection: Connection, now: datetime) -> JobRecord:
            job = self._fence_step(connection, job_id, token, JobState.FINALIZING)
            counts = row_counts(job)
            final = _final_state(counts, job.closing)
            self._set_state(
                connection, job, final, now,
                outcome=_outcome(counts), manifest_path=manifest_path, finished_at=now,
            )  # fmt: skip
            ended = self._lock_job(connection, job_id)
            note_outcome(connection, ended, now)
            return job_record(ended)

        return self._write(work)

    def fail_finalizing(self, job_id: str, token: str, code: str, message: str) -> JobRecord:
        """The results cannot be published: the job becomes ``failed``; ``resume`` tries again. Raises FencedError."""
        return self._fail_step(job_id, token, JobState.FINALIZING, code, message)

    # -- what both steps do -------------------------------------------------------------------------------------------
    def _lease_step(
        self, worker_id: str, waiting: TextClause, lost_code: str, lease_seconds: float, job_id: str | None
    ) -> Row[Any] | None:
        def work(connection: Connection, now: datetime) -> Row[Any] | None:
            while (
                job := _claim_step(connection, worker_id, waiting, now, lease_seconds=lease_seconds, job_id=job_id)
            ) is not None:
                if job.step_attempts <= MAX_STEP_ATTEMPTS:
                    return job
                message = f"{MAX_STEP_ATTEMPTS} workers were lost at this step; look at their logs, then resume"
                self._fail_job(connection, job, now, lost_code, message)
            return None

        return self._write(work)

    def _heartbeat_step(self, job_id: str, token: str, state: JobState, lease_seconds: float) -> None:
        def work(connection: Connection, now: datetime) -> None:
            changed = connection.execute(
                update(Job)
                .where(Job.id == job_id, Job.state == state, Job.step_token == token)
                .values(step_expires_at=now + timedelta(seconds=lease_seconds))
            ).rowcount
            if not changed:
                raise _step_fenced(job_id, state)

        self._write(work)

    def _fence_step(self, connection: Connection, job_id: str, token: str, state: JobState) -> Row[Any]:
        """Lock the job if the token still holds its step."""
        job = self._lock_job(connection, job_id)
        if job.state != state or job.step_token != token:
            raise _step_fenced(job_id, state)
        return job

    def _fail_step(self, job_id: str, token: str, state: JobState, code: str, message: str) -> JobRecord:
        def work(connection: Connection, now: datetime) -> JobRecord:
            self._fail_job(connection, self._fence_step(connection, job_id, token, state), now, code, message)
            return job_record(self._lock_job(connection, job_id))

        return self._write(work)


def _claim_step(
    connection: Connection,
    worker_id: str,
    waiting: TextClause,
    now: datetime,
    *,
    lease_seconds: float,
    job_id: str | None,
) -> Row[Any] | None:
    """Take a job's step in one statement; two workers never get the same."""
    candidate = aliased(Job)
    is_free = candidate.step_expires_at.is_(None) | (candidate.step_expires_at <= now)
    best = (
        select(candidate.id)
        .where(waiting, is_free, true() if job_id is None else candidate.id == job_id)
        .order_by(candidate.priority.desc(), candidate.id)
        .limit(1)
        .with_for_update(skip_locked=True, key_share=True)
    )
    return connection.execute(
        update(Job)
        .where(Job.id == best.scalar_subquery())
        .values(
            step_token=secrets.token_hex(16),
            step_worker=worker_id,
            step_expires_at=now + timedelta(seconds=lease_seconds),
            step_attempts=Job.step_attempts + 1,
        )
        .returning(Job)
    ).one_or_none()


def _step_fenced(job_id: str, state: JobState) -> FencedError:
    return FencedError(f"the {state} lease of job {job_id} is lost; nothing was changed")


def _final_state(counts: RowCounts, closing: str | None) -> JobState:
    if closing == RowStatus.CANCELLED or counts.cancelled:
        return JobState.CANCELLED
    return JobState.EXPIRED if counts.expired else JobState.COMPLETED


def _outcome(counts: RowCounts) -> Outcome:
    """``succeeded`` if nothing went wrong (rows were skipped or filtered as asked), ``none`` if nothing went right."""
    if counts.errored + counts.expired + counts.cancelled == 0:
        return Outcome.SUCCEEDED
    return Outcome.PARTIAL if counts.succeeded + counts.deduplicated else Outcome.NONE
