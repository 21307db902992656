"""The ledger: the only writer of job, shard and attempt state. Each method is one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Engine

from batchinfer.jobs.leases import (
    FinalizeLease,
    HeartbeatReply,
    Lease,
    PartCommit,
    PlanLease,
    RowErrorSample,
    ShardPlan,
    ShardResult,
)
from batchinfer.jobs.records import (
    AttemptRecord,
    CostReport,
    JobEvent,
    JobRecord,
    PartRecord,
    ShardRecord,
    WorkerRecord,
)
from batchinfer.jobs.spec import JobSpec
from batchinfer.jobs.status import FailureKind, JobState
from batchinfer.money import Price
from batchinfer.types import RowStatus

RETRIED = (RowStatus.ERRORED, RowStatus.EXPIRED, RowStatus.CANCELLED)


class Ledger:
    """State of jobs over a database engine made by ``batchinfer.db.session.create_db_engine``.

    Thread-safe. Transient database errors (a restart, a deadlock, a busy SQLite) are retried for up to
    ``retry_seconds``; each method is safe to run again. ``clock`` replaces the database's clock in tests.
    """

    def __init__(
        self, engine: Engine, *, clock: Callable[[], datetime] | None = None, retry_seconds: float = 10.0
    ) -> None:
        raise NotImplementedError

    # -- jobs -------------------------------------------------------------------------------------------------------
    def submit(
        self,
        spec: JobSpec,
        *,
        job_id: str | None = None,
        idempotency_key: str | None = None,
        body_hash: str | None = None,
    ) -> tuple[JobRecord, bool]:
        """Write a new job in state ``validating``; True if it was created, False if the key had created it before.

        ``body_hash`` is what two submissions under one key must share; by default the spec's fingerprint (pass a hash
        of the raw request where the spec has moments derived from it, such as a deadline of ``6h``).

        Raises:
            ConflictError: ``idempotency_conflict``: the key was used with another body.
        """
        raise NotImplementedError

    def get_job(self, job_id: str) -> JobRecord:
        """Raises NotFoundError."""
        raise NotImplementedError

    def list_jobs(self, *, state: JobState | None = None, limit: int = 50, after: str | None = None) -> list[JobRecord]:
        """Newest first; ``after`` is the last id of the page before."""
        raise NotImplementedError

    def events(self, job_id: str, *, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        """In order, with ids above ``after``."""
        raise NotImplementedError

    def row_errors(
        self, job_id: str, *, limit: int = 100, offset: int = 0, code: str | None = None
    ) -> list[RowErrorSample]:
        """Rows that did not succeed, by row index: a bounded sample; the Parquet output has all."""
        raise NotImplementedError

    def shards(self, job_id: str, *, page_size: int = 1000) -> Iterator[ShardRecord]:
        """All shards by index, read in pages."""
        raise NotImplementedError

    def parts(self, shard_id: int, *, generation: int | None = None) -> list[PartRecord]:
        """Committed parts of a shard in commit order; of one generation, or of all."""
        raise NotImplementedError

    def attempts(self, job_id: str, *, running_only: bool = False) -> list[AttemptRecord]:
        """Attempts of a job, oldest first."""
        raise NotImplementedError

    def live_paths(self, job_id: str) -> Iterator[str]:
        """Files that count: results of committed shards, bases of retried ones, parts still to be merged."""
        raise NotImplementedError

    # -- planning ---------------------------------------------------------------------------------------------------
    def lease_planning(self, worker_id: str, *, lease_seconds: float = 60.0) -> PlanLease | None:
        """Lease the best job that waits for a plan."""
        raise NotImplementedError

    def heartbeat_planning(self, job_id: str, token: str, *, lease_seconds: float = 60.0) -> None:
        """Keep the planning lease. Raises FencedError (also when the job was cancelled or paused meanwhile)."""
        raise NotImplementedError

    def commit_plan(
        self,
        job_id: str,
        token: str,
        *,
        num_rows: int,
        fingerprint: Mapping[str, Any],
        warnings: Sequence[str],
        output: str,
        shards: Iterable[ShardPlan],
    ) -> JobRecord:
        """Store the plan in one transaction; shards are inserted in batches as the iterable yields them.

        The job becomes ``queued``, or ``finalizing`` if there are no rows. Shards must tile ``[0, num_rows)``.

        Raises:
            FencedError: the planning lease was lost.
            ValueError: shards overlap, leave a gap or are empty.
        """
        raise NotImplementedError

    def fail_planning(self, job_id: str, token: str, code: str, message: str) -> JobRecord:
        """The job cannot be planned: it becomes ``failed``. Raises FencedError."""
        raise NotImplementedError

    # -- leases -----------------------------------------------------------------------------------------------------
    def lease_shard(
        self, worker_id: str, *, models: Sequence[str] | None = None, lease_seconds: float = 60.0
    ) -> Lease | None:
        """Lease the best shard there is for these models (None: any); shards to be closed match every worker.

        Order: shards whose lease expired or failed, then priority, deadline, job age, shard index.

        Raises:
            NotFoundError: the worker is not registered.
        """
        raise NotImplementedError

    def heartbeat(self, attempt_id: int, metered_ns: int, *, lease_seconds: float = 60.0) -> HeartbeatReply:
        """Renew the lease. ``metered_ns``: device time this attempt has used so far. Raises FencedError."""
        raise NotImplementedError

    def announce_probe(self, attempt_id: int, row_index: int) -> None:
        """Say which single row a probe is about to run, so that its death can be blamed on it. Raises FencedError."""
        raise NotImplementedError

    def release(self, attempt_id: int, metered_ns: int) -> None:
        """Give the rest back at once (drain, pause, probe done); not counted as a failure. Raises FencedError."""
        raise NotImplementedError

    def fail(
        self, attempt_id: int, reason: str, metered_ns: int, *, kind: FailureKind = FailureKind.ENGINE
    ) -> ShardRecord:
        """End the attempt as failed; the shard goes back, perhaps to be probed or quarantined. Raises FencedError."""
        raise NotImplementedError

    def reap_expired(self, *, limit: int = 100) -> list[AttemptRecord]:
        """End attempts whose lease expired as ``lost``, each counted as an engine failure of its shard."""
        raise NotImplementedError

    # -- commits ----------------------------------------------------------------------------------------------------
    def commit_part(self, attempt_id: int, part: PartCommit) -> int:
        """Add a part, its counters and its ledger entry; return the part's id. The same path twice is one part.

        Raises:
            FencedError: the attempt no longer holds the shard; the file is garbage.
            ValueError: the part's numbers contradict each other or the shard.
        """
        raise NotImplementedError

    def commit_shard(self, attempt_id: int, result: ShardResult) -> JobRecord:
        """Publish the shard's file; the last shard moves the job to ``finalizing``.

        Raises:
            FencedError: the attempt no longer holds the shard; the file is garbage.
            ConflictError: ``shard_incomplete``: rows are left without an outcome.
        """
        raise NotImplementedError

    # -- what people ask for ------------------------------------------------------------------------------------------
    def cancel(self, job_id: str) -> JobRecord:
        """Stop a job; rows that ended are kept. Asking again changes nothing. Raises ConflictError, NotFoundError."""
        raise NotImplementedError

    def pause(self, job_id: str) -> JobRecord:
        """Hold a job. Asking again changes nothing. Raises ConflictError, NotFoundError."""
        raise NotImplementedError

    def resume(self, job_id: str, *, budget_nanos: int | None = None) -> JobRecord:
        """Go on with a ``paused``, ``budget_exhausted`` or ``failed`` job, with a new budget if one is given.

        Raises:
            ConflictError: another state, or the budget is already spent.
            NotFoundError: no such job.
        """
        raise NotImplementedError

    def retry(self, job_id: str, statuses: Iterable[RowStatus] = RETRIED) -> int:
        """Run a finished job's rows of these statuses again; return how many. 0 changes nothing.

        A deadline that has passed is dropped. Raises ConflictError, NotFoundError.
        """
        raise NotImplementedError

    def fail_job(self, job_id: str, code: str, message: str) -> JobRecord:
        """The job as a whole cannot go on (its input changed, its model is gone). Raises ConflictError."""
        raise NotImplementedError

    def expire_due(self) -> list[str]:
        """Start closing the jobs whose deadline has passed; return their ids."""
        raise NotImplementedError

    # -- finalizing ---------------------------------------------------------------------------------------------------
    def lease_finalizing(self, worker_id: str, *, lease_seconds: float = 60.0) -> FinalizeLease | None:
        """Lease a job whose rows have all ended."""
        raise NotImplementedError

    def heartbeat_finalizing(self, job_id: str, token: str, *, lease_seconds: float = 60.0) -> None:
        """Keep the lease. Raises FencedError."""
        raise NotImplementedError

    def finish(self, job_id: str, token: str, manifest_path: str) -> JobRecord:
        """The manifest is out: the job becomes completed, cancelled or expired and gets its outcome, once.

        Raises FencedError.
        """
        raise NotImplementedError

    def fail_finalizing(self, job_id: str, token: str, code: str, message: str) -> JobRecord:
        """The results cannot be published: the job becomes ``failed``; ``resume`` tries again. Raises FencedError."""
        raise NotImplementedError

    # -- workers ------------------------------------------------------------------------------------------------------
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
    ) -> WorkerRecord:
        """Add the worker, or refresh it."""
        raise NotImplementedError

    def worker_heartbeat(self, worker_id: str, *, models: Sequence[str], stats: Mapping[str, Any]) -> None:
        """Say that the worker lives. Raises NotFoundError."""
        raise NotImplementedError

    def list_workers(self) -> list[WorkerRecord]:
        """All registered workers, newest first; ``last_seen_at`` tells the living."""
        raise NotImplementedError

    def drop_worker(self, worker_id: str) -> None:
        """Forget the worker. Its attempts stay."""
        raise NotImplementedError

    def pending_models(self) -> dict[str, int]:
        """Model to number of shards that a worker could lease now, expired leases included."""
        raise NotImplementedError

    def pending_control(self) -> tuple[int, int]:
        """Jobs that wait for a planner, and jobs that wait for a finalizer, now."""
        raise NotImplementedError

    # -- money --------------------------------------------------------------------------------------------------------
    def add_overhead(
        self, job_id: str | None, source_id: str, *, kind: str, device_ns: int, nanos: int, worker_id: str | None = None
    ) -> bool:
        """Book device time that no row caused (``load``, ``idle``, ``lost``); False if the source is booked already."""
        raise NotImplementedError

    def cost_report(self, job_id: str) -> CostReport:
        """Sums over the job's ledger entries."""
        raise NotImplementedError

    def set_price(self, model: str, price: Price, *, valid_from: datetime | None = None) -> None:
        """Set a model's list price from a moment on (default: now)."""
        raise NotImplementedError

    def price_at(self, model: str, at: datetime | None = None) -> Price | None:
        """The list price in force at a moment (default: now), or None."""
        raise NotImplementedError
