"""The engine's heart for a device with a queue: a step is scheduled while the one before it still runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from batchinfer.engine.core import EngineCore, Runner
from batchinfer.engine.pooling import Unpooled
from batchinfer.engine.sampler import SamplingRow
from batchinfer.engine.scoring import Unscored
from batchinfer.engine.sequence import PENDING
from batchinfer.errors import EngineError
from batchinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequence_

    import torch

    from batchinfer.engine.core import Ended, Outcome
    from batchinfer.engine.gpu.sampler import DeviceSampler, Sampled
    from batchinfer.engine.head_output import HeadOutput
    from batchinfer.engine.scheduler import ScheduledSequence, SchedulerOutput
    from batchinfer.engine.sequence import Sequence
    from batchinfer.types import Completion, SampleProgress

IGNORED = SamplingRow(SamplingParams(temperature=0.0), 0, 0)
"""A row whose token nobody waits for: its sequence has ended, or goes on with tokens that a grammar forces."""


class QueueingRunner(Runner, Protocol):
    """A runner whose work is queued: tokens that were sampled stay on the device for the next step."""

    @property
    def about(self) -> dict[str, str]:
        """See :class:`~batchinfer.engine.model_runner.ModelRunner`."""

    def profile(self) -> dict[str, int]:
        """See :class:`~batchinfer.engine.model_runner.ModelRunner`."""

    def keep(self, sequences: Sequence_[Sequence], tokens: torch.Tensor) -> None:
        """The tokens, int64 on the device, that stand for :data:`PENDING` in the next step."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched, and whose tokens the host does not know yet."""

    output: SchedulerOutput
    sampling: dict[int, Sequence]
    """Rows of ``sampled``, and the sequences that wait for their tokens."""
    sampled: Sampled


class PipelinedCore(EngineCore):
    """Continuous batching that learns a step's tokens while the next step runs.

    A step is launched with its predecessor's tokens still on the device, where each stands for :data:`PENDING` at the
    end of its sequence. Then the predecessor's tokens are read: stop strings, end tokens and grammars are a step late,
    and what the new step computes for a sequence that has ended is dropped. Last, the new step's tokens are sampled, by
    when every rule and grammar knows what came before. So an answer has the tokens that it would have had step by step.

    A sequence whose next token may be its last by count is left out of the new step. After a failure, steps pass one by
    one until the row at fault is found.
    """

    _runner: QueueingRunner | None

    def __init__(
        self, runner: QueueingRunner, *args: Any, device_sampler: DeviceSampler, overlaps: bool = True, **more: Any
    ) -> None:
        """Further arguments are those of :class:`EngineCore`; without ``overlaps`` each step is waited for."""
        super().__init__(runner, *args, **more)
        assert self._scheduler.speculator is None, "guesses need the tokens before them"
        self._device_sampler = device_sampler
        self._overlaps = overlaps
        self._flight: Flight | None = None
        self._charged_until = 0
        self._launched_ns = 0

    def step(self) -> list[Completion]:
        """See :meth:`EngineCore.step`."""
        completions = super().step()
        if not self._rows:
            self._drop_flight()
        return completions

    def abort(self, request_id: str) -> None:
        """See :meth:`EngineCore.abort`; a row that ends with a token on its way has ended."""
        self._land()
        super().abort(request_id)

    def progress(self) -> dict[str, tuple[SampleProgress, ...]]:
        """See :meth:`EngineCore.progress`."""
        self._land()
        return super().progress()

    def close(self) -> None:
        """See :meth:`EngineCore.close`."""
        self._drop_flight()
        super().close()

    def _compute(self) -> None:
        """Schedule and launch a step, learn the tokens of the one before, sample."""
        began = self._clock()
        if self._flight is None:
            self._charged_until = began
        if self._recovery.is_searching:
            self._land()
        output = self._schedule()
        if not output.scheduled and self._flight is not None:
            self._land()  # all that could run waits for a token, or for blocks of who has ended
            if not self._rows:
                return
            output = self._schedule()
        if not output.scheduled:
            for sequence, outcome in self._unstick(output):
                self._ended += self._end(sequence, outcome)
            return
        self._stats.schedule_ns += self._clock() - began
        failed_steps = self._stats.failed_steps
        ended = self._launch(output)
        completions = [completion for sequence, outcome in ended for completion in self._end(sequence, outcome)]
        (self._condemned if self._stats.failed_steps > failed_steps else self._ended).extend(completions)
        if not self._overlaps or self._recovery.is_searching:
            self._land()

    def _launch(self, output: SchedulerOutput) -> Ended:
        """Queue a step and the choice of its tokens; the row to blame if that fails."""
        assert self._runner is not None, "the engine is closed"
        parts = [part for part in output.scheduled if part.samples and not part.sequence.is_prefill_only]
        kept = [i for i, part in enumerate(parts) if SamplingRow.of(part.sequence).needs_logits]
        unscored, unpooled = Unscored.of(output), Unpooled.of(output)
        try:
            computed = self._runner.execute(output.scheduled, kept, unscored.places, unpooled.places)
        except EngineError:  # not a row's doing
            raise
        except Exception as error:  # noqa: BLE001 -- whatever a model or device raises must cost at most one row
            self._land()
            return self._blame(output, error)
        self._land()
        try:
            head, scored = computed.split(len(parts))
            sampled, sampling = self._sample(head, parts)
            scores = list(unscored.scores(scored))
            self._runner.keep([part.sequence for part in parts], sampled.tokens)
        except EngineError:  # as above
            raise
        except Exception as error:  # noqa: BLE001 -- as above
            return self._blame(output, error)
        for collected, score in scores:
            collected.append(score)
        unpooled.deliver(computed.hidden)
        self._take_off(output, sampling, sampled)
        return []

    def _sample(self, head: HeadOutput, parts: list[ScheduledSequence]) -> tuple[Sampled, dict[int, Sequence]]:
        """Queue the choice of a token for each part that goes on as it was scheduled."""
        sampling = {row: part.sequence for row, part in enumerate(parts) if self._goes_on(part)}
        rows = [IGNORED] * len(parts)
        for row, sequence in sampling.items():
            rows[row] = SamplingRow.of(sequence)
        with self._masks.computing([row.constraint for row in rows if row.constraint is not None]):
            pass  # the model runs meanwhile
        num_top = {row: s.scores.num_top or 0 for row, s in sampling.items() if s.scores is not None}
        return self._device_sampler.launch(head, rows, num_top), sampling

    def _take_off(self, output: SchedulerOutput, sampling: dict[int, Sequence], sampled: Sampled) -> None:
        """The step is on its way: its tokens count as computed, and what it samples as there."""
        waiting = set(sampling.values())
        output = self._alive(output)
        output.scheduled = [
            part if part.sequence in waiting else part._replace(samples=part.samples and part.sequence.is_prefill_only)
            for part in output.scheduled
        ]
        self._scheduler.settle(output)
        self._scheduler.commit(output)
        self._count(output, has_tokens=False)
        for sequence in waiting:
            if sequence.max_tokens > 0:  # else only the prompt was wanted
                sequence.token_ids.append(PENDING)
        self._scheduler.held = {s for s in waiting if s.num_remaining_tokens <= 0}
        self._flight = Flight(output, sampling, sampled)
        self._launched_ns = self._clock()

    def _land(self) -> None:
        """Learn the tokens of the step that is on its way, and go on with each of its sequences."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        self._scheduler.held = frozenset()
        try:
            tokens, scores = flight.sampled.collect()
        except RuntimeError as error:  # the step has failed where only the device could see it
            self._recovery.on_failure(flight.output, error)  # raises what a device that is not well asks for
            raise EngineError(f"the device failed: {error}") from error
        arrived = self._clock()
        output = self._alive(flight.output)
        sampling = {row: s for row, s in flight.sampling.items() if self._scheduler.is_known(s)}
        for sequence in sampling.values():
            if sequence.token_ids[-1] == PENDING:
                sequence.token_ids.pop()
        self._recovery.on_success()
        self._release_condemned()
        for row, sequence in sampling.items():
            if sequence.scores is not None and row in scores:
                sequence.scores.append(scores[row])
        for part in output.scheduled:
            if part.samples:
                self._latency.first(part.sequence)
        outcomes: list[Outcome] = [(s, self._advance(s, tokens[row])) for row, s in sampling.items()]
        ended = self._finish(outcomes) + self._read(output)
        self._stats.model_ns += max(0, arrived - self._launched_ns)
        self._stats.sample_ns += self._clock() - arrived
        self._charge_alive(output)
        for sequence, outcome in ended:
            self._ended += self._end(sequence, outcome)

    def _charge_alive(self, output: SchedulerOutput) -> None:
        """Split the time since the last charge; what passed for sequences that are gone belongs to no row."""
        now = self._clock()
        if output.scheduled:
            self._charge(output, now - self._charged_until)
        self._charged_until = now

    def _blame(self, output: SchedulerOutput, error: Exception) -> Ended:
        """Undo a step that failed, for those that are still there."""
        alive = self._alive(output)
        for part in output.scheduled:
            if not self._scheduler.is_known(part.sequence):
                for block in part.offered:
                    self._scheduler.pool.forget(block)
        self._charge_alive(alive)
        if not alive.scheduled:
            self._stats.failed_steps += 1
            return []
        return self._recover(alive, error)

    def _alive(self, output: SchedulerOutput) -> SchedulerOutput:
        """A step without the parts of sequences that have ended since it was scheduled."""
        alive = [part for part in output.scheduled if self._scheduler.is_known(part.sequence)]
        return replace(output, scheduled=alive, num_tokens=sum(part.num_new_tokens for part in alive))

    def _goes_on(self, part: ScheduledSequence) -> bool:
        """Whether a part's sequence is there, and nothing follows what the step computes of it."""
        sequence = part.sequence
        return self._scheduler.is_known(sequence) and sequence.num_tokens == part.start + part.num_new_tokens

    def _drop_flight(self) -> None:
        """Nobody waits for the step that is on its way."""
        self._flight = None
        self._scheduler.held = frozenset()
