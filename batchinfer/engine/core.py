"""The engine's heart: requests in, completions out, a step at a time."""

from __future__ import annotations

import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from batchinfer.engine.advance import advance
from batchinfer.engine.constraint import MaskPool
from batchinfer.engine.device_faults import DeviceFault, fault_of
from batchinfer.engine.guessed import Guessed
from batchinfer.engine.latency import Latency
from batchinfer.engine.metering import split_exactly
from batchinfer.engine.pooling import Unpooled
from batchinfer.engine.recovery import Recovery
from batchinfer.engine.sampler import Sampler, SamplingRow
from batchinfer.engine.scoring import Unscored, score_answers
from batchinfer.engine.stats import EngineStats
from batchinfer.errors import EngineError, RowFailure
from batchinfer.types import Completion, ErrorCode, FinishReason, RowError, RowStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Sequence as Sequence_

    from batchinfer.engine.head_output import HeadOutput
    from batchinfer.engine.ingest import Ingest
    from batchinfer.engine.row import Row
    from batchinfer.engine.scheduler import ScheduledSequence, Scheduler, SchedulerOutput
    from batchinfer.engine.sequence import Sequence
    from batchinfer.engine.step_bound import StepBound
    from batchinfer.engine.tasks.row import TaskRow
    from batchinfer.types import Request, SampleProgress

    Outcome = tuple[Sequence, FinishReason | RowError | None]
    """A sequence that sampled, and how it ended, if it did."""
    Ended = list[tuple[Sequence, FinishReason | RowError]]
    """Sequences that ended in a step, and how."""


MAX_PROGRESS_ITEMS = 1 << 20
"""Tokens and log-probabilities that are told of unfinished rows at a time, some 32 MB of JSON; other rows start again."""


class Runner(Protocol):
    """What the engine needs of :class:`~batchinfer.engine.model_runner.ModelRunner`; tests bring a small one."""

    def execute(
        self,
        scheduled: Sequence_[ScheduledSequence],
        kept: Sequence_[int] = (),
        scored: Sequence_[int] = (),
        hidden: Sequence_[int] = (),
    ) -> HeadOutput:
        """Compute the tokens; the best token of each sequence that samples, in order, and the logits of ``kept``.

        ``scored`` are places among the step's tokens, whose logits follow as further rows; ``hidden`` are places whose
        hidden states are wanted.
        """


class EngineCore:
    """Continuous batching over one model; implements :class:`~batchinfer.engine.protocol.EngineProtocol`.

    ``clock`` gives integer nanoseconds. Each step's time is split over its rows by the tokens computed for them.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        ingest: Ingest,
        sampler: Sampler,
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
        about: Mapping[str, str] = MappingProxyType({}),
        profile: Callable[[], Mapping[str, int]] = dict,
        bound: StepBound | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """``about`` are the statistics that do not change: ``kernels``, ``layers``, ``recipe``; ``profile`` the runner's.

        ``bound`` says how fast the device could be; None if that is not known. ``on_close`` is called when the engine
        is closed, each time.
        """
        self._bound = bound
        self._on_close = on_close
        self._profile = profile
        self._runner: Runner | None = runner
        self._scheduler = scheduler
        self._ingest = ingest
        self._sampler = sampler
        self._clock = clock
        self._latency = Latency()
        self._recovery = Recovery(scheduler)
        self._masks = MaskPool()
        self._rows: dict[str, Row | TaskRow] = {}
        self._ended: list[Completion] = []
        self._condemned: list[Completion] = []  # held back until it is clear that the engine is not to blame
        self._stats = EngineStats.from_dict({**about, "num_blocks": scheduler.pool.num_blocks})

    @property
    def num_waiting(self) -> int:
        """Requests added and not yet running."""
        return len(self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._scheduler.running)

    def has_unfinished(self) -> bool:
        """Whether a further :meth:`step` would return or compute something."""
        return bool(self._rows or self._ended or self._condemned)

    def add_request(self, request: Request) -> None:
        """Queue a request; see :meth:`EngineProtocol.add_request`."""
        if request.request_id in self._rows:
            raise ValueError(f"request {request.request_id!r} is still unfinished; ids must be unique")
        try:
            row = self._ingest.row(request)
        except RowFailure as failure:
            self._stats.errored += 1
            self._ended.append(Completion(request.request_id, RowStatus.ERRORED, error=failure.error))
            return
        self._rows[row.request_id] = row
        for sequence in row.live:
            self._latency.arrived(sequence)
        for sequence in list(row.live):
            if sequence.max_tokens or sequence.prompt_scores is not None or sequence.is_prefill_only:
                (self._scheduler.resume if sequence.num_output_tokens else self._scheduler.add)(sequence)
            else:
                self._ended += self._end(sequence, FinishReason.LENGTH)

    def abort(self, request_id: str) -> None:
        """Stop a request; see :meth:`EngineProtocol.abort`."""
        if row := self._rows.get(request_id):
            error = RowError(ErrorCode.JOB_CANCELLED, "the row was aborted before it ended")
            self._ended.append(self._close(row, row.fail(error)))

    def step(self) -> list[Completion]:
        """Compute one batch; see :meth:`EngineProtocol.step`."""
        if self._rows:
            self._compute()
        if not self._rows:  # nobody is left who could show that the engine is to blame
            self._release_condemned()
        ended, self._ended = self._ended, []
        return ended

    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        charged = [row.device_ns for row in self._rows.values()]
        charged += [c.device_ns for c in (*self._ended, *self._condemned)]
        live = {
            "num_waiting": self.num_waiting,
            "num_running": self.num_running,
            "used_blocks": self._scheduler.pool.num_used,
            "preemptions": self._scheduler.num_preemptions,
            "misestimates": self._scheduler.num_misestimates,
            "ideal_cached_tokens": self._scheduler.num_ideal_cached_tokens,
            "max_num_seqs": self._scheduler.max_num_seqs,
            "batched_tokens_limit": self._scheduler.max_num_batched_tokens,
            "unfinished_device_ns": sum(charged),
        }
        return EngineStats.from_dict({**self._stats.to_dict(), **live, **self._latency.figures(), **self._profile()})

    def progress(self) -> dict[str, tuple[SampleProgress, ...]]:
        """How far unfinished rows are; see :meth:`EngineProtocol.progress`."""
        found: dict[str, tuple[SampleProgress, ...]] = {}
        num_items = 0
        for request_id, row in self._rows.items():
            if samples := row.progress():
                num_items += sum(len(s.token_ids) + sum(1 + len(score[3]) for score in s.scores) for s in samples)
                if num_items > MAX_PROGRESS_ITEMS:
                    break
                found[request_id] = samples
        return found

    def check_integrity(self) -> None:
        """Raise AssertionError if a sequence or a block is lost, shared wrongly or counted twice."""
        scheduler = self._scheduler
        assert not any(sequence.block_table for sequence in scheduler.waiting), "a waiting sequence holds blocks"
        known = {sequence for row in self._rows.values() for sequence in row.live}
        assert {*scheduler.running, *scheduler.waiting} == known, "a sequence is lost"
        scheduler.pool.check_integrity([sequence.block_table for sequence in scheduler.running])

    def close(self) -> None:
        """Drop model and cache."""
        self._runner = None
        self._masks.close()
        self._on_close()

    def _compute(self) -> None:
        """Schedule, run, charge; then let go of the rows that ended."""
        started = self._clock()
        output = self._schedule()
        scheduled = self._clock()
        failed_steps = self._stats.failed_steps
        ended = self._run(output) if output.scheduled else self._unstick(output)
        if output.scheduled:
            now = self._clock()
            self._stats.schedule_ns += scheduled - started
            self._charge(output, now - started)
        has_failed = self._stats.failed_steps > failed_steps
        completions = [completion for sequence, outcome in ended for completion in self._end(sequence, outcome)]
        (self._condemned if has_failed else self._ended).extend(completions)

    def _schedule(self) -> SchedulerOutput:
        output = self._scheduler.schedule(self._recovery.next_group())
        if not output.scheduled:  # those under suspicion may wait for others' blocks
            self._recovery.clear()
            output = self._scheduler.schedule()
        return output

    def _unstick(self, output: SchedulerOutput) -> Ended:
        """End the head of the queue, which has the pool for itself and still does not fit."""
        assert output.stuck is not None
        self._scheduler.finish(output.stuck)
        return [(output.stuck, RowError(ErrorCode.ENGINE_ERROR, "the KV cache has no block for this row"))]

    def _run(self, output: SchedulerOutput) -> Ended:
        """Compute and sample; a failure is rolled back and blamed on a row once it is found."""
        assert self._runner is not None, "the engine is closed"
        parts = [part for part in output.scheduled if part.samples and not part.sequence.is_prefill_only]
        sampling = [part.sequence for part in parts]
        rows = [SamplingRow.of(sequence) for sequence in sampling]
        guessed = Guessed.of(parts)
        kept = guessed.kept([row.needs_logits for row in rows])
        unscored, unpooled = Unscored.of(output), Unpooled.of(output)
        started = self._clock()
        try:
            with self._masks.computing([row.constraint for row in rows if row.constraint is not None]):
                computed_rows = self._runner.execute(output.scheduled, kept, unscored.places, unpooled.places)
            whole, scored = computed_rows.split(guessed.num_rows)
            computed = self._clock()
            head = guessed.first(whole)
            tokens = self._sampler.choose(head, rows)
            scores = [*unscored.scores(scored), *score_answers(head, sampling, tokens)]
        except EngineError:  # not a row's doing
            raise
        except Exception as error:  # noqa: BLE001 -- whatever a model or device raises must cost at most one row
            return self._recover(output, error)
        self._stats.model_ns += computed - started
        self._stats.sample_ns += self._clock() - computed
        self._observe(output, computed - started)
        self._scheduler.commit(output)
        self._recovery.on_success()
        self._release_condemned()
        self._count(output)
        for collected, score in scores:
            collected.append(score)
        unpooled.deliver(computed_rows.hidden)
        outcomes: list[Outcome] = [(s, self._advance(s, token)) for s, token in zip(sampling, tokens, strict=True)]
        if guessed.has_guesses:
            outcomes = self._verify(guessed, whole, outcomes)
        return self._finish(outcomes) + self._read(output)

    def _finish(self, outcomes: list[Outcome]) -> Ended:
        """Let the scheduler forget the sequences that have ended."""
        ended = [(s, outcome) for s, outcome in outcomes if outcome is not None]
        for sequence, outcome in ended:
            if isinstance(outcome, RowError):
                self._scheduler.finish(sequence, keep_prefix=False)
            elif sequence.is_beam:
                self._scheduler.finish(sequence)
            else:
                self._scheduler.answered(sequence)
        return ended

    def _read(self, output: SchedulerOutput) -> Ended:
        """Sequences that end with their prompt, which is now computed."""
        read = [part.sequence for part in output.scheduled if part.samples and part.sequence.is_prefill_only]
        for sequence in read:
            self._scheduler.finish(sequence)
        return [(sequence, FinishReason.STOP) for sequence in read]

    def _advance(self, sequence: Sequence, token: int | RowError) -> FinishReason | RowError | None:
        """Add a sampled token; how the sequence ends, or None while it goes on."""
        before = sequence.num_output_tokens
        outcome = advance(sequence, token)
        if sequence.constraint is not None:
            num_forced = max(0, sequence.num_output_tokens - before - 1)
            self._stats.forced_tokens += num_forced
            self._stats.completion_tokens += num_forced
            self._scheduler.lengthened(sequence)
        return outcome

    def _verify(self, guessed: Guessed, head: HeadOutput, outcomes: list[Outcome]) -> list[Outcome]:
        """Go on along guesses that were right, each sampled as if it had been computed alone; how sequences now stand.

        A failure here ends the walk and nothing else: what it would have sampled is computed again.
        """
        result = dict(outcomes)
        accepted = dict.fromkeys(result, 0)
        while alive := [part for part in guessed.parts if result[part.sequence] is None and part.is_next_guess_right]:
            sequences = [part.sequence for part in alive]
            rows = [SamplingRow.of(sequence) for sequence in sequences]
            lines = guessed.rows(head, [(part, part.sequence.num_computed_tokens - part.start) for part in alive])
            try:
                tokens = self._sampler.choose(lines, rows)
                scores = list(score_answers(lines, sequences, tokens))
            except Exception:  # noqa: BLE001 -- see above
                break
            for collected, score in scores:
                collected.append(score)
            for sequence, token in zip(sequences, tokens, strict=True):
                sequence.num_computed_tokens += 1
                accepted[sequence] += 1
                result[sequence] = self._advance(sequence, token)
        self._note_guesses(guessed, accepted)
        return list(result.items())

    def _note_guesses(self, guessed: Guessed, accepted: Mapping[Sequence, int]) -> None:
        speculator = self._scheduler.speculator
        for part in guessed.parts:
            if part.guesses:
                self._stats.guessed_tokens += len(part.guesses)
                self._stats.accepted_tokens += accepted[part.sequence]
                self._stats.completion_tokens += accepted[part.sequence]
                self._scheduler.accept(part)
                if speculator is not None:
                    speculator.observe_guesses(part.sequence, len(part.guesses), accepted[part.sequence])

    def _observe(self, output: SchedulerOutput, model_ns: int) -> None:
        """Tell the speculator of a step that only decoded."""
        speculator = self._scheduler.speculator
        if speculator is not None and all(p.num_new_tokens == 1 + len(p.guesses) for p in output.scheduled):
            speculator.observe_step(output.num_tokens, model_ns)

    def _recover(self, output: SchedulerOutput, error: Exception) -> Ended:
        """Undo the step; the row to blame, if it is known by now."""
        self._scheduler.rollback(output)
        self._stats.failed_steps += 1
        self._stats.out_of_memory += fault_of(error) is DeviceFault.OUT_OF_MEMORY
        culprit = self._recovery.on_failure(output, error)
        if culprit is None:
            return []
        self._scheduler.finish(culprit[0])
        return [culprit]

    def _release_condemned(self) -> None:
        self._ended += self._condemned
        self._condemned.clear()

    def _charge(self, output: SchedulerOutput, elapsed_ns: int) -> None:
        self._stats.step_ns += elapsed_ns
        shares = split_exactly(elapsed_ns, [part.num_new_tokens for part in output.scheduled])
        for part, share in zip(output.scheduled, shares, strict=True):
            part.sequence.device_ns += share

    def _count(self, output: SchedulerOutput, *, has_tokens: bool = True) -> None:
        """Count a step; without ``has_tokens`` what it samples is still on its way."""
        stats = self._stats
        stats.steps += 1
        stats.sequence_steps += len(output.scheduled)
        pool = self._scheduler.pool
        stats.peak_used_blocks = max(stats.peak_used_blocks, pool.num_used)
        if self._bound is not None:
            stats.roofline_ns += self._bound.nanoseconds(output, pool.num_used * pool.block_size)
        for part in output.scheduled:
            sequence = part.sequence
            num_own = part.num_new_tokens - len(part.guesses)
            is_decode = part.start >= sequence.num_prompt_tokens and num_own == 1
            if has_tokens and part.samples and not is_decode:
                self._latency.first(sequence)
            stats.decode_tokens += num_own if is_decode else 0
            stats.prefill_tokens += 0 if is_decode else num_own
            stats.completion_tokens += part.samples and sequence.max_tokens > 0
            stats.cached_tokens += sequence.num_cached_tokens - part.before.num_cached_tokens
            if part.is_admission and sequence.num_preemptions == 0:
                stats.prompt_tokens += sequence.num_prompt_tokens

    def _end(self, sequence: Sequence, outcome: FinishReason | RowError) -> list[Completion]:
        """The completion of the row of a sequence that the scheduler no longer knows; nothing while the row goes on."""
        row = self._rows.get(sequence.request_id)
        if row is None or sequence not in row.live:  # the row has failed in this very step
            return []
        self._latency.ended(sequence)
        completion = row.end(sequence, outcome)
        if completion is not None:
            return [self._close(row, completion)]
        for continuation in row.continuations():
            self._scheduler.resume(continuation)
        return []

    def _close(self, row: Row | TaskRow, completion: Completion) -> Completion:
        """Let go of a row and of what is still computed for it."""
        del self._rows[row.request_id]
        for sequence in row.live:
            if sequence in self._scheduler.running or sequence in self._scheduler.waiting:
                self._scheduler.finish(sequence)
        counter = completion.status.value
        setattr(self._stats, counter, getattr(self._stats, counter) + 1)
        return completion
