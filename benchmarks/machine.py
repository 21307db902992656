"""What a figure must name to mean anything: hardware, versions, and what else the machine did meanwhile."""

from __future__ import annotations

import os
import platform
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable

PROC = Path("/proc")
QUIET_PERCENT = 5.0
"""Above this share of the machine taken by others a run counts as disturbed."""


def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    for line in (PROC / "cpuinfo").read_text().splitlines() if (PROC / "cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    """Hardware and versions, for the head of a results file."""
    names = ("batchinfer", "torch", "transformers")
    return {
        "cpu": cpu_model(),
        "cores": num_cores(),
        "memory_mb": psutil.virtual_memory().total >> 20,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def tree(pid: int) -> list[psutil.Process]:
    """A process and all its descendants that are alive."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def tree_cpu_seconds(pid: int) -> float:
    """CPU time of a process and its descendants; a child that ended counts once its parent has waited for it."""
    total = 0.0
    for process in tree(pid):
        try:
            times = process.cpu_times()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def machine_cpu_seconds() -> float:
    """CPU time of the whole machine that was not idle, of all cores together."""
    times = psutil.cpu_times()
    # guests are within user and nice; steal is time that neighbours of a virtual machine took
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def high_water_mb(pid: int) -> int:
    """Most memory a process and its living descendants ever held, each one's own peak added up."""
    return sum(_peak_kb(process.pid) for process in tree(pid)) // 1024


def _peak_kb(pid: int) -> int:
    try:
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile, or this is no Linux
        pass
    return 0


class OthersLoad:
    """The share of the machine that processes outside one process tree took while a block ran.

    Use as a context manager; ``percent`` is of all cores. The clocks are arguments so that the arithmetic can be
    tested.
    """

    def __init__(
        self,
        pid: int,
        *,
        cores: int | None = None,
        wall: Callable[[], float] = time.monotonic,
        busy: Callable[[], float] = machine_cpu_seconds,
        own: Callable[[int], float] = tree_cpu_seconds,
    ) -> None:
        self.percent = 0.0
        self._pid = pid
        self._cores = cores or psutil.cpu_count() or 1
        self._clocks = (wall, busy, own)

    def __enter__(self) -> Self:
        self._start = self._read()
        return self

    def __exit__(self, *_error: object) -> None:
        wall, busy, own = (after - before for before, after in zip(self._start, self._read(), strict=True))
        # the counters tick in hundredths of a second, so a short block can come out slightly below zero
        self.percent = round(100 * min(1.0, max(0.0, (busy - own) / max(wall * self._cores, 1e-9))), 1)

    def _read(self) -> tuple[float, float, float]:
        wall, busy, own = self._clocks
        return wall(), busy(), own(self._pid)
