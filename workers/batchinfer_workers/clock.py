"""Threads beside the ticker's, for looks that wait for others: listing an input in a slow store, sending a webhook."""

from __future__ import annotations

import logging
import random
import threading
from functools import partial
from typing import TYPE_CHECKING, Protocol

from batchinfer.jobs.file_sweeper import FileSweeper
from batchinfer.jobs.schedule_firing import Firing
from batchinfer.jobs.schedule_runner import ScheduleRunner
from batchinfer.jobs.webhook_queue import WebhookQueue
from batchinfer.jobs.webhook_sender import WebhookSender
from batchinfer_workers.roots import roots_of_tenant

if TYPE_CHECKING:
    from batchinfer.jobs.dispatch import Dispatcher
    from batchinfer.jobs.service import JobService
    from batchinfer.settings import Settings

SWEEP_SECONDS = 30.0
"""Time between two looks at the files whose time is over."""
_log = logging.getLogger(__name__)


def schedule_runner(service: JobService, settings: Settings, dispatcher: Dispatcher) -> ScheduleRunner:
    """What looks after the schedules of a service's database, each tenant's within its roots."""
    ledger = service.ledger
    return ScheduleRunner(
        Firing(service.engine), ledger, dispatcher, roots_of=partial(roots_of_tenant, ledger, settings)
    )


def webhook_sender(service: JobService, settings: Settings) -> WebhookSender:
    """What sends the webhooks of a service's database."""
    return WebhookSender(WebhookQueue(service.engine), allowed=settings.allowed_networks)


def file_sweeper(service: JobService) -> FileSweeper:
    """What removes expired files of a service's database."""
    return FileSweeper(service.ledger)


class Ticked(Protocol):
    """What a clock calls."""

    def tick(self) -> object:
        """Look once."""
        ...


class Clock:
    """Calls the runner's ``tick`` about every ``seconds`` until it is closed."""

    def __init__(self, runner: Ticked, *, name: str, seconds: float) -> None:
        self._runner = runner
        self._seconds = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and wait for a look that is under way."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._runner.tick()
            except Exception:  # noqa: BLE001 -- a database that is away raises its driver's own errors
                _log.warning("looking at the %s failed; trying again", self._thread.name, exc_info=True)
            # jittered, so that the clocks of many workers do not meet
            self._ended.wait(self._seconds * random.uniform(0.75, 1.25))  # noqa: S311 -- no secret
