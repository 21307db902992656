"""A job's chart figures, summed at most every few seconds however many people look."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from batchinfer.jobs.history import Bucket

LEAST_SECONDS = 4.0
"""A sum serves for at least this long."""
SHARE = 20
"""And for this many times as long as it took: a job with 100,000 parts costs at most a twentieth of a core."""
MAX_KEPT = 256
"""Jobs whose sums are kept; the one that was looked at longest ago goes first."""


@dataclass(slots=True)
class _Kept:
    until: float = -math.inf
    series: Sequence[Bucket] = ()
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the sum is worked out."""


class KeptSeries:
    """Keeps sums until they are too old. Thread-safe; who asks for a sum that is being worked out waits for that one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[[], Sequence[Bucket]]) -> Sequence[Bucket]:
        """What is kept under the key, or else what ``compute`` returns."""
        with self._lock:
            kept = self._kept.setdefault(key, _Kept())
            self._kept.move_to_end(key)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        with kept.lock:
            began = self._clock()
            if began >= kept.until:
                kept.series = compute()
                now = self._clock()
                kept.until = now + max(LEAST_SECONDS, SHARE * (now - began))
            return kept.series
