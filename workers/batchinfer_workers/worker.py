"""``batchinfer worker``: work until told to stop."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import TYPE_CHECKING

from batchinfer.jobs.dispatch import connect_dispatcher
from batchinfer.jobs.service import JobService
from batchinfer_workers.clock import SWEEP_SECONDS, Clock, file_sweeper, schedule_runner, webhook_sender
from batchinfer_workers.controller import CeleryThread
from batchinfer_workers.node import DRAIN_SECONDS
from batchinfer_workers.ticker import Ticker

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from batchinfer.settings import Settings

LAST_RESORT_SECONDS = DRAIN_SECONDS + 10
"""A planner or finalizer at work on a huge input is not waited for longer: its lease expires, another one does it."""
WATCH_SECONDS = 1.0
_log = logging.getLogger(__name__)


def run_worker(settings: Settings, *, models: Sequence[str] | None = None, ticker_only: bool = False) -> int:
    """Work on shards of these models (None: any) until SIGTERM or SIGINT; return the exit code.

    The first signal drains: finished rows are committed, the rest of each shard goes back at once. A second one ends
    the process on the spot; leases then expire by themselves. ``ticker_only`` runs no shards: it keeps leases,
    deadlines, schedules and wake-ups going while no worker is up. Call it in the main thread.

    Raises:
        UserError: the database is not there or not up to date.
    """
    # asked here, so that a person sees the sentence and not a thread's traceback
    service = JobService.connect(settings.sqlalchemy_url, settings.broker_url)
    stop = _StopSignals()
    try:
        if ticker_only:
            return _tick(service, settings, stop)
        return _work(CeleryThread(settings, models=models), stop)
    finally:
        service.close()


def _work(worker: CeleryThread, stop: _StopSignals) -> int:
    worker.start()
    while worker.is_alive and not stop.event.wait(WATCH_SECONDS):
        pass
    if not worker.stop(LAST_RESORT_SECONDS):
        os._exit(os.EX_OK)
    return worker.exit_code


def _tick(service: JobService, settings: Settings, stop: _StopSignals) -> int:
    dispatcher = connect_dispatcher(settings.broker_url)
    schedules = schedule_runner(service, settings, dispatcher)
    tickers = (
        Ticker(service.ledger, dispatcher, seconds=settings.tick_seconds),
        Clock(schedules, name="schedules", seconds=settings.tick_seconds),
        Clock(webhook_sender(service, settings), name="webhooks", seconds=settings.tick_seconds),
        Clock(file_sweeper(service), name="expired files", seconds=SWEEP_SECONDS),
    )
    for ticker in tickers:
        ticker.start()
    stop.event.wait()
    for ticker in tickers:
        ticker.close()
    return os.EX_OK


class _StopSignals:
    """First SIGTERM or SIGINT: ``event`` is set. Second: the process ends at once."""

    def __init__(self) -> None:
        self.event = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.event.is_set():
            os._exit(128 + number)
        _log.warning("%s: committing finished rows and giving the rest back", signal.Signals(number).name)
        self.event.set()
