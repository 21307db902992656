"""Which device this is: its name, its driver, and its row in the table of data sheets."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from batchinfer.engine.devices import find_device

if TYPE_CHECKING:
    from batchinfer.engine.devices import Device

PACKAGES = ("batchinfer", "torch", "triton", "transformers")
QUERY = "driver_version,clocks.max.sm,clocks.max.mem,power.limit,ecc.mode.current,mig.mode.current"
NAMES = (
    # what PyTorch calls them, and the row of the table; parts on a PCIe card have other figures than on SXM
    (r"A100-SXM\d-80GB", "a100"),
    (r"H100 80GB HBM3", "h100"),
    (r"H200(?! NVL)", "h200"),
    (r"L40S", "l40s"),
    (r"RTX 4090(?! (D|Laptop))", "rtx4090"),
    (r"RTX 5090(?! (D|Laptop))", "rtx5090"),
    (r"\bB200", "b200"),
    (r"MI300X", "mi300x"),
)


def known_device(name: str) -> Device | None:
    """The data sheet of a device that PyTorch calls so; None if the table has none, or only a part of it is here (MIG)."""
    if "MIG" in name:
        return None
    for pattern, row in NAMES:
        if re.search(pattern, name):
            return find_device(row)
    return None


def hardware(device: torch.device) -> dict[str, Any]:
    """Hardware and versions, for the head of a results file."""
    about: dict[str, Any] = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "host": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "device": "cpu, Triton's interpreter",
    }
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        about |= {
            "device": found.name,
            "memory_bytes": found.total_memory,
            "multiprocessors": found.multi_processor_count,
            "capability": f"{found.major}.{found.minor}",
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            **_driver(f"GPU-{found.uuid}" if hasattr(found, "uuid") else str(device.index or 0)),
        }
    return about


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # a checkout that is not installed
        return "checkout" if name == "batchinfer" else "missing"


def _driver(which: str) -> dict[str, str]:
    """What the driver's own tool says; nothing where there is none."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--id={which}", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    values = [value.strip() for value in ended.stdout.strip().split(",")]
    names = QUERY.split(",")
    return dict(zip(names, values, strict=True)) if ended.returncode == 0 and len(values) == len(names) else {}
