"""A worker's insides: what its Celery tasks call, what its ticker tells, and how it stops."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from batchinfer import __version__, tracing
from batchinfer.engine.process import EngineProcess
from batchinfer.errors import FencedError, NotFoundError
from batchinfer.jobs.lease_order import Offer
from batchinfer.jobs.status import JobState
from batchinfer.log_context import bound
from batchinfer.money import DeviceMeter
from batchinfer_workers import device_health
from batchinfer_workers.clock import SWEEP_SECONDS, Clock
from batchinfer_workers.engine_host import EngineHost
from batchinfer_workers.finalizer import run_finalizing
from batchinfer_workers.planning import run_planning
from batchinfer_workers.reference_host import ReferenceHost
from batchinfer_workers.roots import roots_of
from batchinfer_workers.shard_runner import ShardRunner
from batchinfer_workers.ticker import ANYTHING, Ticker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from batchinfer.engine.config import EngineConfig
    from batchinfer.jobs.dispatch import Dispatcher
    from batchinfer.jobs.file_sweeper import FileSweeper
    from batchinfer.jobs.leases import Lease
    from batchinfer.jobs.ledger import Ledger
    from batchinfer.jobs.records import JobRecord
    from batchinfer.jobs.schedule_runner import ScheduleRunner
    from batchinfer.jobs.serving import Serves
    from batchinfer.jobs.webhook_sender import WebhookSender
    from batchinfer.settings import Settings

DRAIN_SECONDS = 30.0
"""How long a stop waits for running shards to commit and give back; they need a second or two."""
MODEL_SECONDS = 300.0
"""How long a loaded model's shards go before others, so that jobs of two models do not reload at each shard."""
NEAR_SECONDS = 60.0
"""How long a worker stays with the job and the model that it has, before the fair order decides again."""
REPORT_SECONDS = 5.0
FORGET_AFTER = timedelta(days=1)
"""A worker that has been silent for this long is no more worth showing."""
_log = logging.getLogger(__name__)


class WorkerNode:
    """One worker: its ledger, its engine, the shards it runs, its ticker.

    ``serves`` and ``job_id`` limit what it leases. ``listen`` is called with each model that has work.
    ``schedules`` and ``webhooks`` are looked at every ``tick_seconds``, expired ``files`` less often, if they are given.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        dispatcher: Dispatcher,
        *,
        serves: Serves = ANYTHING,
        job_id: str | None = None,
        listen: Callable[[str], None] = lambda _model: None,
        schedules: ScheduleRunner | None = None,
        webhooks: WebhookSender | None = None,
        files: FileSweeper | None = None,
    ) -> None:
        self.id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.draining = threading.Event()
        self._settings = settings
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._serves = serves
        self._near: tuple[str, int] | None = None
        self._stays_until = 0.0
        self._job_id = job_id
        self._reference = ReferenceHost(self._start_reference)
        self.health = device_health.DeviceHealth(lambda: device_health.probe_device(settings.device or "auto"))
        """Whether the device can be trusted; no shard is leased while it cannot."""
        self._host = EngineHost(self._start_engine, on_close=self._book_idle, on_failure=self.health.note)
        self._lock = threading.Lock()
        self._num_busy = 0
        self._runners: dict[int, ShardRunner] = {}
        self._idle = threading.Condition(self._lock)
        self._reported_at = 0.0
        self._was_well = True
        self.ticker = Ticker(
            ledger,
            dispatcher,
            seconds=settings.tick_seconds,
            serves=serves,
            job_id=job_id,
            num_free=lambda: 0 if self.health.reason else settings.shards_in_flight - self._num_busy,
            listen=listen,
            on_tick=self._report,
        )
        looks = (
            ("schedules", schedules, settings.tick_seconds),
            ("webhooks", webhooks, settings.tick_seconds),
            ("expired files", files, SWEEP_SECONDS),
        )
        self._clocks = [Clock(look, name=name, seconds=seconds) for name, look, seconds in looks if look is not None]

    def start(self) -> None:
        """Register and begin to tick."""
        self._register()
        self._forget_the_dead()
        self.ticker.start()
        for clock in self._clocks:
            clock.start()

    @property
    def uncommitted(self) -> tuple[int, int]:
        """Rows that are finished and not committed, and their generated tokens."""
        checkpoints = [runner.checkpoint for runner in list(self._runners.values())]
        pending = [(c.num_rows, c.completion_tokens) for c in checkpoints if c is not None]
        return sum(rows for rows, _ in pending), sum(tokens for _, tokens in pending)

    @property
    def generated_tokens(self) -> int:
        """Tokens that the engine has generated, of unfinished rows too; begins anew with a new engine."""
        return int(self._host.stats().get("completion_tokens", 0))

    def engine_stats(self) -> dict[str, Any]:
        """The engine's counters as it sent them last; empty without one."""
        return self._host.stats()

    # -- what tasks call ----------------------------------------------------------------------------------------------
    def plan_jobs(self) -> None:
        """Plan jobs while there are any."""
        seconds = self._settings.lease_seconds
        while not self.draining.is_set():
            lease = self._ledger.lease_planning(self.id, job_id=self._job_id, lease_seconds=seconds)
            if lease is None:
                return
            with suppress(FencedError), bound(job=lease.job.id), self._span("plan", lease.job):
                roots = roots_of(self._ledger, self._settings, lease.job)
                job = run_planning(self._ledger, lease, worker_id=self.id, lease_seconds=seconds, roots=roots)
                _log.info("job %s is %s with %s rows in %s shards", job.id, job.state, job.num_rows, job.num_shards)
            self.ticker.nudge()

    def run_shards(self) -> None:
        """Run shards while there are any and a place is free."""
        with self._place() as has_place:
            while has_place and not self.draining.is_set() and self.health.reason is None:
                lease = self._ledger.lease_shard(
                    self.id,
                    offer=self._offer(),
                    lease_seconds=self._settings.lease_seconds,
                )
                if lease is None:
                    return
                self._near = (lease.job.id, lease.shard.index)
                self._run(lease)

    def finalize_jobs(self) -> None:
        """Finish jobs while there are any."""
        seconds = self._settings.lease_seconds
        while not self.draining.is_set():
            lease = self._ledger.lease_finalizing(self.id, job_id=self._job_id, lease_seconds=seconds)
            if lease is None:
                return
            with suppress(FencedError), bound(job=lease.job.id), self._span("finalize", lease.job):
                roots = roots_of(self._ledger, self._settings, lease.job)
                job = run_finalizing(self._ledger, lease, lease_seconds=seconds, roots=roots)
                _log.info("job %s is %s", job.id, job.state)

    # -- stopping -----------------------------------------------------------------------------------------------------
    def drain(self) -> None:
        """Begin to stop: running shards commit what is finished and give the rest back. Returns at once."""
        self.draining.set()

    def close(self) -> None:
        """Stop for good: wait for running shards, end the engine, say goodbye."""
        self.drain()
        for clock in self._clocks:
            clock.close()
        with self._idle:
            if not self._idle.wait_for(lambda: self._num_busy == 0, timeout=DRAIN_SECONDS):
                _log.warning("%s shards did not stop in %s seconds; their leases expire", self._num_busy, DRAIN_SECONDS)
        self.ticker.close()
        self._host.close()
        self._reference.close()
        with _logged("could not say goodbye to the database"):
            self._ledger.drop_worker(self.id)

    # -- how ----------------------------------------------------------------------------------------------------------
    @contextmanager
    def _place(self) -> Iterator[bool]:
        """One of the places for running shards, if one is free."""
        with self._lock:
            has_place = self._num_busy < self._settings.shards_in_flight
            self._num_busy += has_place
        try:
            yield has_place
        finally:
            with self._idle:
                self._num_busy -= has_place
                self._idle.notify_all()

    def _offer(self) -> Offer:
        """What this worker may lease now, and what it would rather lease.

        For :data:`NEAR_SECONDS` at a time it stays with the job and the model that it has; then the fair order decides
        again. While other shards use the engine, another model would have to wait for all of them.
        """
        model, now = self._host.model, time.monotonic()
        is_staying = now < self._stays_until
        if not is_staying:
            self._stays_until = now + NEAR_SECONDS
        models = self._serves.models
        if model is not None and len(self._runners) and self._host.loaded_seconds <= MODEL_SECONDS:
            models = (model,)
        return Offer(
            models=models,
            needs=self._serves.needs,
            loaded=(model,) if model is not None and is_staying else (),
            near=self._near if is_staying else None,
            job_id=self._job_id,
        )

    def _run(self, lease: Lease) -> None:
        runner = ShardRunner(self._ledger, self._host, self._settings, lease, self.draining, reference=self._reference)
        self._runners[lease.attempt_id] = runner
        try:
            ids: dict[str, Any] = {"shard": lease.shard.index, "attempt": lease.attempt_id}
            with bound(job=lease.job.id, **ids), self._span("attempt", lease.job, mode=lease.mode, **ids):
                job = runner.run()
        finally:
            del self._runners[lease.attempt_id]
        if job is not None and job.state is JobState.FINALIZING:
            self._dispatcher.wake_finalizer(job.id)

    def _span(self, name: str, job: JobRecord, **attributes: Any) -> AbstractContextManager[None]:
        return tracing.span(name, job.traceparent, job=job.id, model=job.model, worker=self.id, **attributes)

    def _start_engine(self, config: EngineConfig, is_cancelled: Callable[[], bool]) -> EngineProcess:
        _log.info("loading %s", config.model)
        return self._start(self._settings.engine_factory, config, is_cancelled)

    def _start_reference(self, config: EngineConfig) -> EngineProcess:
        _log.info("loading %s and its reference", config.model)
        return self._start(self._settings.reference_factory, config, self.draining.is_set)

    def _start(self, factory: str, config: EngineConfig, is_cancelled: Callable[[], bool]) -> EngineProcess:
        settings = self._settings
        return EngineProcess(
            factory,
            config,
            is_cancelled,
            stall_seconds=settings.stall_seconds,
            load_timeout_seconds=settings.load_seconds,
        )

    def _book_idle(self, engine_id: str, idle_ns: int) -> None:
        """Device time between shards belongs to no job."""
        with _logged("could not book the engine's idle time"):
            nanos = DeviceMeter(self._ledger.worker_price(self.id)).charge(idle_ns)
            self._ledger.add_overhead(
                None, f"engine:{engine_id}:idle", kind="idle", device_ns=idle_ns, nanos=nanos, worker_id=self.id
            )

    def _register(self) -> None:
        self._ledger.register_worker(
            self.id,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            nanos_per_hour=self._settings.nanos_per_hour,
            device=self._settings.device or "auto",
            version=__version__,
            serves=replace(self._serves, job_id=self._job_id),
        )

    def _forget_the_dead(self) -> None:
        """Drop workers that were killed long ago, so that the list does not grow with every one."""
        long_ago = datetime.now(UTC) - FORGET_AFTER
        for worker in self._ledger.list_workers():
            if worker.last_seen_at < long_ago:
                self._ledger.drop_worker(worker.id)

    def _report(self) -> None:
        """Tell the database every few seconds that this worker lives and what it does."""
        self.health.look()
        has_changed = (self.health.reason is None) != self._was_well
        if not has_changed and time.monotonic() - self._reported_at < REPORT_SECONDS:
            return
        self._was_well = self.health.reason is None
        self._reported_at = time.monotonic()
        self._reference.close_idle()
        loaded = self._host.model
        stats = {"busy": self._num_busy, "uncommitted_rows": self.uncommitted[0], "engine": self._host.stats()}
        if (fault := self.health.fault) is not None:
            stats["device_fault"] = fault
        try:
            self._ledger.worker_heartbeat(self.id, models=[loaded] if loaded else [], stats=stats)
        except NotFoundError:
            self._register()


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Go on without something that is good to have."""
    try:
        yield
    except Exception:  # noqa: BLE001 -- nothing that stands behind this may keep a worker from stopping
        _log.warning(what, exc_info=True)
