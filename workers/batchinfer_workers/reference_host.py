"""The worker's second engine, which holds answers against the reference precision: started when it is first needed."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from batchinfer.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from batchinfer.engine.config import EngineConfig
    from batchinfer.engine.process import EngineProcess
    from batchinfer.types import Completion, Request

WINDOW = 16
"""Rows that are handed over at a time."""
IDLE_SECONDS = 120.0
"""Both its models are in memory: it is let go after so long without a row."""
_POLL_SECONDS = 0.2


class ReferenceHost:
    """One reference engine at a time, used by one thread at a time. ``start`` returns when both models are loaded."""

    def __init__(self, start: Callable[[EngineConfig], EngineProcess]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._engine: EngineProcess | None = None
        self._config: EngineConfig | None = None
        self._used_at = 0.0
        self.unbilled_ns = 0
        """Loading time that no caller was told of yet, in nanoseconds."""

    def compare(
        self, config: EngineConfig, requests: Iterable[Request], *, check_stop: Callable[[], None] = lambda: None
    ) -> Iterator[Completion]:
        """Compare rows, a few at a time; ``check_stop`` raises to leave.

        Raises:
            ModelError: the model cannot be loaded.
            EngineError: the engine died; it is started again the next time.
        """
        source = iter(requests)
        with self._lock:
            try:
                engine = self._open(config)
                while batch := list(islice(source, WINDOW)):
                    engine.submit(batch)
                    left = len(batch)
                    while left:
                        check_stop()
                        found = engine.poll(_POLL_SECONDS)
                        left -= len(found)
                        yield from found
            except BaseException:  # also a caller who leaves: what is under way must not reach the next one
                self._close()
                raise
            self._used_at = time.monotonic()

    def close(self) -> None:
        """End the engine."""
        with self._lock:
            self._close()

    def close_idle(self) -> None:
        """End the engine if nobody has needed it for a while."""
        if self._engine is not None and self._lock.acquire(blocking=False):
            try:
                if time.monotonic() - self._used_at > IDLE_SECONDS:
                    self._close()
            finally:
                self._lock.release()

    def _open(self, config: EngineConfig) -> EngineProcess:
        if self._engine is None or self._config != config:
            self._close()
            self._engine, self._config = self._start(config), config
            self.unbilled_ns += self._engine.load_ns
        return self._engine

    def _close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            with suppress(EngineError):
                engine.close()
