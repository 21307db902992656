"""How long a call takes on a device: events around it, a cold cache before it, the median of many."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

WARM_UP = 3
SLEEP_CYCLES = 1_000_000
"""About half a millisecond in which the host queues a call's launches: what it needs for them is not the kernel's time."""
LEAST_RUNS, MOST_RUNS = 10, 100
FLUSHED = 4
"""Times the L2 cache that are written before each run."""


class Stopwatch:
    """Measures calls on one GPU."""

    def __init__(self, device: torch.device, *, seconds: float = 0.15) -> None:
        """``seconds`` are for the runs of one call, flushes not counted."""
        self._device = device
        self._seconds = seconds
        size = FLUSHED * getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 1 << 26)
        self._flushed = torch.empty(max(size, 1 << 28), dtype=torch.int8, device=device)

    def seconds(self, run: Callable[[], object]) -> float:
        """The median time of a call."""
        for _ in range(WARM_UP):
            run()
        first = statistics.median(self._time(run, LEAST_RUNS))
        more = int(min(MOST_RUNS, self._seconds / max(first, 1e-9))) - LEAST_RUNS
        return first if more <= 0 else statistics.median(self._time(run, LEAST_RUNS + more))

    def _time(self, run: Callable[[], object], count: int) -> list[float]:
        pairs: list[tuple[Any, Any]] = []
        for _ in range(count):
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._flushed.zero_()
            torch.cuda._sleep(SLEEP_CYCLES)  # noqa: SLF001 -- torch has no other way to keep a stream busy
            pair[0].record()
            run()
            pair[1].record()
            pairs.append(pair)
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def copy_bandwidth(device: torch.device, watch: Stopwatch) -> float:
    """Bytes a second that a large copy reads and writes: what is left of the data sheet's figure in practice."""
    size = 1 << 30
    source, target = (torch.zeros(size, dtype=torch.int8, device=device) for _ in range(2))
    return 2 * size / watch.seconds(lambda: target.copy_(source))
