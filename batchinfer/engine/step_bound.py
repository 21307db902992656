"""The least time in which the device could have computed a step: what its work needs, over what was measured of it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from batchinfer.engine.roofline import Costs

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequence_

    from batchinfer.engine.devices import Device
    from batchinfer.engine.model_shape import ModelShape
    from batchinfer.engine.roofline import Precision
    from batchinfer.engine.scheduler import SchedulerOutput


class StepBound:
    """Counts a step's work and divides it by the device's ceilings, compute and memory hidden behind each other.

    Computed rows count, with wrong guesses and without padding. A block that several rows hold is read once.
    """

    def __init__(
        self, device: Device, shape: ModelShape, precision: Precision, windows: Sequence_[int | None] = (None,)
    ) -> None:
        """``windows`` are the tokens that each layer sees back; None: all."""
        self._costs = Costs(device, shape, precision)
        self._windows = [(window, number / len(windows)) for window, number in Counter(windows).items()]

    def nanoseconds(self, output: SchedulerOutput, held_tokens: int) -> int:
        """Of a step; the pool holds ``held_tokens`` tokens, shared ones once: no step reads more."""
        parts = [(part.start, part.num_new_tokens) for part in output.scheduled]
        sampled = sum(
            1 + len(part.guesses) for part in output.scheduled if part.samples and not part.sequence.is_prefill_only
        )
        pairs = read = 0.0
        for window, share in self._windows:
            pairs += share * sum(_pairs(start, count, window) for start, count in parts)
            read += share * min(held_tokens, sum(_read(start, count, window) for start, count in parts))
        phase = self._costs.phase(
            tokens=output.num_tokens, steps=1, sampled=sampled + output.num_scored, pairs=pairs, kv_read=read
        )
        return round(phase.overlap * 1e9)


def _pairs(start: int, count: int, window: int | None) -> int:
    """Pairs of a query at ``start .. start + count`` and a token that it sees, itself included."""
    whole = count if window is None else max(0, min(count, window - start))
    limited = 0 if window is None else (count - whole) * window
    return whole * start + whole * (whole + 1) // 2 + limited


def _read(start: int, count: int, window: int | None) -> int:
    """Tokens that at least one of the queries sees."""
    return start + count if window is None else min(start + count, window + count - 1)
