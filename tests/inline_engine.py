"""The real engine behind the face of an engine process, in threads of the test: workers that load in no time."""

import threading
import time
from dataclasses import replace

from batchinfer.engine.engine import create_engine

_LOADING = threading.Lock()
"""Loading changes transformers' global state for a moment."""


class InlineEngine:
    """What :class:`~batchinfer.engine.process.EngineProcess` is to a worker; ``poll`` steps.

    ``changes`` are fields of the engine's config that the worker has no setting for. ``on_load`` is called once it is
    loaded, ``on_step`` after each step that computed something, with the number of steps so far.
    """

    pid = 0
    load_ns = 1

    def __init__(self, config, *, changes, on_load, on_step):
        with _LOADING:
            self._engine = create_engine(replace(config, **changes))
        self._lock = threading.Lock()
        self._num_steps = 0
        self._on_step = on_step
        self._is_closed = False
        on_load()

    def submit(self, requests):
        with self._lock:
            for request in requests:
                self._engine.add_request(request)

    def abort(self, request_ids):
        with self._lock:
            for request_id in request_ids:
                self._engine.abort(request_id)

    def progress(self, _timeout):
        with self._lock:
            return self._engine.progress()

    def poll(self, timeout):
        with self._lock:
            has_work = self._engine.has_unfinished() and not self._is_closed
            done = self._engine.step() if has_work else []
        if has_work:
            self._num_steps += 1
            self._on_step(self._num_steps)
        else:
            time.sleep(min(timeout, 0.005))
        return done

    def stats(self):
        return self._engine.stats().to_dict()

    def close(self, _timeout=0):
        self._is_closed = True
