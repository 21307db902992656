"""What this machine's CPU reaches at most: matrix products and memory, measured once and kept."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from batchinfer.engine.devices import Device
from batchinfer.models.fused.linear import product_of
from batchinfer_kernels.cpu import get_ops
from batchinfer_kernels.cpu.build import source_version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SECONDS = 0.3
"""For each of the four measurements; the best of its runs counts, since others may use the machine."""
SIZE = 1024
"""Rows, columns and depth of the products."""
STREAMED = 1 << 26
"""Float32 values that are read: 256 MB, more than caches hold."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Operations a second in float32, bfloat16 and INT8, and bytes read a second."""

    fp32: float
    bf16: float
    int8: float
    bandwidth: float

    def as_device(self) -> Device:
        """As a device of the roofline."""
        memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        return Device(
            "cpu", self.bandwidth, memory, self.bf16, None, self.int8, None, None, self.bandwidth,
            f"measured on {cpu_model()} with {torch.get_num_threads()} threads", fp32=self.fp32,
        )  # fmt: skip


def machine_ceilings(cache_dir: Path, *, seconds: float = SECONDS) -> Ceilings:
    """The ceilings of this CPU with as many threads as torch has now; from ``cache_dir`` if they were measured before."""
    key = f"{cpu_model()}, {torch.get_num_threads()} threads, torch {torch.__version__}, kernels {source_version()}"
    path = cache_dir / "ceilings.json"
    known = _read(path)
    try:
        return Ceilings(**known[key])
    except (KeyError, TypeError):  # not yet measured, or written by another version
        found = measure(seconds)
    cache_dir.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f"{path.name}.{os.getpid()}")
    staged.write_text(json.dumps({**known, key: asdict(found)}, indent=1), encoding="utf-8")
    staged.replace(path)
    return found


def measure(seconds: float) -> Ceilings:
    """Measure; takes four times ``seconds``, or one run of each where that is longer."""
    single = torch.ones(SIZE, SIZE)
    half = single.to(torch.bfloat16)
    narrow = torch.ones(SIZE, SIZE, dtype=torch.int8)
    weights = narrow.t()
    own_half, own_narrow = product_of(get_ops(), half), product_of(get_ops(), narrow)
    # a product is as fast as the faster of two: torch's and, where there is one, the kernels' own
    half_ways = [lambda: functional.linear(half, half), *([] if own_half is None else [lambda: own_half(half)])]
    narrow_ways = [
        lambda: torch._int_mm(narrow, weights),  # noqa: SLF001 -- torch has no other
        *([] if own_narrow is None else [lambda: own_narrow(narrow)]),
    ]
    stream = torch.ones(STREAMED)
    # which of the two is nearer to the memory's speed depends on the build
    readers: tuple[Callable[[], object], ...] = (stream.sum, lambda: torch.dot(stream, stream))
    operations = 2 * SIZE**3
    return Ceilings(
        fp32=operations / _best(lambda: functional.linear(single, single), seconds),
        bf16=operations / _fastest(half_ways, seconds),
        int8=operations / _fastest(narrow_ways, seconds),
        bandwidth=4 * STREAMED / _fastest(readers, seconds),
    )


def _fastest(ways: Sequence[Callable[[], object]], seconds: float) -> float:
    """Seconds of the fastest of several ways, which share the time."""
    return min(_best(way, seconds / len(ways)) for way in ways)


def _best(run: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest run, the first one left out."""
    run()
    end = time.perf_counter() + seconds
    best = float("inf")
    while True:
        started = time.perf_counter()
        run()
        ended = time.perf_counter()
        best = min(best, ended - started)
        if ended >= end:
            return best


def _read(path: Path) -> dict[str, dict[str, float]]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8").splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
