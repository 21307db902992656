"""What to do when a step raises: find the row at fault, or the size that fits, and lose nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchinfer.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Collection

    from batchinfer.engine.scheduler import Scheduler, SchedulerOutput
    from batchinfer.engine.sequence import Sequence

MAX_CONDEMNED = 8
"""So many rows failing alone, with no step succeeding in between, are not to blame: the engine is."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller step might pass."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def is_fatal(error: BaseException) -> bool:
    """Whether the device is unusable from now on: after a fault, CUDA refuses everything until the process ends."""
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)


class Recovery:
    """Remembers, across steps, which sequences are under suspicion.

    A failed step is rolled back by the scheduler. Then its sequences run again in halves, until the one that fails
    alone is found; out of memory halves the token budget instead, for good.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._suspects: list[set[Sequence]] = []
        self._num_condemned = 0

    @property
    def is_searching(self) -> bool:
        """Whether sequences are under suspicion: steps must then pass one by one."""
        return bool(self._suspects)

    def next_group(self) -> Collection[Sequence] | None:
        """The sequences the next step is restricted to; None is no restriction."""
        alive = {*self._scheduler.running, *self._scheduler.waiting} if self._suspects else set()
        while self._suspects:
            if group := self._suspects[-1] & alive:
                return group
            self._suspects.pop()
        return None

    def clear(self) -> None:
        """Suspect nobody."""
        self._suspects.clear()

    def on_success(self) -> None:
        """A step passed: its sequences are cleared, and so is the engine."""
        if self._suspects:
            self._suspects.pop()
        self._num_condemned = 0

    def on_failure(self, output: SchedulerOutput, error: Exception) -> Sequence | None:
        """A step failed and was rolled back. Returns the sequence that is to end with an error, if one is found.

        Raises:
            EngineError: the engine is broken, whichever rows it is given.
        """
        if is_fatal(error):
            raise EngineError(f"the device failed: {error}") from error
        if is_out_of_memory(error) and output.num_tokens > 1:
            self._scheduler.max_num_batched_tokens = output.num_tokens // 2
            return None
        sequences = [part.sequence for part in output.scheduled]
        if self._suspects:
            self._suspects.pop()
        if len(sequences) > 1:
            half = len(sequences) // 2
            self._suspects += [set(sequences[half:]), set(sequences[:half])]
            return None
        self._num_condemned += 1
        if self._num_condemned >= MAX_CONDEMNED:
            raise EngineError(
                f"{self._num_condemned} rows in succession failed, each alone; the last: {error}"
            ) from error
        return sequences[0]
