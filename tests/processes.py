"""The ``batchinfer`` program as a process of its own, as people start it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = [sys.executable, "-c", "from batchinfer.cli.main import main; main()"]
DEADLINE_S = 60.0


class Process:
    """A running command. Stdout and stderr are pipes that are read as they fill; use it as a context manager."""

    def __init__(self, *args: object, **settings: object) -> None:
        environment = {
            **os.environ,
            # the program of this checkout, whatever is installed
            "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("", "kernels", "workers")),
            "BATCHINFER_ENGINE_FACTORY": "tests.fakes:create_engine",
            **{f"BATCHINFER_{name}".upper(): str(value) for name, value in settings.items()},
        }
        self.args = args
        self._changed = threading.Condition()
        self._lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._popen = subprocess.Popen(
            [*PROGRAM, *map(str, args)], cwd=ROOT, env=environment, text=True, encoding="utf-8",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._readers = [
            threading.Thread(target=self._read, args=(name, getattr(self._popen, name)), daemon=True)
            for name in self._lines
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, stream: object) -> None:
        for line in stream:
            with self._changed:
                self._lines[name].append(line)
                self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_args: object) -> None:
        if self._popen.poll() is None:
            os.killpg(self._popen.pid, signal.SIGKILL)
        self.wait()

    @property
    def stdout(self) -> str:
        return "".join(self._lines["stdout"])

    @property
    def stderr(self) -> str:
        return "".join(self._lines["stderr"])

    def wait_for(self, is_seen: Callable[[str], bool], name: str = "stderr") -> str:
        """Wait for a line that ``is_seen`` accepts; return it."""

        def found() -> str | None:
            return next((line for line in self._lines[name] if is_seen(line)), None)

        with self._changed:
            assert self._changed.wait_for(found, DEADLINE_S), f"{self.args}: {self.stdout}{self.stderr}"
            return str(found())

    def send(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def wait(self) -> int:
        """Wait for the end; return the exit code."""
        code = self._popen.wait(DEADLINE_S)
        for reader in self._readers:
            reader.join(DEADLINE_S)
        for stream in (self._popen.stdout, self._popen.stderr):
            stream.close()
        return code


def run_process(*args: object, exit_code: int = 0, **settings: object) -> Process:
    """Run a command to its end."""
    with Process(*args, **settings) as process:
        code = process.wait()
    assert code == exit_code, f"{args}: exit code {code}\n{process.stdout}\n{process.stderr}"
    return process
