"""Working on one lease, from its first row to its committed file, or to giving back what is left of it."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from batchinfer import tracing
from batchinfer.engine.model_identity import model_revision, model_stamp
from batchinfer.errors import (
    BatchInferError,
    ConflictError,
    DeviceUnhealthyError,
    EngineError,
    FencedError,
    InputError,
    InvalidSpecError,
    ModelError,
)
from batchinfer.jobs.status import Action, FailureKind, LeaseMode
from batchinfer.money import DeviceMeter
from batchinfer_workers.checkpoint import Checkpoint, CheckpointPolicy
from batchinfer_workers.engine_config import engine_config
from batchinfer_workers.heartbeat import LeaseKeeper
from batchinfer_workers.partial_rows import PartialRows
from batchinfer_workers.remaining import RemainingRows
from batchinfer_workers.result_rows import ResultRows
from batchinfer_workers.reuse import RowReuse
from batchinfer_workers.roots import roots_of
from batchinfer_workers.row_pump import RowPump, Window
from batchinfer_workers.sentinel import Sentinel
from batchinfer_workers.shard_files import ShardFiles

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable

    from batchinfer.dataset.schema import ResultRow
    from batchinfer.jobs.leases import Lease, SentinelFound, ShardResult
    from batchinfer.jobs.ledger import Ledger
    from batchinfer.jobs.records import JobRecord
    from batchinfer.settings import Settings
    from batchinfer.types import Request
    from batchinfer_workers.engine_host import EngineHost
    from batchinfer_workers.engine_session import EngineSession
    from batchinfer_workers.reference_host import ReferenceHost

CLOSE_ROWS = 10_000
"""Rows of a cancelled or expired shard that are written between two commits."""
JOB_ERRORS = (InputError, InvalidSpecError, ModelError)
"""What no other attempt can mend: the input changed, the template or the model is not what it was."""
_log = logging.getLogger(__name__)


class Stopped(BatchInferError):  # noqa: N818 -- a way out of the loop, not an error
    """The rest of the shard goes back: drain, cancel, pause, deadline, budget or the end of a probe."""


class ShardRunner:
    """Runs one lease. Once ``draining`` is set it commits what is finished, gives the rest back and returns."""

    def __init__(
        self,
        ledger: Ledger,
        host: EngineHost,
        settings: Settings,
        lease: Lease,
        draining: threading.Event,
        *,
        reference: ReferenceHost | None = None,
    ) -> None:
        """``reference`` is for the sentinel; without one, no answer is held against anything."""
        self._ledger = ledger
        self._host = host
        self._settings = settings
        self._lease = lease
        self._draining = draining
        self._reference = reference
        self._session: EngineSession | None = None
        self._reuse: RowReuse | None = None
        self._ended_ns = 0
        self._seen_progress = -1
        self._keeper = LeaseKeeper(self._renew, seconds=settings.heartbeat_seconds, may_renew=self._makes_progress)
        self.checkpoint: Checkpoint | None = None
        """Rows that are finished and not committed, once the work has begun."""

    @property
    def metered_ns(self) -> int:
        """Device time of this attempt so far, in nanoseconds."""
        session = self._session
        return self._ended_ns + (session.metered_ns if session else 0)

    def run(self) -> JobRecord | None:
        """Work until the lease is committed, given back, failed or lost; the job's record if it was committed.

        Raises nothing but what a database raises that stays away; the lease then expires by itself.
        """
        try:
            with self._keeper:
                return self._work()
        except Exception as error:  # noqa: BLE001 -- whatever ends an attempt must be told to the ledger
            with suppress(FencedError, ConflictError):
                self._give_up(error)
        return None

    def _give_up(self, error: Exception) -> None:
        """Tell the ledger how the attempt ended."""
        lease = self._lease
        name = f"attempt {lease.attempt_id} of shard {lease.shard.index} of {lease.job.id}"
        if isinstance(error, Stopped):
            tracing.note(end=f"given back: {error}")
        else:
            tracing.note_error(error)
        if isinstance(error, FencedError):
            _log.warning("%s lost its lease", name)
        elif isinstance(error, Stopped):
            self._ledger.release(lease.attempt_id, self._ended_ns)
        elif isinstance(error, JOB_ERRORS):
            _log.error("%s fails: %s", lease.job.id, error)
            self._ledger.fail_job(lease.job.id, error.code, error.message)
            self._ledger.release(lease.attempt_id, self._ended_ns)
        elif isinstance(error, DeviceUnhealthyError):
            # another worker, or this one once its device is well, runs the rest: no row and no shard is to blame
            _log.warning("%s gives its rows back: %s", name, error)
            self._ledger.release(lease.attempt_id, self._ended_ns, device_fault=str(error))
        elif isinstance(error, EngineError):
            _log.warning("%s: %s", name, error)
            self._ledger.fail(lease.attempt_id, str(error), self._ended_ns, kind=FailureKind.ENGINE)
        else:
            _log.error("%s failed", name, exc_info=error)
            reason = f"{type(error).__name__}: {error}"
            self._ledger.fail(lease.attempt_id, reason, self._ended_ns, kind=FailureKind.SHARD)

    def _work(self) -> JobRecord:
        lease = self._lease
        files = ShardFiles(self._ledger, lease, roots_of(self._ledger, self._settings, lease.job))
        rows = ResultRows(lease, self._ledger.price_at(lease.job.model, lease.job.created_at))
        policy = CheckpointPolicy.of(self._settings)
        checkpoint = Checkpoint(self._ledger, lease.attempt_id, files.writer, policy, replaced=files.replaced)
        self.checkpoint = checkpoint
        remaining = files.remaining()
        self._write_poisoned(remaining, rows, checkpoint)
        if lease.mode is LeaseMode.CLOSE:
            self._close(remaining, rows, checkpoint)
            return self._commit(files)
        is_part = lease.probe_rows is not None and lease.probe_rows < len(remaining)
        if lease.probe_rows is not None:
            remaining.keep_first(lease.probe_rows)
        self._run_rows(files, remaining, rows, checkpoint)
        if is_part:
            raise Stopped("the probe is done")
        return self._commit(files)

    def _write_poisoned(self, remaining: RemainingRows, rows: ResultRows, checkpoint: Checkpoint) -> None:
        """Rows found to kill the engine end here, without running again."""
        poisoned = [row for row in self._lease.poisoned_rows if row in remaining]
        for row in poisoned:
            checkpoint.add(rows.lost(row))
        remaining.discard(poisoned)
        checkpoint.flush()

    def _close(self, remaining: RemainingRows, rows: ResultRows, checkpoint: Checkpoint) -> None:
        """Give the rows left the outcome of a cancel or a deadline; in a retry they keep the one they had."""
        status = self._lease.close_status
        if self._lease.generation > 0 or status is None:
            return
        for row in remaining:
            checkpoint.add(rows.closed(row, status))
            if checkpoint.num_rows >= CLOSE_ROWS:
                self._keeper.check()
                checkpoint.flush()
        checkpoint.flush()

    def _run_rows(self, files: ShardFiles, remaining: RemainingRows, rows: ResultRows, checkpoint: Checkpoint) -> None:
        """Copy what need not run, run the rest in the engine."""
        reuse = self._reuse = RowReuse.of(self._lease.job, self._ledger)
        if reuse is None:
            self._pump_rows(files, remaining, rows, checkpoint)
            return
        reuse.look_at(files.read(remaining))
        rows.key_of = reuse.key_of
        for row in reuse.copies(rows, files.own_results()):
            checkpoint.add(row)
            remaining.discard([row.row_index])
            if checkpoint.num_rows >= CLOSE_ROWS or checkpoint.is_due:
                self._check_stop()
                checkpoint.flush()
        checkpoint.flush()
        remaining.discard(reuse.followers)
        self._pump_rows(files, remaining, rows, checkpoint, lambda row: reuse.copies_of(rows, row))
        if left := reuse.followers:  # the row that they waited for failed
            shard = self._lease.shard
            self._pump_rows(files, RemainingRows(shard.row_start, shard.row_end, left), rows, checkpoint)

    def _pump_rows(
        self,
        files: ShardFiles,
        remaining: RemainingRows,
        rows: ResultRows,
        checkpoint: Checkpoint,
        copies: Callable[[ResultRow], Iterable[ResultRow]] = lambda _row: (),
    ) -> None:
        """Run rows in the engine. However that ends, what is finished is committed, unless the lease is lost."""
        pump = RowPump(
            files.read(remaining),
            rows,
            checkpoint,
            Window(self._settings.window_rows, self._settings.window_bytes),
            open_session=self._open_session,
            job_seed=self._lease.job.spec.seed,
            copies=copies,
            partial=PartialRows(self._ledger, self._lease, files.layout, seconds=self._settings.checkpoint_seconds),
        )
        try:
            pump.run(check_stop=self._check_stop, on_commit=self._after_commit)
        except (Stopped, EngineError) as error:
            if isinstance(error, Stopped) and self._keeper.action not in (Action.STOP_CANCEL, Action.STOP_EXPIRED):
                pump.save_progress()
            self._close_session()
            checkpoint.flush()
            raise
        finally:
            self._close_session()
        checkpoint.flush()

    def _commit(self, files: ShardFiles) -> JobRecord:
        lease = self._lease
        with tracing.span("commit", job=lease.job.id, shard=lease.shard.index, attempt=lease.attempt_id):
            self._keeper.check()
            result = files.merge()
            found = self._watch(files, result)
            job = self._ledger.commit_shard(lease.attempt_id, result, found)
            self._keeper.close()
            files.publish(result)
            return job

    def _watch(self, files: ShardFiles, result: ShardResult) -> SentinelFound | None:
        """Hold a share of the answers against the reference precision, if the job asks for it; the cost is overhead."""
        lease = self._lease
        if self._reference is None or lease.mode is LeaseMode.CLOSE:
            return None
        sentinel = Sentinel(self._reference, self._settings, lease)
        try:
            return sentinel.check(files, result, self._check_stop)
        finally:
            if sentinel.device_ns:
                self._ledger.add_overhead(
                    lease.job.id,
                    f"attempt:{lease.attempt_id}:sentinel",
                    kind="sentinel",
                    device_ns=sentinel.device_ns,
                    nanos=DeviceMeter(lease.nanos_per_hour).charge(sentinel.device_ns),
                    worker_id=lease.worker_id,
                )

    def _open_session(self, requests: list[Request]) -> EngineSession:
        """Enter the engine, alone if this is a probe."""
        lease = self._lease
        config = engine_config(lease.job.spec, self._settings)
        try:
            session = self._host.acquire(config, is_cancelled=self._must_stop, exclusive=lease.probe_rows is not None)
        except DeviceUnhealthyError:
            raise
        except EngineError as error:
            raise RuntimeError(f"the engine ended while it loaded {config.model}: {error}") from error
        if session is None:
            raise Stopped("stopped while waiting for the engine")
        self._session = session
        if self._reuse is not None and session.model_stamp != self._reuse.stamp:
            # the engine was loaded before the model's files changed: its answers are not those of the files
            self._reuse.is_valid = False
        session.begin(lease.job.id)
        self._note_model(session)
        if session.load_ns:
            self._book_load(session)
        if lease.probe_rows == 1:
            self._ledger.announce_probe(lease.attempt_id, int(requests[0].request_id))
        return session

    def _note_model(self, session: EngineSession) -> None:
        """Keep which model the rows run on, so that a replay can tell whether it still has the same."""
        model = self._lease.job.model
        if session.model_stamp is not None and session.model_stamp == model_stamp(model):
            revision = model_revision(model)
            if revision is not None and revision != self._lease.job.model_revision:
                self._ledger.note_model(self._lease.job.id, revision)

    def _book_load(self, session: EngineSession) -> None:
        nanos = DeviceMeter(self._lease.nanos_per_hour).charge(session.load_ns)
        self._ledger.add_overhead(
            self._lease.job.id,
            f"engine:{session.engine_id}:load",
            kind="load",
            device_ns=session.load_ns,
            nanos=nanos,
            worker_id=self._lease.worker_id,
        )

    def _close_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._ended_ns += session.metered_ns
            self._host.release(session)
            self._note_engine(session)

    def _note_engine(self, session: EngineSession) -> None:
        """Keep how the engine was used; nice to have, so that no failure here may cost the attempt."""
        job_id = self._lease.job.id
        try:
            self._ledger.note_engine(job_id, session.engine_id, session.report(job_id))
        except Exception:  # noqa: BLE001 -- whatever it is, the rows count
            _log.warning("could not keep the engine's figures", exc_info=True)

    def _renew(self) -> Action:
        reply = self._ledger.heartbeat(
            self._lease.attempt_id, self.metered_ns, lease_seconds=self._settings.lease_seconds
        )
        return reply.action

    def _makes_progress(self) -> bool:
        """Whether the lease is deserved: the shard does not wait for the engine, or the engine has moved."""
        session = self._session
        if session is None or not session.is_waiting:
            return True
        seen, self._seen_progress = self._seen_progress, session.progress
        return seen != self._seen_progress

    def _must_stop(self) -> bool:
        return self._draining.is_set() or self._keeper.is_fenced or self._keeper.action is not Action.CONTINUE

    def _check_stop(self) -> None:
        self._keeper.check()
        if self._must_stop():
            raise Stopped("draining" if self._draining.is_set() else self._keeper.action.value)

    def _after_commit(self) -> None:
        """A commit may have used up the budget: ask at once, before more rows are dispatched."""
        if self._lease.job.budget_nanos is not None:
            self._keeper.beat()
