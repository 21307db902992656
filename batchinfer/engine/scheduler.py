"""Chooses what each step computes, so that the pool is full, never over-full, and every step gets somewhere."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchinfer.engine.admission import Demand, peak_blocks
from batchinfer.engine.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from batchinfer.engine.block_pool import BlockPool
    from batchinfer.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a sequence was, to go back there."""

    num_computed_tokens: int
    num_cached_tokens: int
    table_length: int

    @classmethod
    def of(cls, sequence: Sequence) -> Progress:
        """Where a sequence is now."""
        return cls(sequence.num_computed_tokens, sequence.num_cached_tokens, len(sequence.block_table))


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A sequence's part in a step: tokens ``start .. start + num_new_tokens``, and what a failed step must undo."""

    sequence: Sequence
    start: int
    num_new_tokens: int
    samples: bool
    """Whether its last token's logits are wanted: all tokens known so far are then computed."""
    is_admission: bool
    before: Progress
    offered: list[int]
    """Blocks that this step fills, offered for sharing from now on."""


@dataclass(slots=True)
class SchedulerOutput:
    """What a step computes. ``stuck`` cannot run, though it has the pool for itself: it must end with an error."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    num_tokens: int = 0
    has_prefill: bool = False
    stuck: Sequence | None = None


def most_remaining(sequence: Sequence) -> int:
    """The careful estimate of what a sequence will still generate: all it may. Then nothing is ever preempted."""
    return sequence.num_remaining_tokens


class Scheduler:
    """Decode tokens of all running sequences first, then prefill chunks, then admissions, within the token budget.

    - A chunk ends on a block boundary unless it ends the prompt or the budget is smaller than that.
    - A block filled in a step is offered for sharing at once: attention writes before it reads, so the next sequence
      of the same step may use it.
    - First come, first served: the head of the queue waits until it fits, and nothing overtakes it.
    - ``estimate_remaining`` may guess low; then the pool can run full, and the sequence that is cheapest to compute
      again is evicted, never the oldest, which therefore always ends.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
        estimate_remaining: Callable[[Sequence], int] = most_remaining,
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._prefixes = PrefixCache(pool, is_enabled=enable_prefix_caching)
        self._estimate_remaining = estimate_remaining

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; the caller has checked that it fits the pool when it is alone."""
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence, *, keep_prefix: bool = True) -> None:
        """Forget a sequence, waiting or running, and free its blocks; ``keep_prefix`` lets others find them still."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        if not keep_prefix:
            for block in sequence.block_table:
                self.pool.forget(block)
        self._release(sequence)

    def schedule(self, only: Collection[Sequence] | None = None) -> SchedulerOutput:
        """Choose the next step's work, among ``only`` these sequences if given.

        Allocates blocks; the step is then ended by :meth:`commit` or :meth:`rollback`.
        """
        output = SchedulerOutput()
        num_preemptions = self.num_preemptions
        for sequence in sorted(self.running, key=lambda s: (s.num_uncomputed_tokens > 1, s.arrival)):
            if (only is None or sequence in only) and sequence in self.running:
                self._schedule_running(sequence, output)
        if num_preemptions == self.num_preemptions:
            self._admit(output, only)
        if not output.scheduled:
            output.stuck = min((*self.running, *self.waiting), key=lambda s: s.arrival, default=None)
        return output

    def commit(self, output: SchedulerOutput) -> None:
        """The step ran: its tokens are computed."""
        for part in output.scheduled:
            part.sequence.num_computed_tokens = part.start + part.num_new_tokens

    def rollback(self, output: SchedulerOutput) -> None:
        """The step failed: everything is as before it. Later parts may hold blocks of earlier ones, so they go first."""
        for part in reversed(output.scheduled):
            for block in part.offered:
                self.pool.forget(block)
            self._restore(part.sequence, part.before)
            if part.is_admission:
                self.running.remove(part.sequence)
                self.waiting.appendleft(part.sequence)

    def _schedule_running(self, sequence: Sequence, output: SchedulerOutput) -> None:
        """Give a running sequence its next tokens, evicting others for blocks if need be."""
        before = Progress.of(sequence)
        if sequence.num_uncomputed_tokens > 1:
            self._prefixes.take(sequence)
        while (num_new := self._chunk(sequence, output)) == 0 and self._lacks_block(sequence, output):
            victim = self._victim(output)
            if victim is None:
                break
            self._preempt(victim)
            if victim is sequence:
                return
        if num_new:
            self._append(sequence, num_new, before, output, is_admission=False)
        else:  # blocks just taken may be those of this very step: out of it, they must not be held
            self._restore(sequence, before)

    def _admit(self, output: SchedulerOutput, only: Collection[Sequence] | None) -> None:
        """Start waiting sequences, in order, while they fit."""
        most = min(self.max_num_seqs, self.max_num_batched_tokens)
        while self.waiting and len(self.running) < most and output.num_tokens < self.max_num_batched_tokens:
            sequence = self.waiting[0]
            if (only is not None and sequence not in only) or not self._fits(sequence):
                return
            before = Progress.of(sequence)
            self._prefixes.take(sequence)
            if (num_new := self._chunk(sequence, output)) == 0:
                self._restore(sequence, before)
                return
            self.waiting.popleft()
            self.running.append(sequence)
            self._append(sequence, num_new, before, output, is_admission=True)

    def _chunk(self, sequence: Sequence, output: SchedulerOutput) -> int:
        """Tokens to compute now: as many as budget and free blocks allow; a part of a prompt ends with a block."""
        size = self.pool.block_size
        room = (len(sequence.block_table) + self.pool.num_free) * size - sequence.num_computed_tokens
        wanted = sequence.num_uncomputed_tokens
        most = min(wanted, self.max_num_batched_tokens - output.num_tokens, room)
        if most >= wanted:
            return wanted
        aligned = (sequence.num_computed_tokens + most) // size * size - sequence.num_computed_tokens
        if aligned > 0:
            return aligned
        return 0 if output.has_prefill else most

    def _append(
        self, sequence: Sequence, num_new: int, before: Progress, output: SchedulerOutput, *, is_admission: bool
    ) -> None:
        """Put tokens into the step: allocate their blocks, offer those that they fill."""
        start = sequence.num_computed_tokens
        end = start + num_new
        while len(sequence.block_table) < self.pool.num_blocks_for(end):
            sequence.block_table.append(self.pool.allocate())
        offered = self._prefixes.offer(sequence, start, end)
        samples = end == sequence.num_tokens
        output.scheduled.append(ScheduledSequence(sequence, start, num_new, samples, is_admission, before, offered))
        output.num_tokens += num_new
        output.has_prefill |= not samples or num_new > 1

    def _lacks_block(self, sequence: Sequence, output: SchedulerOutput) -> bool:
        """Whether nothing but a missing block keeps a sequence from running."""
        has_slot = sequence.num_computed_tokens < len(sequence.block_table) * self.pool.block_size
        has_budget = output.num_tokens < self.max_num_batched_tokens
        return has_budget and not has_slot and self.pool.num_free == 0

    def _victim(self, output: SchedulerOutput) -> Sequence | None:
        """The cheapest to compute again among those not in this step, but never the oldest."""
        busy = {part.sequence for part in output.scheduled}
        oldest = min(self.running, key=lambda s: s.arrival)
        candidates = [s for s in self.running if s is not oldest and s not in busy]
        return min(candidates, key=lambda s: (s.num_computed_tokens, -s.arrival), default=None)

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; it keeps its tokens, and its place by age."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        place = next((i for i, other in enumerate(self.waiting) if other.arrival > sequence.arrival), len(self.waiting))
        self.waiting.insert(place, sequence)

    def _restore(self, sequence: Sequence, before: Progress) -> None:
        self.pool.release(sequence.block_table[before.table_length :])
        del sequence.block_table[before.table_length :]
        sequence.num_computed_tokens = before.num_computed_tokens
        sequence.num_cached_tokens = before.num_cached_tokens

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table.clear()
        sequence.num_computed_tokens = 0

    def _fits(self, candidate: Sequence) -> bool:
        """Whether the candidate and all running sequences can end without a preemption, by the estimate."""
        sequences = [*self.running, candidate]
        if sum(self.pool.num_blocks_for(s.max_kv_tokens) for s in sequences) <= self.pool.num_blocks:
            return True
        return peak_blocks(self._demands(sequences), self.pool.block_size) <= self.pool.num_blocks

    def _demands(self, sequences: list[Sequence]) -> list[Demand]:
        """Demands, longest-lived first: a shared block is counted for the one that frees it last."""
        prefill = sum(s.num_uncomputed_tokens for s in sequences if s.num_uncomputed_tokens > 1)
        a_step = max(1, self.max_num_batched_tokens - len(sequences) - self.pool.block_size + 1)
        delay = -(-prefill // a_step)
        ends = [(self._estimate_remaining(s) + (delay if s.num_uncomputed_tokens > 1 else 0), s) for s in sequences]
        demands = []
        seen: set[int] = set()
        for end, sequence in sorted(ends, key=lambda pair: -pair[0]):
            held = sequence.block_table or self._prefixes.find(sequence)
            remaining = self._estimate_remaining(sequence)
            demands.append(Demand(sequence.num_tokens, remaining, end - remaining, len(seen.intersection(held))))
            seen.update(held)
        return demands
