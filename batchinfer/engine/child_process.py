"""A child process that messages go to and come from: its pipes, its output, its end."""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

from batchinfer.engine.wire import read_message, write_message
from batchinfer.errors import EngineDiedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# the parent's import path, as `multiprocessing` hands it on; -c because the path must be set before the import
_BOOT = "import sys; sys.path[:] = {path!r}; from {module} import main; main({read}, {write})"
_TAIL_LINES = 8
_TAIL_CHARACTERS = 1500
_LAST_OUTPUT_SECONDS = 1.0
SPIN_COUNT = "2000"
"""How often an idle OpenMP thread looks for work before it sleeps. With the default of some milliseconds two threads
are ruinous as soon as another process takes a core: a decode step took 1,001 ms instead of 142 (medians, loaded machine);
on a quiet one both gave the same tokens a second, while sleeping at once (a passive wait policy) cost 40 %."""
_log = logging.getLogger(__name__)


class ChildProcess:
    """A Python process started afresh (nothing of the parent's memory), in a session of its own unless it is told.

    It runs ``main`` of ``module``. ``on_message`` is called with each message, ``on_end`` once after the last; both from a thread of this object.

    Raises:
        EngineDiedError: the process cannot be started.
    """

    def __init__(
        self,
        on_message: Callable[[dict[str, Any]], None],
        on_end: Callable[[], None],
        *,
        module: str = "batchinfer.engine.process_child",
        has_own_session: bool = True,
    ) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._has_own_session = has_own_session
        self._outbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        child_reads, parent_writes = os.pipe()
        parent_reads, child_writes = os.pipe()
        try:
            self._process = _spawn(module, child_reads, child_writes, has_own_session=has_own_session)
        except OSError as error:
            os.close(parent_writes)
            os.close(parent_reads)
            raise EngineDiedError(f"the engine process cannot be started: {error}") from error
        finally:
            os.close(child_reads)
            os.close(child_writes)
        assert self._process.stdout is not None
        self._output_thread = threading.Thread(target=self._follow_output, args=(self._process.stdout,), daemon=True)
        self._threads = [
            threading.Thread(target=self._send, args=(os.fdopen(parent_writes, "wb"),), daemon=True),
            threading.Thread(target=self._receive, args=(os.fdopen(parent_reads, "rb"),), daemon=True),
            self._output_thread,
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended: a signal is negative; None while it runs."""
        return self._process.poll()

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message; never blocks, and is silent if the child is gone."""
        self._outbox.put(message)

    def wait(self, timeout: float) -> bool:
        """Wait for the end; False if ``timeout`` seconds were not enough."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End the process at once, and all that it started if the session is its own."""
        with suppress(ProcessLookupError, PermissionError):
            if self._has_own_session:
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kill what still runs and end the threads. May be called twice."""
        self.kill()
        self._outbox.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_LAST_OUTPUT_SECONDS)

    def describe_end(self) -> str:
        """How the process ended and what it said last. It must have ended."""
        self._output_thread.join(_LAST_OUTPUT_SECONDS)
        code = self._process.returncode
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        if code == -signal.SIGKILL:
            how += " (the kernel, for want of memory, or a person)"
        last = " | ".join(self._tail)[-_TAIL_CHARACTERS:]
        return f"{how}; its last output: {last}" if last else how

    def _send(self, pipe: IO[bytes]) -> None:
        with suppress(OSError), pipe:
            while (message := self._outbox.get()) is not None:
                write_message(pipe, message)

    def _receive(self, pipe: IO[bytes]) -> None:
        with pipe:
            while (message := read_message(pipe.read)) is not None:
                self._on_message(message)
        self._on_end()

    def _follow_output(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                if text := line.decode(errors="replace").rstrip():
                    self._tail.append(text)
                    _log.info("engine process %d: %s", self._process.pid, text)


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The parent's environment, with a short spin unless a person chose how OpenMP waits."""
    chosen = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environment.keys()
    return dict(environment) if chosen else {**environment, "GOMP_SPINCOUNT": SPIN_COUNT}


def _spawn(module: str, read_fd: int, write_fd: int, *, has_own_session: bool) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 -- our own interpreter and our own code
        [sys.executable, "-c", _BOOT.format(path=sys.path, module=module, read=read_fd, write=write_fd)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(read_fd, write_fd),
        env=child_environment(os.environ),
        # Ctrl-C in a terminal goes to the whole foreground group; and a group can be killed as one
        start_new_session=has_own_session,
    )
