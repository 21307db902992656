"""What every part of the ledger stands on: transactions, the clock, fencing, state changes and money."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import bindparam, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError

from batchinfer.db.session import read_transaction, write_transaction
from batchinfer.db.tables import Attempt, Base, Job, JobEventRow, LedgerEntry, Shard
from batchinfer.errors import FencedError, NotFoundError
from batchinfer.jobs.ledger_usage import count_usage
from batchinfer.jobs.spending import tenant_overspend
from batchinfer.jobs.status import RUNNABLE, AttemptState, JobState, check_job_transition
from batchinfer.jobs.webhook_events import tell_of_job

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, Engine, Row

    from batchinfer.jobs.caller import Caller

T = TypeVar("T")

# made once: building a query of so many columns costs as much as running it
_JOB = select(Job).where(Job.id == bindparam("job_id"))
_LOCKED_JOB = _JOB.with_for_update(key_share=True)

_TRANSIENT_STATES = frozenset({"25P03", "40001", "40P01", "53300", "57P01", "57P02", "57P03"})
"""PostgreSQL: a session that slept in a transaction, serialization failure, deadlock, too many connections, and three
kinds of restart."""


def is_transient(error: DBAPIError) -> bool:
    """Whether running the transaction again may help: a restart, a lost connection, a deadlock, a busy file."""
    original = error.orig
    state = getattr(original, "sqlstate", None)
    if error.connection_invalidated or state in _TRANSIENT_STATES or (state or "").startswith("08"):
        return True
    name = type(original).__name__
    text = str(original)
    if "locked" in text or "busy" in text:
        return name == "OperationalError"
    # psycopg gives no state where no connection could be made
    return name == "OperationalError" and type(original).__module__.startswith("psycopg") and state is None


def insert_once(connection: Connection, table: type[Base], values: dict[str, Any]) -> bool:
    """Insert a row unless a unique key forbids it; tell whether it was inserted. Both databases, one statement."""
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    statement = dialect.insert(table).values(values).on_conflict_do_nothing().returning(*table.__table__.primary_key)
    return connection.execute(statement).one_or_none() is not None


class LedgerBase:
    """Transactions on one engine. Thread-safe: it holds nothing but the engine and the clock."""

    def __init__(
        self, engine: Engine, *, clock: Callable[[], datetime] | None = None, retry_seconds: float = 10.0
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._retry_seconds = retry_seconds

    @property
    def engine(self) -> Engine:
        """The database."""
        return self._engine

    # -- transactions -------------------------------------------------------------------------------------------------
    def _write(self, work: Callable[[Connection, datetime], T], *, again: bool = True) -> T:
        """Run ``work(connection, now)`` in one write transaction; run it ``again`` after a transient failure."""

        def transaction() -> T:
            with write_transaction(self._engine) as connection:
                return work(connection, self._now(connection))

        return self._persist(transaction) if again else transaction()

    def _read(self, work: Callable[[Connection, datetime], T]) -> T:
        """Run ``work(connection, now)`` in one transaction that only reads."""

        def transaction() -> T:
            with read_transaction(self._engine) as connection:
                return work(connection, self._now(connection))

        return self._persist(transaction)

    def _persist(self, transaction: Callable[[], T]) -> T:
        give_up_at = time.monotonic() + self._retry_seconds
        pause = 0.02
        while True:
            try:
                return transaction()
            except DBAPIError as error:
                if not is_transient(error) or time.monotonic() + pause > give_up_at:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _now(self, connection: Connection) -> datetime:
        """The database's time, so that workers' clocks need not agree. SQLite is on this machine: its time is ours."""
        if self._clock is not None:
            return self._clock()
        if connection.dialect.name == "sqlite":
            return datetime.now(UTC)
        now: datetime = connection.execute(select(func.clock_timestamp())).scalar_one()
        return now.astimezone(UTC)

    # -- fencing ------------------------------------------------------------------------------------------------------
    @staticmethod
    def _lock_job(connection: Connection, job_id: str) -> Row[Any]:
        """Read a job and keep others from changing it until the transaction ends.

        Locks go from the job to its attempts and shards, so that two transactions never wait for each other.
        """
        return LedgerBase._find_job(connection, job_id, lock=True)

    @staticmethod
    def _find_job(connection: Connection, job_id: str, *, lock: bool = False, caller: Caller | None = None) -> Row[Any]:
        missing = f"no job {job_id}; `batchinfer ls` lists them"
        job = connection.execute(_LOCKED_JOB if lock else _JOB, {"job_id": job_id}).one_or_none()
        if job is None:
            raise NotFoundError(missing, param="job_id")
        if caller is not None:
            caller.check_sees(job.tenant_id, missing, param="job_id")
        return job

    def _fence(self, connection: Connection, attempt_id: int) -> tuple[Row[Any], Row[Any], Row[Any]]:
        """Lock a running attempt's job, the attempt and its shard. Raises FencedError if it does not run (any more)."""
        running = select(Attempt).where(Attempt.id == attempt_id, Attempt.state == AttemptState.RUNNING)
        attempt = connection.execute(running).one_or_none()
        if attempt is not None:
            job = self._lock_job(connection, attempt.job_id)
            attempt = connection.execute(running.with_for_update()).one_or_none()
        if attempt is None:
            raise FencedError(f"attempt {attempt_id} no longer holds its shard; nothing was changed")
        shard = connection.execute(select(Shard).where(Shard.id == attempt.shard_id).with_for_update()).one()
        return job, attempt, shard

    # -- state --------------------------------------------------------------------------------------------------------
    def _set_state(self, connection: Connection, job: Row[Any], new: JobState, now: datetime, **values: Any) -> None:
        """Change a job's state, compare-and-set, and tell its events. Ends a planner's or finalizer's lease.

        Raises:
            ConflictError: an illegal transition.
        """
        old = JobState(job.state)
        check_job_transition(job.id, old, new)
        values |= {"step_token": None, "step_worker": None, "step_expires_at": None, "step_attempts": 0}
        changed = connection.execute(
            update(Job).where(Job.id == job.id, Job.state == old).values(state=new, **values)
        ).rowcount
        assert changed == 1, f"job {job.id} changed while it was locked"
        self._tell(connection, job.id, now, "state", old=old, new=new)
        tell_of_job(connection, job, new, now, values)

    def _start(self, connection: Connection, job: Row[Any], now: datetime) -> None:
        """Move a locked job from ``queued`` to ``in_progress``, if it is there."""
        if job.state == JobState.QUEUED:
            self._set_state(connection, job, JobState.IN_PROGRESS, now, started_at=job.started_at or now)

    def _fail_job(self, connection: Connection, job: Row[Any], now: datetime, code: str, message: str) -> None:
        """A locked job cannot go on; its shards wait for a resume."""
        self._set_state(connection, job, JobState.FAILED, now, error_code=code, error_message=message, finished_at=now)
        self._set_queue(connection, job.id, None)

    @staticmethod
    def _tell(connection: Connection, job_id: str, now: datetime, kind: str, **data: Any) -> None:
        connection.execute(insert(JobEventRow).values(job_id=job_id, at=now, kind=kind, data=data))

    @staticmethod
    def _set_queue(connection: Connection, job_id: str, queue: Any) -> None:
        """Say who may lease the job's uncommitted shards: see :class:`~batchinfer.db.tables.Shard`."""
        open_shards = Shard.state.in_(("pending", "leased", "quarantined"))
        connection.execute(update(Shard).where(Shard.job_id == job_id, open_shards).values(queue=queue))

    # -- money --------------------------------------------------------------------------------------------------------
    def _charge_overhead(
        self, connection: Connection, job_id: str | None, now: datetime, *, source_id: str, kind: str,
        device_ns: int, nanos: int, worker_id: str | None,
    ) -> bool:  # fmt: skip
        """Book overhead of a locked job, or of none; False if its source is booked already."""
        job = None if job_id is None else connection.execute(select(Job).where(Job.id == job_id)).one()
        entry = {
            "source_id": source_id, "job_id": job_id, "worker_id": worker_id, "kind": kind,
            "device_ns": device_ns, "nanos": nanos, "created_at": now,
        }  # fmt: skip
        if not insert_once(connection, LedgerEntry, entry):
            return False
        count_usage(connection, job, now, overhead_nanos=nanos, device_ns=device_ns)
        if job_id is not None:
            connection.execute(update(Job).where(Job.id == job_id).values(overhead_nanos=Job.overhead_nanos + nanos))
            self._hold_if_spent(connection, job_id, now)
        return True

    def _hold_if_spent(self, connection: Connection, job_id: str, now: datetime) -> None:
        """Hold a job whose budget or whose tenant's budget is spent, before its next shard is leased.

        Closing costs nothing and goes on.
        """
        job = connection.execute(select(Job).where(Job.id == job_id)).one()
        if JobState(job.state) not in RUNNABLE or job.closing is not None or not job.open_shards:
            return
        spent = job.metered_nanos + job.overhead_nanos
        if job.budget_nanos is not None and spent >= job.budget_nanos:
            budget = {"budget": "job", "limit_nanos": job.budget_nanos, "spent_nanos": spent}
        elif over := tenant_overspend(connection, job.tenant_id, now):
            budget = {
                "budget": "tenant",
                "month": over.month,
                "limit_nanos": over.limit_nanos,
                "spent_nanos": over.spent_nanos,
            }
        else:
            return
        self._set_state(connection, job, JobState.BUDGET_EXHAUSTED, now)
        self._tell(connection, job_id, now, "budget_spent", **budget)
        self._set_queue(connection, job_id, None)
