"""The ticker: looks at the database every second, so that nothing depends on a message or a worker staying alive."""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import TYPE_CHECKING

from batchinfer.jobs.serving import Serves

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchinfer.jobs.dispatch import Dispatcher
    from batchinfer.jobs.ledger import Ledger

DEADLINE_SECONDS = 5.0
"""Time between two looks at the jobs that have a deadline."""
ANYTHING = Serves()
_log = logging.getLogger(__name__)


class Ticker:
    """Ends expired leases, closes jobs past their deadline, and wakes planners, shards and finalizers.

    Any number of workers may tick at once: each step is a compare-and-set in the ledger, and a superfluous message
    finds nothing to do. ``serves`` and ``job_id`` limit which shards are woken. ``num_free`` says how many more shards this worker could take; ``listen`` is called with each
    model that has work, so that the worker consumes its queue; ``on_tick`` ends each tick.
    """

    def __init__(
        self,
        ledger: Ledger,
        dispatcher: Dispatcher,
        *,
        seconds: float,
        serves: Serves = ANYTHING,
        job_id: str | None = None,
        num_free: Callable[[], int] = lambda: 1,
        listen: Callable[[str], None] = lambda _model: None,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._seconds = seconds
        self._serves = serves
        self._job_id = job_id
        self._num_free = num_free
        self._listen = listen
        self._on_tick = on_tick
        self._is_ended = False
        self._deadlines_at = 0.0
        self._nudged = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)

    def start(self) -> None:
        """Begin to tick."""
        self._thread.start()

    def nudge(self) -> None:
        """Tick now: something has just changed."""
        self._nudged.set()

    def close(self) -> None:
        """Stop, and wait for a tick that is under way."""
        self._is_ended = True
        self._nudged.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def tick(self) -> None:
        """Look once."""
        for attempt in self._ledger.reap_expired():
            _log.warning("attempt %s of job %s lost its lease", attempt.id, attempt.job_id)
        self._ledger.expire_due()
        self._ledger.hold_overspent()
        if time.monotonic() >= self._deadlines_at:
            self._deadlines_at = time.monotonic() + DEADLINE_SECONDS
            self._ledger.watch_deadlines()
        plans, finals = self._ledger.pending_control()
        if plans:
            self._dispatcher.wake_planner("")
        if finals:
            self._dispatcher.wake_finalizer("")
        self._wake_shards()
        self._on_tick()

    def _wake_shards(self) -> None:
        for lane in self._ledger.pending_lanes(self._job_id):
            is_mine = self._job_id is not None or self._serves.can_serve(lane.model, lane.needs)
            if not is_mine and not lane.is_for_everyone:
                continue
            self._listen(lane.model)
            if (free := self._num_free()) > 0:
                self._dispatcher.wake_shards(lane.model, min(lane.count, free))

    def _run(self) -> None:
        while not self._is_ended:
            try:
                self.tick()
            except Exception:  # noqa: BLE001 -- a database that is away raises its driver's own errors
                _log.warning("a tick failed; trying again", exc_info=True)
            # jittered, so that the tickers of many workers do not meet
            self._nudged.wait(self._seconds * random.uniform(0.75, 1.25))  # noqa: S311 -- no secret
            self._nudged.clear()
