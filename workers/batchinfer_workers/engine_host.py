"""The worker's one engine: started when a shard needs it, shared by shards, replaced when it dies or another is due."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchinfer.engine.model_identity import model_stamp
from batchinfer.errors import EngineError
from batchinfer_workers.engine_session import EngineSession, by_session

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchinfer.engine.config import EngineConfig
    from batchinfer.engine.process import EngineProcess
    from batchinfer.engine.stats import EngineStats

POLL_SECONDS = 0.2
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Running:
    """An engine that runs."""

    config: EngineConfig
    process: EngineProcess
    model_stamp: str | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    sessions: dict[int, EngineSession] = field(default_factory=dict)
    first_stats: dict[str, EngineStats] = field(default_factory=dict)
    is_exclusive: bool = False
    is_load_billed: bool = False
    is_closing: bool = False
    steps: int = 0
    attributed_ns: int = 0
    started: float = field(default_factory=time.monotonic)

    def share_of_unfinished(self, session: EngineSession) -> int:
        """Device time of a session's unfinished rows, by their share in all unfinished rows of the engine."""
        if session.number not in self.sessions or not session.num_outstanding:
            return 0
        total = sum(other.num_outstanding for other in list(self.sessions.values()))
        return int(self.process.stats().get("unfinished_device_ns", 0)) * session.num_outstanding // max(1, total)


@dataclass(eq=False)
class _Loading:
    """An engine that is being loaded."""

    config: EngineConfig
    model_stamp: str | None = None
    is_done: bool = False
    error: Exception | None = None


class EngineHost:
    """Gives sessions on one engine process at a time, in the order they were asked for.

    ``start(config, is_cancelled)`` makes the process and returns when the model is loaded, or raises when it is cancelled.
    ``on_close`` is told an engine's id and its idle time in nanoseconds: its life after loading, less what its sessions
    were charged. ``on_failure`` is told what ended an engine, or kept it from loading, before its sessions are.
    """

    def __init__(
        self,
        start: Callable[[EngineConfig, Callable[[], bool]], EngineProcess],
        *,
        on_close: Callable[[str, int], None] | None = None,
        on_failure: Callable[[Exception], None] | None = None,
    ) -> None:
        self._start = start
        self._on_failure = on_failure or (lambda _error: None)
        self._on_close = on_close or (lambda _id, _ns: None)
        self._changed = threading.Condition()
        self._waiting: list[object] = []
        self._engine: _Running | None = None
        self._loading: _Loading | None = None
        self._is_closed = False
        self._numbers = itertools.count(1)

    @property
    def model(self) -> str | None:
        """Model of the engine that is loaded, if one is."""
        engine = self._engine
        return engine.config.model if engine else None

    @property
    def loaded_seconds(self) -> float:
        """How long the engine has been there; 0 without one."""
        engine = self._engine
        return time.monotonic() - engine.started if engine else 0.0

    def stats(self) -> dict[str, int]:
        """The engine's counters; empty without one."""
        engine = self._engine
        return dict(engine.process.stats()) if engine else {}

    def acquire(
        self, config: EngineConfig, *, is_cancelled: Callable[[], bool], exclusive: bool = False
    ) -> EngineSession | None:
        """Wait for an engine of this configuration, alone in it if ``exclusive``; None once ``is_cancelled``.

        Raises:
            ModelError: the model cannot be loaded.
            EngineError: the engine died while loading.
        """
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                while not self._may_enter(ticket, config, exclusive):
                    if self._is_closed or is_cancelled():
                        return None
                    self._changed.wait(POLL_SECONDS)
                engine = self._load(config, is_cancelled)
                return self._open(engine, exclusive) if engine else None
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def release(self, session: EngineSession) -> None:
        """Give a session back; what it has outstanding is aborted."""
        used_ns = session.metered_ns
        with suppress(EngineError):
            session.abort()
        with self._changed:
            engine = self._engine
            if engine and engine.sessions.pop(session.number, None):
                engine.attributed_ns += used_ns
                engine.is_exclusive = False
            self._changed.notify_all()

    def close(self) -> None:
        """End the engine, soon also one that is being loaded. Sessions still open find it gone."""
        with self._changed:
            self._is_closed = True
            engine, self._engine = self._engine, None
            self._changed.notify_all()
        if engine:
            self._retire(engine, EngineError("the worker is stopping"))

    def _may_enter(self, ticket: object, config: EngineConfig, exclusive: bool) -> bool:
        if self._is_closed or self._waiting[0] is not ticket:
            return False
        engine = self._engine
        if engine is None or not engine.sessions:
            return True
        return engine.config == config and not exclusive and not engine.is_exclusive

    def _load(self, config: EngineConfig, is_cancelled: Callable[[], bool]) -> _Running | None:
        """The engine of this configuration, loaded if need be. The lock is held, but not while loading."""
        while not self._is_closed:
            if self._engine and self._engine.config == config:
                return self._engine
            if self._loading is None:
                self._loading = _Loading(config)
                threading.Thread(
                    target=self._run_loader, args=(self._loading,), name="engine-loader", daemon=True
                ).start()
            loading = self._loading
            while not loading.is_done:
                if is_cancelled() or self._is_closed:
                    return None
                self._changed.wait(POLL_SECONDS)
            if loading.error and loading.config == config:
                raise loading.error
        return None

    def _run_loader(self, loading: _Loading) -> None:
        old, self._engine = self._engine, None
        try:
            if old:
                self._retire(old, EngineError("the engine was replaced"))
            loading.model_stamp = model_stamp(loading.config.model)
            process = self._start(loading.config, lambda: self._is_closed)
            # a hub model may have come with the loading
            loading.model_stamp = loading.model_stamp or model_stamp(loading.config.model)
        except Exception as error:  # noqa: BLE001 -- raised again by the shard that waits for the engine
            if not self._is_closed:
                self._on_failure(error)
            self._end_loading(loading, None, error)
        else:
            self._end_loading(loading, process, None)

    def _end_loading(self, loading: _Loading, process: EngineProcess | None, error: Exception | None) -> None:
        with self._changed:
            loading.is_done, loading.error, self._loading = True, error, None
            is_wanted = process is not None and not self._is_closed
            if process is not None and is_wanted:
                self._engine = _Running(loading.config, process, loading.model_stamp)
                threading.Thread(target=self._pump, args=(self._engine,), name="engine-pump", daemon=True).start()
            self._changed.notify_all()
        if process is not None and not is_wanted:
            process.close()

    def _open(self, engine: _Running, exclusive: bool) -> EngineSession:
        session = EngineSession(
            next(self._numbers),
            engine.process,
            share_of_unfinished=engine.share_of_unfinished,
            first_stats=engine.first_stats,
        )
        session.engine_id, session.model_stamp = engine.id, engine.model_stamp
        if not engine.is_load_billed:
            engine.is_load_billed, session.load_ns = True, engine.process.load_ns
        engine.sessions[session.number] = session
        engine.is_exclusive = exclusive
        return session

    def _pump(self, engine: _Running) -> None:
        """Thread of one engine: carry completions to their sessions until the engine ends."""
        try:
            while not engine.is_closing:
                completions = engine.process.poll(POLL_SECONDS)
                self._note_progress(engine, bool(completions))
                for number, group in by_session(completions).items():
                    if session := engine.sessions.get(number):
                        session.deliver(group)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the engine is of no more use
            if not engine.is_closing:
                self._bury(engine, error)

    def _note_progress(self, engine: _Running, has_completions: bool) -> None:
        steps = int(engine.process.stats().get("steps", 0))
        if has_completions or steps != engine.steps:
            engine.steps = steps
            for session in list(engine.sessions.values()):
                session.progress += 1

    def _bury(self, engine: _Running, error: Exception) -> None:
        _log.warning("engine %s of %s ended: %s", engine.id, engine.config.model, error)
        self._on_failure(error)
        with self._changed:
            if self._engine is engine:
                self._engine = None
            self._changed.notify_all()
        reason = error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
        self._retire(engine, reason)

    def _retire(self, engine: _Running, reason: EngineError) -> None:
        engine.is_closing = True
        for session in engine.sessions.values():
            engine.attributed_ns += session.metered_ns
            session.break_off(reason)
        life_ns = int((time.monotonic() - engine.started) * 1e9)
        engine.process.close()
        self._on_close(engine.id, max(0, life_ns - engine.attributed_ns))
