"""A shard's share of the engine: its requests go in, its completions come out."""

from __future__ import annotations

import queue
import time
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from batchinfer.engine.stats import EngineStats
from batchinfer.errors import EngineError
from batchinfer.types import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from batchinfer.engine.process import EngineProcess
    from batchinfer.types import Completion, SampleProgress

MAX_JOBS = 256
"""Jobs of one engine whose beginnings are remembered."""


_ALL_BUT_ID = attrgetter(*[field.name for field in fields(Request) if field.name != "request_id"])


class EngineSession:
    """What one shard has in the engine. Used by the shard's thread; fed by the host's.

    Request ids carry the session's number, since shards of several jobs share the engine and row indexes repeat.
    ``share_of_unfinished`` gives the device time, in nanoseconds, of rows that have not ended yet.
    """

    def __init__(
        self,
        number: int,
        process: EngineProcess,
        *,
        share_of_unfinished: Callable[[EngineSession], int],
        first_stats: dict[str, EngineStats] | None = None,
    ) -> None:
        """``first_stats`` are the engine's counters when it began on each of its jobs; all its sessions share them."""
        self.number = number
        self._first_stats = {} if first_stats is None else first_stats
        self.load_ns = 0
        """Time the engine took to load, if it was loaded for this session, else 0."""
        self.model_stamp: str | None = None
        """Stamp of the model's files when the engine loaded them."""
        self.engine_id = ""
        """Unique name of the engine's process."""
        self.progress = 0
        """Grows while the engine makes steps."""
        self._process = process
        self._share_of_unfinished = share_of_unfinished
        self._outstanding: set[str] = set()
        self._inbox: queue.SimpleQueue[list[Completion] | EngineError] = queue.SimpleQueue()
        self._error: EngineError | None = None
        self._finished_ns = 0

    @property
    def num_outstanding(self) -> int:
        """Requests without a completion so far."""
        return len(self._outstanding)

    @property
    def is_waiting(self) -> bool:
        """Whether it is the engine's turn: it has rows, and nothing of it waits to be collected."""
        return bool(self._outstanding) and self._inbox.empty()

    @property
    def metered_ns(self) -> int:
        """Device time of this session's rows, finished or not, in nanoseconds."""
        return self._finished_ns + self._share_of_unfinished(self)

    def begin(self, job_id: str) -> None:
        """Say for which job this is: :meth:`report` counts from the first session that did."""
        if job_id not in self._first_stats:
            while len(self._first_stats) >= MAX_JOBS:
                self._first_stats.pop(next(iter(self._first_stats)), None)
            self._first_stats[job_id] = EngineStats.from_dict(self._process.stats())

    def report(self, job_id: str) -> dict[str, Any]:
        """How well the engine was used since it began on a job, what it did for others meanwhile included."""
        now = EngineStats.from_dict(self._process.stats())
        return now.since(self._first_stats.get(job_id, EngineStats())).report()

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand rows to the engine.

        Raises:
            EngineError: the engine is gone.
        """
        if self._error is not None:
            raise self._error
        named = [_rename(request, f"{self.number}:{request.request_id}") for request in requests]
        self._outstanding.update(request.request_id for request in named)
        self._process.submit(named)

    def poll(self, timeout: float) -> list[Completion]:
        """Completions that have arrived (see :func:`row_of`); waits at most ``timeout`` seconds for the first.

        Raises:
            EngineError: the engine is gone, and every completion it gave has been returned.
        """
        found: list[Completion] = []
        deadline = time.monotonic() + timeout
        while self._error is None:
            try:
                item = self._inbox.get(timeout=0 if found else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(item, list):
                found += item
            else:
                self._error = item
        if self._error is not None and not found:
            raise self._error
        return [self._receive(completion) for completion in found]

    def progress_of_rows(self, timeout: float) -> dict[int, tuple[SampleProgress, ...]]:
        """How far this session's unfinished rows are, by row index; empty if the engine does not say in time."""
        if self._error is not None or not self._outstanding:
            return {}
        try:
            found = self._process.progress(timeout)
        except EngineError:
            return {}
        return {
            int(request_id.partition(":")[2]): samples
            for request_id, samples in found.items()
            if request_id in self._outstanding
        }

    def engine_stats(self) -> dict[str, Any]:
        """The engine's latest statistics."""
        return self._process.stats()

    def deliver(self, completions: list[Completion]) -> None:
        """Called by the host: completions of this session."""
        self._inbox.put(completions)

    def break_off(self, error: EngineError) -> None:
        """Called by the host: the engine is gone."""
        self._inbox.put(error)

    def abort(self) -> None:
        """Give up on everything outstanding."""
        outstanding, self._outstanding = self._outstanding, set()
        if outstanding and self._error is None:
            self._process.abort(outstanding)

    def _receive(self, completion: Completion) -> Completion:
        self._outstanding.discard(completion.request_id)
        self._finished_ns += completion.device_ns
        return completion


def _rename(request: Request, request_id: str) -> Request:
    # several times as fast as dataclasses.replace, once a row
    return Request(request_id, *_ALL_BUT_ID(request))


def row_of(completion: Completion) -> int:
    """Row index of a completion that a session returned."""
    return int(completion.request_id.partition(":")[2])


def by_session(completions: Iterable[Completion]) -> dict[int, list[Completion]]:
    """Sort completions into sessions by the number in their ids."""
    found: dict[int, list[Completion]] = {}
    for completion in completions:
        found.setdefault(int(completion.request_id.partition(":")[0]), []).append(completion)
    return found
