"""What to do when a step raises: find the row at fault, or the size that fits, and lose nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from batchinfer.engine.device_faults import DeviceFault, fault_of, first_sentence, free_device_memory
from batchinfer.errors import DeviceUnhealthyError, EngineError
from batchinfer.types import ErrorCode, RowError

if TYPE_CHECKING:
    from collections.abc import Collection

    from batchinfer.engine.scheduler import Scheduler, SchedulerOutput
    from batchinfer.engine.sequence import Sequence

MAX_CONDEMNED = 8
"""So many rows failing alone, with no step succeeding in between, are not to blame: the engine is."""

GROW_STEPS, MOST_GROW_STEPS = 64, 4096
"""Steps that must pass at a smaller size before twice the size is tried again. Each time that it then fails, twice as many."""
_log = logging.getLogger(__name__)


class Recovery:
    """Remembers, across steps, which sequences are under suspicion.

    A failed step is rolled back by the scheduler. Then its sequences run again in halves, until the one that fails
    alone is found. Out of memory halves the token budget, and with it the sequences, instead; when enough steps have
    passed, the size comes back by and by: what took the memory may be gone.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._size = _StepSize(scheduler)
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
        self._size.on_success()

    def on_failure(self, output: SchedulerOutput, error: Exception) -> tuple[Sequence, RowError] | None:
        """A step failed and was rolled back. Returns the sequence that is to end, and with what, if it is found.

        Raises:
            DeviceUnhealthyError: the device is not well; no row is to blame.
            EngineError: the engine is broken, whichever rows it is given.
        """
        fault = fault_of(error)
        if fault is DeviceFault.UNHEALTHY:
            raise DeviceUnhealthyError(f"the device is not well: {first_sentence(error)}") from error
        if fault is DeviceFault.POISONED:
            raise EngineError(f"the device failed: {first_sentence(error)}") from error
        if fault is DeviceFault.OUT_OF_MEMORY:
            free_device_memory(error)
            if output.num_tokens > 1:
                self._size.shrink(output.num_tokens // 2, error)
                return None
            self._size.restore()  # this row took it, alone: the others need not go on one token at a time
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
        if fault is DeviceFault.OUT_OF_MEMORY:
            return sequences[0], RowError(
                ErrorCode.OUT_OF_MEMORY,
                f"the row alone, a token at a time, is more than the memory left beside weights and KV cache: "
                f"{first_sentence(error)}; shorten it, or give the worker a smaller KV cache or a larger device",
            )
        return sequences[0], RowError(ErrorCode.ENGINE_ERROR, f"{type(error).__name__}: {error}")


class _StepSize:
    """The token budget and the number of sequences of a step: as configured, or smaller while memory is short."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._configured = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
        self._num_passed = 0
        self._patience = GROW_STEPS

    def shrink(self, tokens: int, error: BaseException) -> None:
        """Make steps as small as ``tokens``."""
        if self._num_passed:  # it had been this small and grown: be slower to try again
            self._patience = min(2 * self._patience, MOST_GROW_STEPS)
        self._num_passed = 0
        self._set(tokens)
        _log.warning("%s: steps compute at most %s tokens from now on", first_sentence(error), tokens)

    def restore(self) -> None:
        """Make steps as large as configured."""
        self._num_passed = 0
        self._set(self._configured[0])

    def on_success(self) -> None:
        """A step passed; enough of them, and the size is doubled."""
        now = self._scheduler.max_num_batched_tokens
        if now >= self._configured[0]:
            return
        self._num_passed += 1
        if self._num_passed % self._patience == 0:
            self._set(2 * now)

    def _set(self, tokens: int) -> None:
        most_tokens, most_seqs = self._configured
        self._scheduler.max_num_batched_tokens = min(tokens, most_tokens)
        self._scheduler.max_num_seqs = min(tokens, most_seqs)
