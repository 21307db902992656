"""Use cases before a job runs: ``estimate`` and ``explain``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from batchinfer.errors import InvalidSpecError
from batchinfer.jobs.explain import KV_BLOCKS, WINDOW_ROWS, advise, explain_rows, longest_first
from batchinfer.jobs.forecast import Terms, Workload, forecast
from batchinfer.jobs.foresight_views import (
    Bucket,
    EstimateView,
    ExplainView,
    Makespan,
    PrefixGroup,
    ShardPlanView,
)
from batchinfer.jobs.money_views import IntervalView, UsdIntervalView
from batchinfer.jobs.planner import cut_shards, prompt_config
from batchinfer.jobs.predict import Interval
from batchinfer.jobs.survey import SAMPLE_ROWS, Survey, survey_rows
from batchinfer.jobs.token_process import TokenProcess
from batchinfer.money import nanos_to_usd, usd_to_nanos

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from decimal import Decimal

    from batchinfer.dataset.prompt import RowReader
    from batchinfer.dataset.roots import Roots
    from batchinfer.dataset.source import InputSource
    from batchinfer.jobs.explain import Explanation
    from batchinfer.jobs.forecasts import Past
    from batchinfer.jobs.ledger import Ledger
    from batchinfer.jobs.spec import JobSpec

WORKERS_SHOWN = (1, 2, 4, 8)
"""Numbers of workers that a makespan is shown for."""


class DeviceSpeed(Protocol):
    """A kind of device and how long it takes: measured on past jobs, or computed from its data sheet."""

    @property
    def device(self) -> str:
        """Its name."""
        ...

    @property
    def basis(self) -> str:
        """What the figures rest on, for people."""
        ...

    @property
    def nanos_per_hour(self) -> int | None:
        """Its price; None if it is not known."""
        ...

    def seconds(
        self, *, num_rows: float, prompt_tokens: Interval, cached_share: float, completion_tokens: Interval
    ) -> Interval:
        """Device seconds of a job with so many rows and tokens, of whose prompts a share is cached."""
        ...


@dataclass(frozen=True, slots=True)
class Question:
    """How to look: ``sample_rows`` for an estimate, ``max_rows`` for an explanation (None: all)."""

    usd_per_hour: Decimal
    """Of a worker, where the price book has none for the device."""
    num_workers: int = 1
    device: str | None = None
    sample_rows: int = SAMPLE_ROWS
    max_rows: int | None = None
    kv_blocks: int = KV_BLOCKS
    window_rows: int = WINDOW_ROWS


class Foresight:
    """Looks at inputs for one tenant. ``make_encoder`` opens a context that gives the model's tokenizer."""

    def __init__(
        self,
        ledger: Ledger,
        tenant: str,
        *,
        roots: Roots | None = None,
        make_encoder: Callable[[str], TokenProcess] = TokenProcess,
    ) -> None:
        self._ledger = ledger
        self._tenant = tenant
        self._roots = roots
        self._make_encoder = make_encoder

    def estimate(self, spec: JobSpec, question: Question) -> EstimateView:
        """Rows, tokens, time and cost from a sample of the rows and from past jobs.

        Raises:
            UserError: the input, the template or the model's tokenizer cannot be read.
        """
        source, reader = self._open(spec)
        with self._make_encoder(spec.model) as encoder:
            survey = survey_rows(source, reader, encoder, sample_rows=question.sample_rows)
        past = self._ledger.past_of(self._tenant, spec)
        warnings = (*source.warnings, *reader.warnings)
        return self._view(spec, question, survey, past=past, warnings=warnings, cached=past.cached_share())

    def explain(
        self,
        spec: JobSpec,
        question: Question,
        *,
        speeds: Sequence[DeviceSpeed] = (),
        on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> ExplainView:
        """Every row tokenised: what is shared, how it will be cut, how long it takes, what would make it cheaper.

        ``speeds``: more kinds of devices than past jobs have run on. Raises what :meth:`estimate` raises.
        """
        source, reader = self._open(spec)
        past = self._ledger.past_of(self._tenant, spec)
        warnings = (*source.warnings, *reader.warnings)
        with self._make_encoder(spec.model) as encoder:
            found = explain_rows(
                source, reader, encoder, max_rows=question.max_rows, kv_blocks=question.kv_blocks,
                window_rows=question.window_rows, on_progress=on_progress,
            )  # fmt: skip
            survey = found.survey()
            if found.num_rows < source.num_rows:
                survey = survey_rows(source, reader, encoder, sample_rows=question.sample_rows)
            estimate = self._view(spec, question, survey, past=past, warnings=warnings, cached=found.hit_rate)
            answers = estimate.completion_tokens.expected * found.num_rows / max(1, source.num_rows)
            is_chat = spec.messages_column is not None or spec.system is not None or _has_messages(source, spec)
            advice = advise(found, answers, encoder, is_chat=is_chat, reuses=spec.reuse_results)
        plan, tokens = _shard_plan(source, reader, spec)
        return ExplainView(
            model=spec.model,
            num_rows=source.num_rows,
            looked_at=found.num_rows,
            errors=found.errors,
            prompt_tokens=found.prompt_tokens,
            prompt_tokens_mean=round(found.prompt_tokens / found.num_run, 3) if found.num_run else 0.0,
            prompt_tokens_max=found.lengths.largest,
            histogram=[Bucket(low=low, high=high, num_rows=number) for low, high, number in found.lengths.buckets()],
            unique_rows=found.unique_rows,
            unique_is_exact=found.distinct.is_exact,
            shared_tokens=found.tree.shared_tokens,
            shared_share=_share(found.tree.shared_tokens, found),
            shared_is_exact=found.tree.is_exact,
            expected_hit_rate=round(found.hit_rate, 6),
            kv_blocks=found.kv_blocks,
            window_rows=found.window_rows,
            groups=[
                PrefixGroup(
                    num_tokens=one.num_tokens, num_rows=one.num_rows, first_row=one.first_row,
                    saved_tokens=one.saved_tokens,
                )
                for one in found.tree.top()
            ],
            shards=plan,
            estimate=estimate,
            makespans=self._makespans(
                question, estimate, past=past, shard_tokens=tokens, speeds=speeds, cached_share=found.hit_rate
            ),
            advice=advice,
        )  # fmt: skip

    # -- how ----------------------------------------------------------------------------------------------------------
    def _open(self, spec: JobSpec) -> tuple[InputSource, RowReader]:
        from batchinfer.dataset.prompt import RowReader  # noqa: PLC0415 -- pyarrow loads when it is used
        from batchinfer.dataset.source import InputSource  # noqa: PLC0415 -- see above

        if spec.stages:
            raise InvalidSpecError(
                "a job with stages is not foreseen: what its later stages read is not there yet. Run it with a limit "
                "first; its report says what each row took",
                param="stages",
            )
        source = InputSource.open(spec.inputs, spec.limit, self._roots)
        return source, RowReader(prompt_config(spec, self._roots), source.schema)

    def _view(
        self, spec: JobSpec, question: Question, survey: Survey, *, past: Past, warnings: Sequence[str], cached: float
    ) -> EstimateView:
        rate = self._ledger.device_rate(question.device, usd_to_nanos(question.usd_per_hour))
        terms = Terms(rate, question.num_workers, question.device, self._ledger.price_at(spec.model))
        params = spec.sampling_params()
        runnable = round(survey.num_rows * survey.runnable_share)
        work = Workload(
            num_rows=runnable,
            max_tokens=round(survey.mean_max_tokens),
            min_tokens=min(params.min_tokens * params.num_sequences, round(survey.mean_max_tokens)),
            prompt_tokens=survey.draw_prompt_tokens(),
            cached_share=cached,
        )
        found = forecast(work, past, terms)
        return EstimateView(
            model=spec.model,
            num_rows=survey.num_rows,
            sampled_rows=survey.sampled_rows,
            is_whole=survey.is_whole,
            runnable_rows=runnable,
            errors=survey.errors,
            confidence=found.confidence,
            prompt_tokens=_interval(found.prompt_tokens),
            completion_tokens=_interval(found.completion_tokens),
            length_basis=found.length_basis,
            device_seconds=None if found.device_seconds is None else _interval(found.device_seconds),
            seconds=None if found.seconds is None else _interval(found.seconds),
            cost_usd=None if found.cost_nanos is None else _usd(found.cost_nanos),
            list_usd=None if found.list_nanos is None else _usd(found.list_nanos),
            speed_basis=found.speed_basis,
            num_workers=question.num_workers,
            device=question.device,
            usd_per_hour=nanos_to_usd(rate),
            warnings=list(warnings),
        )

    def _makespans(
        self,
        question: Question,
        estimate: EstimateView,
        *,
        past: Past,
        shard_tokens: Sequence[int],
        speeds: Sequence[DeviceSpeed],
        cached_share: float,
    ) -> list[Makespan]:
        prompts, answers = (
            Interval(v.low, v.expected, v.high) for v in (estimate.prompt_tokens, estimate.completion_tokens)
        )
        own = usd_to_nanos(question.usd_per_hour)
        known = [
            *(PastSpeed(device, past, self._ledger.device_rate(device or None, own)) for device in past.devices()),
            *speeds,
        ]
        found = []
        for speed in known:
            device = speed.seconds(
                num_rows=estimate.runnable_rows,
                prompt_tokens=prompts,
                cached_share=cached_share,
                completion_tokens=answers,
            )
            price = speed.nanos_per_hour
            cost = None if price is None else _usd(device.scaled(price / 3600))
            for number in WORKERS_SHOWN:
                wall = device.scaled(longest_first(shard_tokens, number) / number)
                found.append(
                    Makespan(
                        device=speed.device, num_workers=number, seconds=_interval(wall), cost_usd=cost,
                        basis=speed.basis,
                    )
                )  # fmt: skip
        return found


class PastSpeed:
    """A device's speed, as past jobs measured it."""

    def __init__(self, device: str, past: Past, nanos_per_hour: int) -> None:
        self._past = past
        self._seen = past.seconds_per_token(device)
        self.device = device
        self.nanos_per_hour = nanos_per_hour
        self.basis = f"{len(self._seen)} past job{'s' * (len(self._seen) != 1)}"

    def seconds(
        self, *, num_rows: float, prompt_tokens: Interval, cached_share: float, completion_tokens: Interval
    ) -> Interval:
        """See :class:`DeviceSpeed`; the jobs' own cached share and lengths of rows are in what was measured."""
        from batchinfer.jobs.forecast import SPEED_SPREAD  # noqa: PLC0415 -- beside its use
        from batchinfer.jobs.predict import interval, predictive  # noqa: PLC0415 -- beside its use

        del cached_share, num_rows
        rate = interval(predictive(self._seen, SPEED_SPREAD))
        tokens = prompt_tokens.expected + completion_tokens.expected
        load = self._past.overhead_seconds()
        return Interval(*(value * tokens + load for value in (rate.low, rate.expected, rate.high)))


def _shard_plan(source: InputSource, reader: RowReader, spec: JobSpec) -> tuple[ShardPlanView, list[int]]:
    """How the planner will cut the input. Shards are few whatever the number of rows: at most some thousands."""
    rows, tokens = [], []
    for shard in cut_shards(
        lambda: source.token_weights(reader.columns), max_tokens=spec.max_tokens, shard_rows=spec.shard_rows
    ):
        rows.append(shard.row_end - shard.row_start)
        tokens.append(shard.est_tokens)
    view = ShardPlanView(
        num_shards=len(rows),
        rows_min=min(rows, default=0),
        rows_max=max(rows, default=0),
        tokens_max=max(tokens, default=0),
    )
    return view, tokens


def _has_messages(source: InputSource, spec: JobSpec) -> bool:
    return spec.prompt_column is None and spec.template is None and "messages" in source.schema.names


def _share(tokens: int, found: Explanation) -> float:
    return round(tokens / found.prompt_tokens, 6) if found.prompt_tokens else 0.0


def _interval(value: Interval) -> IntervalView:
    return IntervalView(low=round(value.low, 3), expected=round(value.expected, 3), high=round(value.high, 3))


def _usd(nanos: Interval) -> UsdIntervalView:
    low, expected, high = (nanos_to_usd(round(value)) for value in (nanos.low, nanos.expected, nanos.high))
    return UsdIntervalView(low=low, expected=expected, high=high)
