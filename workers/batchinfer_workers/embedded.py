"""``batchinfer run``: a worker inside this process, for one job, until it has ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchinfer.errors import DeviceUnhealthyError
from batchinfer.jobs.service import JobService
from batchinfer.jobs.status import HELD
from batchinfer_workers.controller import CeleryThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchinfer.jobs.ledger import Ledger
    from batchinfer.jobs.records import JobRecord
    from batchinfer.settings import Settings

POLL_SECONDS = 0.25
"""Time between two looks at the job when it is young, ..."""
SLOW_POLL_SECONDS = 1.0
"""... and when it is so old that nobody minds: each look takes time from the engine, which has the same cores."""
POLL_SHARE = 0.025
"""Between these, the time between two looks is this share of the job's age."""
ILL_SECONDS = 600.0
"""How long a device may fail its probes until nobody waits for it any more."""
SPEED_SECONDS = 30.0
"""Speed is measured over this long: rows of a slow engine end in bursts."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is, rows that are not committed yet included."""

    job: JobRecord
    rows_done: int
    rows_total: int | None
    """None until the job is planned."""
    tokens: int
    """Generated tokens so far."""
    rows_per_second: float | None
    tokens_per_second: float | None
    eta_seconds: float | None
    cost_nanos: int
    """Committed cost: rows and overhead."""


def run_embedded(settings: Settings, job_id: str, on_progress: Callable[[Progress], None] | None = None) -> JobRecord:
    """Work on a job until it has ended or is held (paused, budget exhausted); return its record.

    Messages stay in this process. ``on_progress`` is called one to four times a second in the calling thread. The same job
    may be worked on by other workers at the same time.

    Raises:
        KeyboardInterrupt: after draining: finished rows are committed, and the job can be run on later.
        NotFoundError: no such job.
        DeviceUnhealthyError: the device failed, and has not come back for :data:`ILL_SECONDS`; finished rows are kept.
        RuntimeError: the worker ended by itself; the log says why.
    """
    service = JobService.connect(settings.sqlalchemy_url, "memory://")
    try:
        job = service.ledger.get_job(job_id)
        embedded = settings.model_copy(update={"broker_url": "memory://"})
        worker = CeleryThread(embedded, job_id=job_id, queues_of=[job.model])
        worker.start()
        try:
            _watch(service.ledger, worker, job_id, on_progress or (lambda _progress: None))
        finally:
            worker.stop()
        return service.ledger.get_job(job_id)
    finally:
        service.close()


def _watch(ledger: Ledger, worker: CeleryThread, job_id: str, on_progress: Callable[[Progress], None]) -> None:
    """Report until the job has ended or is held."""
    speed = _Speed()
    started = time.monotonic()
    while True:
        job = ledger.get_job(job_id)
        node = worker.node
        rows, tokens = node.uncommitted if node else (0, 0)
        on_progress(speed.measure(job, rows=rows, tokens=tokens, generated=node.generated_tokens if node else 0))
        if job.state.is_terminal or job.state in HELD:
            return
        if node and (ill := node.health.seconds_ill) > ILL_SECONDS:
            raise DeviceUnhealthyError(
                f"{node.health.reason}, for {ill / 60:.0f} minutes now; finished rows are kept, and job {job_id} goes on "
                "where `batchinfer run` or a worker has a device that works"
            )
        if not worker.is_alive:
            raise RuntimeError(f"the worker ended while job {job_id} is {job.state}; its log says why")
        time.sleep(poll_seconds(time.monotonic() - started))


def poll_seconds(age: float) -> float:
    """Time until the next look at a job that has run for ``age`` seconds."""
    return min(max(POLL_SECONDS, POLL_SHARE * age), SLOW_POLL_SECONDS)


class _Speed:
    """Speed over the last seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: list[tuple[float, int, int]] = []

    def measure(self, job: JobRecord, *, rows: int, tokens: int, generated: int) -> Progress:
        """Add what is not committed yet (``rows``, ``tokens``) to the job's counters, and compare with the past.

        ``generated`` counts the engine's tokens, of unfinished rows too; it begins anew with a new engine.
        """
        now = self._clock()
        rows_done, tokens = job.counts.total + rows, job.usage.completion_tokens + tokens
        if self._seen and generated < self._seen[-1][2]:
            self._seen = []
        self._seen = [*(seen for seen in self._seen if now - seen[0] <= SPEED_SECONDS), (now, rows_done, generated)]
        then, old_rows, old_generated = self._seen[0]
        seconds = now - then
        rows_per_second = (rows_done - old_rows) / seconds if seconds else None
        left = None if job.num_rows is None else job.num_rows - rows_done
        return Progress(
            job=job,
            rows_done=rows_done,
            rows_total=job.num_rows,
            tokens=tokens,
            rows_per_second=rows_per_second,
            tokens_per_second=(generated - old_generated) / seconds if seconds else None,
            eta_seconds=left / rows_per_second if rows_per_second and left is not None else None,
            cost_nanos=job.cost_nanos,
        )
