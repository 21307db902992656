"""Outcomes of rows, priced: what a completion, a bad row or a row that never ran becomes in the output."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from batchinfer.dataset.schema import REUSED_FROM, ROW_KEY, ResultRow
from batchinfer.dataset.stage_columns import stage_values
from batchinfer.money import DeviceMeter
from batchinfer.types import ErrorCode, FinishReason, RowError, RowStatus
from batchinfer_workers.engine_session import row_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchinfer.dataset.reused_rows import ReusedRow
    from batchinfer.dataset.staged_row import StagedRow
    from batchinfer.jobs.leases import Lease
    from batchinfer.money import Price
    from batchinfer.sampling_params import SamplingParams
    from batchinfer.types import Completion, Usage

_CLOSED = {
    RowStatus.CANCELLED: RowError(ErrorCode.JOB_CANCELLED, "the job was cancelled before this row ran"),
    RowStatus.EXPIRED: RowError(ErrorCode.DEADLINE_EXCEEDED, "the job's deadline passed before this row ran"),
}
_BY_ROW = ("logprobs", "prompt_logprobs", "reasoning", "tool_calls", "samples", "parsed")
"""Optional columns that a row may ask for by parameters of its own."""
_LOST = RowError(ErrorCode.WORKER_LOST, "the engine process ended each time this row ran, even alone")


def row_seed(job_seed: int | None, row_index: int) -> int:
    """Seed of an unseeded row, in ``[0, 2**63)``: the same whatever runs beside the row, wherever and when."""
    digest = hashlib.blake2b(f"{job_seed or 0}:{row_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def with_seed(params: SamplingParams, job_seed: int | None, row_index: int) -> SamplingParams:
    """The row's parameters with a seed, where one matters."""
    if params.seed is not None or params.is_greedy:
        return params
    return params.model_copy(update={"seed": row_seed(job_seed, row_index)})


class ResultRows:
    """Makes the result rows of one attempt. One meter an attempt, so that its rows' costs sum exactly."""

    def __init__(self, lease: Lease, price: Price | None) -> None:
        self._model = lease.job.model
        self._attempt = lease.attempt_number
        self._columns = lease.job.spec.result_columns()
        self._price = price
        self._meter = DeviceMeter(lease.nanos_per_hour)
        self.key_of: Callable[[int], bytes | None] = lambda _row_index: None
        """Key of a computed row, where the job's rows have keys."""

    @property
    def metered_nanos(self) -> int:
        """Cost of the rows made so far, in nano-dollars."""
        return self._meter.total_nanos

    def completed(self, completion: Completion, warnings: tuple[str, ...] = ()) -> ResultRow:
        """Outcome of a row that the engine has seen."""
        return ResultRow(
            row_index=row_of(completion),
            status=completion.status,
            model=self._model,
            attempt=self._attempt,
            output=completion.text if completion.status is RowStatus.SUCCEEDED else None,
            finish_reason=completion.finish_reason,
            error=completion.error,
            usage=completion.usage,
            cost_nanos=self._meter.charge(completion.device_ns),
            list_cost_nanos=self._list_nanos(completion.usage),
            clamped_max_tokens=completion.clamped_max_tokens,
            warnings=warnings + completion.warnings + self._left_out(completion),
            extra=self._extra(completion, row_of(completion)),
        )

    def staged(self, row: StagedRow) -> ResultRow:
        """Outcome of a row that has come to its end, with a column for each stage; its cost is the sum of theirs."""
        costs = {
            name: (self._meter.charge(answer.device_ns), self._list_nanos(answer.usage))
            for name, answer in row.answers.items()
        }
        last = row.last_answer
        assert row.status is not None
        return ResultRow(
            row_index=row.row_index,
            status=row.status,
            model=self._model,
            attempt=self._attempt,
            output=last.text if last else None,
            finish_reason=last.finish_reason if last else None,
            error=row.named_error,
            usage=row.usage,
            cost_nanos=sum(metered for metered, _ in costs.values()),
            list_cost_nanos=sum(listed or 0 for _, listed in costs.values()) if self._price else None,
            warnings=row.warnings,
            extra=stage_values(row, costs),
        )

    def _list_nanos(self, usage: Usage) -> int | None:
        """At list price, where the model has one."""
        if self._price is None:
            return None
        return self._price.cost(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)

    def deduplicated(self, row_index: int, copy: ReusedRow, key: bytes | None, warnings: tuple[str, ...]) -> ResultRow:
        """Outcome of a row whose answer is a copy: nothing was computed, so it has no tokens and costs nothing."""
        usage, price = copy.reused_from["usage"] or {}, self._price
        extra = {**copy.extra, ROW_KEY: key, REUSED_FROM: copy.reused_from}
        return ResultRow(
            row_index=row_index,
            status=RowStatus.DEDUPLICATED,
            model=self._model,
            attempt=self._attempt,
            output=copy.output,
            finish_reason=None if copy.finish_reason is None else FinishReason(copy.finish_reason),
            list_cost_nanos=0 if price else None,
            warnings=tuple(dict.fromkeys((*warnings, *copy.warnings))),
            extra={name: extra[name] for name in self._columns if name in extra},
            saved_nanos=copy.cost_nanos,
            saved_list_nanos=price.cost(**usage) if price and usage else 0,
        )

    def _extra(self, completion: Completion, row_index: int) -> dict[str, Any]:
        """Values of the optional columns that the job writes."""
        extra = {"token_ids": completion.token_ids, **completion.extra}
        if ROW_KEY in self._columns:
            extra[ROW_KEY] = self.key_of(row_index)
        return {name: extra[name] for name in self._columns if name in extra}

    def _left_out(self, completion: Completion) -> tuple[str, ...]:
        """What a row asked for by a column of its own, in a job that has no result column for it."""
        asked = [name for name in _BY_ROW if completion.extra.get(name) is not None]
        return tuple(f"no_column:{name}" for name in asked if name not in self._columns)

    def errored(self, row_index: int, error: RowError, warnings: tuple[str, ...] = ()) -> ResultRow:
        """Outcome of a row that cannot become a request."""
        return self._without_engine(row_index, RowStatus.ERRORED, error, warnings)

    def skipped(self, row_index: int, warnings: tuple[str, ...] = ()) -> ResultRow:
        """Outcome of a row that is left out on purpose."""
        return self._without_engine(row_index, RowStatus.SKIPPED, None, warnings)

    def lost(self, row_index: int) -> ResultRow:
        """Outcome of a row that kills the engine."""
        return self._without_engine(row_index, RowStatus.ERRORED, _LOST)

    def closed(self, row_index: int, status: RowStatus) -> ResultRow:
        """Outcome of a row that a cancel or a deadline cut off."""
        return self._without_engine(row_index, status, _CLOSED[status])

    def _without_engine(
        self, row_index: int, status: RowStatus, error: RowError | None, warnings: tuple[str, ...] = ()
    ) -> ResultRow:
        return ResultRow(
            row_index, status, self._model, self._attempt, error=error,
            list_cost_nanos=0 if self._price else None, warnings=warnings,
        )  # fmt: skip
