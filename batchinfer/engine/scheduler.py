"""Chooses what each step computes, so that the pool is full, never over-full, and every step gets somewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from batchinfer.engine.admission import Forecast
from batchinfer.engine.prefix_cache import PrefixCache
from batchinfer.engine.seen_blocks import SeenBlocks
from batchinfer.engine.waiting import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from collections.abc import Sequence as Sequence_

    from batchinfer.engine.block_pool import BlockPool
    from batchinfer.engine.lengths import LengthHistory
    from batchinfer.engine.sequence import Sequence
    from batchinfer.engine.speculation import Speculator


RETRY_STEPS = 8
"""Steps until a sequence that did not fit is looked at again, unless something ends before."""
MAX_SCORED_TOKENS = 256
"""Prompt tokens a step whose logits are wanted: at most 150 MB of them, with a vocabulary of 150,000 in float32."""


class Progress(NamedTuple):
    """How far a sequence was, to go back there."""

    num_computed_tokens: int
    num_cached_tokens: int
    table_length: int

    @classmethod
    def of(cls, sequence: Sequence) -> Progress:
        """Where a sequence is now."""
        return cls(sequence.num_computed_tokens, sequence.num_cached_tokens, len(sequence.block_table))


class ScheduledSequence(NamedTuple):
    """A sequence's part in a step: tokens ``start .. start + num_new_tokens``, and what a failed step must undo."""

    sequence: Sequence
    start: int
    num_new_tokens: int
    samples: bool
    """Whether its last token's logits are wanted: all tokens known so far are then computed."""
    is_admission: bool
    before: Progress
    offered: Sequence_[int]
    """Blocks that this step fills, offered for sharing from now on."""
    guesses: Sequence_[int] = ()
    """The last of the step's tokens, which are not the sequence's own yet: each is sampled behind the one before it."""

    @property
    def is_next_guess_right(self) -> bool:
        """Whether the sequence's newest token is the guess that was computed for its place."""
        at = self.sequence.num_computed_tokens - self.start - 1
        return at < len(self.guesses) and self.sequence.token_ids[-1] == self.guesses[at]


@dataclass(slots=True)
class SchedulerOutput:
    """What a step computes. ``stuck`` cannot run, though it has the pool for itself: it must end with an error."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    num_tokens: int = 0
    num_scored: int = 0
    """Tokens of prompts whose log-probabilities are wanted."""
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
    - Who comes next is decided by :class:`~batchinfer.engine.waiting.WaitingQueue`; it waits until it fits, and
      nothing overtakes it meanwhile.
    - ``estimate_remaining`` may guess low (by default it is the ``history``'s, and careful without one); then the pool
      can run full, and the sequence that is cheapest to compute again is evicted, never the oldest, which therefore
      always ends.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
        history: LengthHistory | None = None,
        estimate_remaining: Callable[[Sequence], int] | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running: dict[Sequence, int] = {}
        """In the order of admission; with each the most blocks it can ever hold."""
        self.num_preemptions = 0
        self.num_misestimates = 0
        """Answers longer than the estimate with which they were let in."""
        self.num_ideal_cached_tokens = 0
        """Prompt tokens that a cache without end would have given to the sequences added so far."""
        self._ideal = SeenBlocks()
        self.held: Collection[Sequence] = frozenset()
        """Running sequences that are left out: the token that the device is sampling may be the last one they may have."""
        self.speculator = speculator
        """Guesses tokens of sequences that decode; nothing is guessed without."""
        self._history = history
        self._promised: dict[Sequence, int] = {}
        if estimate_remaining is None:
            estimate_remaining = history.remaining if history else most_remaining
        self._prefixes = PrefixCache(pool, is_enabled=enable_prefix_caching)
        self.estimate_remaining = estimate_remaining
        self.waiting = WaitingQueue(self._prefixes, max_num_seqs, estimate_remaining)
        self._refused: Sequence | None = None
        self._refused_for = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; the caller has checked that it fits the pool when it is alone."""
        self.waiting.add(sequence)
        self.num_ideal_cached_tokens += self._ideal.add(self._prefixes.shareable(sequence)) * self.pool.block_size

    def resume(self, sequence: Sequence) -> None:
        """Queue a sequence that goes on with what others have begun: it comes before new ones."""
        self.waiting.put_back(sequence)

    def finish(self, sequence: Sequence, *, keep_prefix: bool = True) -> None:
        """Forget a sequence, waiting or running, and free its blocks; ``keep_prefix`` lets others find them still."""
        if self.running.pop(sequence, None) is None:
            self.waiting.remove(sequence)
        if not keep_prefix:
            for block in sequence.block_table:
                self.pool.forget(block)
        self._promised.pop(sequence, None)
        self._release(sequence)

    def answered(self, sequence: Sequence) -> None:
        """A running sequence has come to the end of its answer: forget it, and learn from its length."""
        if sequence.num_output_tokens > self._promised.get(sequence, sequence.max_tokens):
            self.num_misestimates += 1
        if self._history is not None:
            self._history.observe(sequence)
        self.finish(sequence)

    def lengthened(self, sequence: Sequence) -> None:
        """A running sequence may have been given more tokens than it was let in with: look at what it can need."""
        if sequence in self.running:
            self.running[sequence] = self.pool.num_blocks_for(sequence.max_kv_tokens)

    def schedule(self, only: Collection[Sequence] | None = None) -> SchedulerOutput:
        """Choose the next step's work, among ``only`` these sequences if given.

        Allocates blocks; the step is then ended by :meth:`commit` or :meth:`rollback`.
        """
        output = SchedulerOutput()
        num_preemptions = self.num_preemptions
        chosen = [s for s in self.running if only is None or s in only]
        if self.held:
            chosen = [s for s in chosen if s not in self.held]
        num_guesses = self._num_guesses() if self.speculator is not None and only is None else 0
        for sequence in chosen:
            if sequence.num_computed_tokens == len(sequence.token_ids) - 1 and sequence in self.running:
                self._schedule_decode(sequence, output, num_guesses)
        for sequence in chosen:
            if sequence.num_computed_tokens < len(sequence.token_ids) - 1 and sequence in self.running:
                self._schedule_running(sequence, output)
        if num_preemptions == self.num_preemptions:
            self._admit(output, only)
        if not output.scheduled:
            output.stuck = min((*self.running, *self.waiting), key=lambda s: s.arrival, default=None)
        return output

    def commit(self, output: SchedulerOutput) -> None:
        """The step ran: its tokens are computed."""
        for part in output.scheduled:
            part.sequence.num_computed_tokens = part.start + part.num_new_tokens - len(part.guesses)

    def accept(self, part: ScheduledSequence) -> None:
        """Some of a part's guesses were right, and its sequence has them: the blocks they fill are offered."""
        self._prefixes.offer(part.sequence, part.start + 1, part.sequence.num_computed_tokens)

    def settle(self, output: SchedulerOutput) -> None:
        """Tokens that were not known when the step was scheduled are known: the blocks that they fill are offered."""
        size = self.pool.block_size
        for part in output.scheduled:
            if part.num_new_tokens == 1 and (part.start + 1) % size == 0:
                self._prefixes.offer(part.sequence, part.start, part.start + 1)

    def is_known(self, sequence: Sequence) -> bool:
        """Whether a sequence runs or waits: it has not ended."""
        return sequence in self.running or sequence in self.waiting

    def rollback(self, output: SchedulerOutput) -> None:
        """The step failed: everything is as before it. Later parts may hold blocks of earlier ones, so they go first."""
        for part in reversed(output.scheduled):
            for block in part.offered:
                self.pool.forget(block)
            self._restore(part.sequence, part.before)
            if part.is_admission:
                del self.running[part.sequence]
                self.waiting.put_back(part.sequence)

    def _num_guesses(self) -> int:
        """Tokens to guess for each sequence in this step; none while others could still fill the batch."""
        assert self.speculator is not None
        num_running = len(self.running)
        if not num_running or (self.waiting and num_running < self.max_num_seqs):
            return 0
        return self.speculator.length(num_running)

    def _guess(self, sequence: Sequence, output: SchedulerOutput, count: int) -> Sequence_[int]:
        """Guesses for a sequence that decodes, and the blocks for them; fewer where budget, answer or pool are short."""
        assert self.speculator is not None
        count = min(count, sequence.num_remaining_tokens - 1, self.max_num_batched_tokens - output.num_tokens - 1)
        if (
            count < 1
            or sequence.is_beam
            or sequence.constraint is not None
            or self.pool.num_free < 2 * len(self.running)
        ):
            return ()
        guesses = self.speculator.guess(sequence, count)
        needed = self.pool.num_blocks_for(sequence.num_tokens + len(guesses))
        while len(sequence.block_table) < needed:
            sequence.block_table.append(self.pool.allocate())
        return guesses

    def _schedule_decode(self, sequence: Sequence, output: SchedulerOutput, num_guesses: int) -> None:
        """Give a sequence that decodes its next token: the way that most sequences take in most steps."""
        table, size = sequence.block_table, self.pool.block_size
        start, length = sequence.num_computed_tokens, len(table)
        is_full = start == length * size and not self.pool.num_free
        if output.num_tokens >= self.max_num_batched_tokens or is_full or sequence.is_prefill_only:
            self._schedule_running(sequence, output)
            return
        before = Progress(start, sequence.num_cached_tokens, length)
        if start == length * size:
            table.append(self.pool.allocate())
        offered: Sequence_[int] = () if (start + 1) % size else self._prefixes.offer(sequence, start, start + 1)
        guesses = self._guess(sequence, output, num_guesses) if num_guesses else ()
        num_new = 1 + len(guesses)
        output.scheduled.append(ScheduledSequence(sequence, start, num_new, True, False, before, offered, guesses))
        output.num_tokens += num_new

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
        room = _Room(self)
        suspects = None if only is None else sorted(self._waiting_among(only), key=lambda s: -s.arrival)
        while len(self.running) < most and output.num_tokens < self.max_num_batched_tokens:
            if suspects is None:
                sequence = self.waiting.head(len(self.running))
            else:
                sequence = suspects.pop() if suspects else None
            if sequence is None or self._was_refused(sequence):
                return
            before = Progress.of(sequence)
            self._prefixes.take(sequence)
            fits = room.admit(sequence)
            num_new = self._chunk(sequence, output) if fits else 0
            if not num_new:
                self._restore(sequence, before)
                if not fits:
                    self._refused, self._refused_for = sequence, RETRY_STEPS
                return
            self.waiting.remove(sequence)
            self.running[sequence] = self.pool.num_blocks_for(sequence.max_kv_tokens)
            self._promised.setdefault(sequence, sequence.num_output_tokens + self.estimate_remaining(sequence))
            self._append(sequence, num_new, before, output, is_admission=True)
            room.note(sequence)

    def _waiting_among(self, only: Collection[Sequence]) -> list[Sequence]:
        return [sequence for sequence in only if sequence in self.waiting]

    def _was_refused(self, sequence: Sequence) -> bool:
        """Whether it did not fit a moment ago, and nothing has ended since."""
        self._refused_for -= 1
        return sequence is self._refused and self._refused_for > 0

    def _chunk(self, sequence: Sequence, output: SchedulerOutput) -> int:
        """Tokens to compute now: as many as budget and free blocks allow; a part of a prompt ends with a block."""
        size = self.pool.block_size
        room = (len(sequence.block_table) + self.pool.num_free) * size - sequence.num_computed_tokens
        wanted = sequence.num_uncomputed_tokens
        most = min(wanted, self.max_num_batched_tokens - output.num_tokens, room)
        if sequence.prompt_scores is not None and (unread := sequence.first_unread) is not None:
            before = max(0, unread - sequence.num_computed_tokens)
            most = min(most, before + MAX_SCORED_TOKENS - output.num_scored)
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
        if sequence.prompt_scores is not None:
            output.num_scored += len(sequence.prompt_scores.wanted(start, end))
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
        return min(candidates, key=lambda s: (self._cost_to_recompute(s), -s.arrival), default=None)

    def _cost_to_recompute(self, sequence: Sequence) -> int:
        """Computed tokens that no other running sequence keeps for it."""
        return sequence.num_computed_tokens - self.pool.num_shared_of(sequence.block_table) * self.pool.block_size

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; it keeps its tokens, and comes back before others begin."""
        del self.running[sequence]
        self._release(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.put_back(sequence)

    def _restore(self, sequence: Sequence, before: Progress) -> None:
        self.pool.release(sequence.block_table[before.table_length :])
        del sequence.block_table[before.table_length :]
        sequence.num_cuts += 1
        sequence.num_computed_tokens = before.num_computed_tokens
        sequence.num_cached_tokens = before.num_cached_tokens

    def _release(self, sequence: Sequence) -> None:
        self._refused = None
        self.pool.release(sequence.block_table)
        sequence.block_table.clear()
        sequence.num_cuts += 1
        sequence.num_computed_tokens = 0


class _Room:
    """Whether further sequences fit in this step.

    They do if everything there is can end without a block given back; else a forecast, made once, says.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        running = scheduler.running
        self._growth = sum(running.values()) - sum(len(sequence.block_table) for sequence in running)
        self._forecast: Forecast | None = None

    def admit(self, candidate: Sequence) -> bool:
        """Whether a candidate, which holds the prefix it found, and all running sequences can end without a preemption."""
        scheduler = self._scheduler
        pool = scheduler.pool
        growth = pool.num_blocks_for(candidate.max_kv_tokens) - len(candidate.block_table)
        if self._forecast is None and pool.num_used + self._growth + growth <= pool.num_blocks:
            return True
        if not scheduler.running:
            return False
        if self._forecast is None:
            self._forecast = Forecast(
                pool, scheduler.running, scheduler.estimate_remaining, scheduler.max_num_batched_tokens
            )
        return self._forecast.admit(candidate)

    def note(self, admitted: Sequence) -> None:
        """A candidate was let in, and has the blocks of its first tokens."""
        self._growth += self._scheduler.running[admitted] - len(admitted.block_table)
