"""Parts of the run in processes of their own: a fault of the device or a hang costs the case, not the run."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Message = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]


def launch(part: str, arguments: Sequence[str], silence: float, lifetime: float) -> Iterator[Message]:
    """Messages of a child that runs ``part``, the last one of type ``end`` with how it ended.

    It is killed when it says nothing for ``silence`` seconds, after ``lifetime`` seconds, and when the iterator is closed.
    """
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", "benchmarks.gpu", "--child", part, "--messages", str(write_fd), *arguments]
    # what libraries print goes beside the table, not into it
    child = subprocess.Popen(command, cwd=ROOT, pass_fds=(write_fd,), stdout=sys.stderr, start_new_session=True)
    os.close(write_fd)
    try:
        yield from _read(read_fd, silence, time.monotonic() + lifetime)
        yield {"type": "end", "how": _describe(child.wait(timeout=30))}
    except (TimeoutError, subprocess.TimeoutExpired):
        _kill(child)
        yield {"type": "end", "how": f"did not end within {min(silence, lifetime):.0f} s and was killed"}
    finally:
        _kill(child)
        os.close(read_fd)


def _read(read_fd: int, silence: float, latest: float) -> Iterator[Message]:
    buffer = bytearray()
    while True:
        if not select.select([read_fd], [], [], max(0.0, min(silence, left(latest))))[0]:
            raise TimeoutError
        chunk = os.read(read_fd, 1 << 16)
        if not chunk:
            return
        buffer += chunk
        *lines, rest = buffer.split(b"\n")
        buffer = bytearray(rest)
        yield from (json.loads(line) for line in lines)


def _describe(code: int) -> str:
    if code < 0:
        return f"ended with {signal.Signals(-code).name}"
    return "" if code == 0 else f"ended with exit code {code}"


def _kill(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def emit(write_fd: int, messages: Iterator[Message]) -> None:
    """Write messages where the parent reads them."""
    for message in messages:
        os.write(write_fd, json.dumps(message).encode() + b"\n")


def left(deadline: float) -> float:
    """Seconds until a deadline of ``time.monotonic``."""
    return deadline - time.monotonic()
