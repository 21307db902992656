"""What a figure must name to mean anything: hardware, versions, and what else the machine did meanwhile."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

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
