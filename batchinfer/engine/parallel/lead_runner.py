"""Rank 0's runner: tells each step to the other ranks, and computes it with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchinfer.engine.parallel.step import write_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.engine.core import Runner
    from batchinfer.engine.head_output import HeadOutput
    from batchinfer.engine.parallel.ranks import Ranks
    from batchinfer.engine.scheduler import ScheduledSequence


class LeadRunner:
    """Implements :class:`~batchinfer.engine.core.Runner`."""

    def __init__(self, inner: Runner, ranks: Ranks) -> None:
        self._inner = inner
        self._ranks = ranks

    def execute(
        self,
        scheduled: Sequence[ScheduledSequence],
        kept: Sequence[int] = (),
        scored: Sequence[int] = (),
        hidden: Sequence[int] = (),
    ) -> HeadOutput:
        """See :meth:`~batchinfer.engine.core.Runner.execute`; ``hidden`` states are on every rank, so rank 0's do.

        Raises:
            EngineError: a rank ended, or the step failed.
        """
        with self._ranks.together():
            self._ranks.start_step(write_step(scheduled, kept, scored))
            return self._inner.execute(scheduled, kept, scored, hidden)
