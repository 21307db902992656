"""The engine in a child process: a crash, a hang or an out-of-memory kill costs the child only."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from batchinfer.engine.child_process import ChildProcess
from batchinfer.engine.wire import completion_from_json, progress_from_json, request_to_json
from batchinfer.errors import DeviceUnhealthyError, EngineDiedError, EngineError, EngineStalledError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from batchinfer.engine.config import EngineConfig
    from batchinfer.types import Completion, Request, SampleProgress

CLOSE_SECONDS = 5.0
CANCEL_SECONDS = 0.2
"""Time between two looks at whether anybody still waits for a model that loads."""
GRACE_SECONDS = 5.0
"""A stall is believed when it is seen twice, so long apart: a parent that was itself stopped reads its mail first."""


class EngineProcess:
    """An engine in a child process, spoken to in JSON over pipes. Thread-safe.

    ``factory`` is ``"module:callable"``; the child calls it with ``config`` and drives the returned engine (an
    :class:`~batchinfer.engine.protocol.EngineProtocol`). The constructor returns when the engine is loaded; it ends the
    child and raises soon after ``is_cancelled`` says so.

    Raises:
        UserError: what loading raised, such as a ModelError.
        EngineError: loading failed otherwise, was cancelled, or took longer than ``load_timeout_seconds``.
        EngineDiedError: the child ended while loading.
    """

    def __init__(
        self,
        factory: str,
        config: EngineConfig,
        is_cancelled: Callable[[], bool] = lambda: False,
        *,
        stall_seconds: float = 300.0,
        load_timeout_seconds: float = 3600.0,
    ) -> None:
        self._stall_seconds = stall_seconds
        self._lock = threading.RLock()
        self._unfinished: set[str] = set()
        self._inbox: queue.SimpleQueue[list[Completion]] = queue.SimpleQueue()
        self._stats: dict[str, Any] = {}
        self._asking = threading.Lock()
        self._has_answered = threading.Event()
        self._progress: dict[str, Any] = {}
        self._progress_at = 0.0
        self._suspected_at: float | None = None
        self._reported: dict[str, Any] | None = None
        self._failure: EngineError | None = None
        self._is_loaded = threading.Event()
        self._has_ended = threading.Event()
        started = time.monotonic_ns()
        self._child = ChildProcess(self._accept, self._note_end)
        self._child.send({"type": "start", "factory": factory, "config": config.to_json()})
        self._wait_until_loaded(load_timeout_seconds, is_cancelled)
        self._load_ns = time.monotonic_ns() - started

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    @property
    def load_ns(self) -> int:
        """Time from the start of the process until the engine was loaded, in nanoseconds."""
        return self._load_ns

    @property
    def num_unfinished(self) -> int:
        """Requests submitted whose completion has not been returned by :meth:`poll`."""
        return len(self._unfinished)

    def submit(self, requests: Iterable[Request]) -> None:
        """Hand requests to the child; never blocks on the engine, and leaves it to :meth:`poll` to say that it died.

        Raises:
            ValueError: a request id is that of an unfinished request.
            EngineError: the process is closed.
        """
        requests = list(requests)
        ids = {request.request_id for request in requests}
        with self._lock:
            self._check_open()
            if len(ids) < len(requests) or ids & self._unfinished:
                raise ValueError("a request id is used twice among unfinished requests")
            if not self._unfinished:
                self._note_progress()
            self._unfinished |= ids
            self._child.send({"type": "work", "submit": [request_to_json(request) for request in requests]})

    def abort(self, request_ids: Iterable[str]) -> None:
        """Stop requests: :meth:`poll` returns them as ``cancelled``, with what they cost, unless they have ended."""
        self._child.send({"type": "work", "abort": list(request_ids)})

    def progress(self, timeout: float) -> dict[str, tuple[SampleProgress, ...]]:
        """How far unfinished rows are (see ``EngineProtocol.progress``); empty if the child does not say in time."""
        with self._asking:
            self._has_answered.clear()
            self._child.send({"type": "work", "progress": True})
            if not self._has_answered.wait(timeout) or self._has_ended.is_set():
                return {}
            rows, self._progress = self._progress, {}
        return {request_id: progress_from_json(samples) for request_id, samples in rows.items()}

    def poll(self, timeout: float) -> list[Completion]:
        """Completions that have arrived, waiting at most ``timeout`` seconds for the first.

        Raises:
            EngineDiedError: the child ended; what had arrived before has been returned by earlier calls.
            DeviceUnhealthyError: the same, and its device is to blame.
            EngineStalledError: requests wait and the engine made no step for ``stall_seconds``; the child is killed.
            EngineError: the process is closed.
        """
        if found := self._take(timeout):
            return found
        with self._lock:
            self._check_open()
            if self._has_ended.is_set():
                # what came between the wait above and the end goes out first
                if found := self._take(0):
                    return found
                self._failure = self._death()
                raise self._failure
            self._check_progress()
        return []

    def stats(self) -> dict[str, Any]:
        """The engine's latest statistics (the fields of ``EngineStats``)."""
        return self._stats

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """End the child, waiting ``timeout`` seconds before it is killed. May be called twice."""
        with self._lock:
            self._failure = self._failure or EngineError("the engine process is closed")
        self._child.send({"type": "close"})
        self._child.wait(timeout)
        self._child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_until_loaded(self, timeout: float, is_cancelled: Callable[[], bool]) -> None:
        try:
            is_given_up = self._wait_for_report(timeout, is_cancelled)
            failure = EngineError("loading was given up") if is_given_up else self._load_failure(timeout)
        except BaseException:
            self._child.close()
            raise
        if failure is not None:
            self._child.close()
            raise failure

    def _wait_for_report(self, timeout: float, is_cancelled: Callable[[], bool]) -> bool:
        """Whether loading was cancelled before it ended and before ``timeout`` seconds had passed."""
        give_up_at = time.monotonic() + timeout
        while not self._is_loaded.wait(min(CANCEL_SECONDS, max(0.0, give_up_at - time.monotonic()))):
            if is_cancelled():
                return True
            if time.monotonic() >= give_up_at:
                return False
        return False

    def _load_failure(self, timeout: float) -> Exception | None:
        if not self._is_loaded.is_set():
            return EngineError(f"the engine did not load within {timeout:g} seconds")
        if not self._has_ended.is_set():
            return None
        report = self._reported
        if report is None or report["kind"] == DeviceUnhealthyError.__name__:
            return self._death()
        families: list[type[UserError]] = [UserError, *UserError.__subclasses__()]
        kinds = {kind.__name__: kind for kind in families}
        if kind := kinds.get(report["kind"]):
            return kind(report["message"], param=report["param"], code=report["code"])
        return EngineError(f"the engine could not be loaded: {report['message']}")

    def _death(self) -> EngineError:
        if not self._child.wait(GRACE_SECONDS):
            self._child.kill()
        if self._reported is not None and self._reported["kind"] == DeviceUnhealthyError.__name__:
            return DeviceUnhealthyError(self._reported["message"])
        if self._reported is not None:
            return EngineDiedError(f"the engine failed and ended: {self._reported['message']}")
        return EngineDiedError(f"the engine process {self.pid} ended with {self._child.describe_end()}")

    def _take(self, timeout: float) -> list[Completion]:
        """All that has arrived, waiting for the first only."""
        found: list[Completion] = []
        try:
            found += self._inbox.get(timeout=timeout)
            while True:
                found += self._inbox.get_nowait()
        except queue.Empty:
            pass
        with self._lock:
            self._unfinished.difference_update(completion.request_id for completion in found)
        return found

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _check_progress(self) -> None:
        now = time.monotonic()
        if not self._unfinished or now - self._progress_at < self._stall_seconds:
            self._suspected_at = None
            return
        self._suspected_at = self._suspected_at or now
        if now - self._suspected_at < min(GRACE_SECONDS, self._stall_seconds / 2):
            return
        self._child.kill()
        self._failure = EngineStalledError(
            f"the engine process {self.pid} made no step for {now - self._progress_at:.0f} seconds "
            f"with {len(self._unfinished)} requests unfinished; it was killed"
        )
        raise self._failure

    def _note_progress(self) -> None:
        self._progress_at = time.monotonic()

    def _note_end(self) -> None:
        self._has_ended.set()
        self._is_loaded.set()
        self._has_answered.set()
        self._inbox.put([])  # wakes a waiting poll

    def _accept(self, message: dict[str, Any]) -> None:
        """Take a message of the child; called from the receiving thread."""
        if message["type"] == "failed":
            self._reported = message
            return
        if message["type"] == "progress":
            self._progress = message["rows"]
            self._has_answered.set()
        stats, before = message["stats"], self._stats
        completions = [completion_from_json(data) for data in message.get("completions", ())]
        # a loop that computes nothing changes nothing but times
        if completions or any(stats[key] != before.get(key) for key in stats if not key.endswith("_ns")):
            self._note_progress()
        self._stats = stats
        if completions:
            self._inbox.put(completions)
        if message["type"] == "ready":
            self._is_loaded.set()
