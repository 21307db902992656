"""One row of a job, run again alone: does it give the bytes that are stored?"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from batchinfer.dataset.schema import REUSED_FROM, ROW_KEY, ResultRow
from batchinfer.dataset.source import InputSource
from batchinfer.dataset.stage_columns import stage_values
from batchinfer.dataset.stage_reader import row_reader
from batchinfer.engine.model_identity import model_revision
from batchinfer.engine.process import EngineProcess
from batchinfer.errors import ConflictError
from batchinfer.jobs.planner import prompt_config, result_schema
from batchinfer.jobs.stored_row import stored_row
from batchinfer.types import RowStatus
from batchinfer_workers.engine_config import engine_config
from batchinfer_workers.result_rows import with_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from batchinfer.dataset.prompt import RowInput
    from batchinfer.dataset.staged_row import StagedRow
    from batchinfer.jobs.records import JobRecord, ShardRecord
    from batchinfer.settings import Settings
    from batchinfer.types import Completion, Request

NEVER_RAN = frozenset({RowStatus.CANCELLED.value, RowStatus.EXPIRED.value})
NOT_ANSWERS = frozenset({ROW_KEY, REUSED_FROM})
_CONTEXT = 24
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a column first differs. ``position`` is an index into the text or list; None where there is none."""

    column: str
    position: int | None
    stored: Any
    replayed: Any


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay found. ``compared`` are the columns; where they all are equal, ``differences`` is empty."""

    job_id: str
    row_index: int
    status: str
    compared: tuple[str, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether every column that could be compared is the same, to the byte."""
        return not self.differences


def replay_row(
    job: JobRecord,
    shards: Iterable[ShardRecord],
    row_index: int,
    settings: Settings,
    *,
    tell: Callable[[str], None] = lambda _text: None,
) -> ReplayReport:
    """Run one row again with the job's stored spec, alone in an engine of its own. ``tell`` hears what goes on.

    Raises:
        NotFoundError: no such row.
        ConflictError: the row has no result yet, never ran, or the model is not the one it ran on (``model_changed``).
        InputError: ``input_changed``: the row's file is not what it was.
        ModelError, EngineError: the engine cannot be loaded, or died.
    """
    stored = stored_row(job, shards, row_index)
    if stored["status"] in NEVER_RAN:
        raise ConflictError(f"row {row_index} never ran: it is {stored['status']}", code="row_never_ran")
    notes = _check_model(job)
    source = InputSource.reopen(job.fingerprint)
    row = _read_row(job, source, row_index)
    schema = result_schema(job.spec, source.schema)
    if row.request is not None:
        tell(f"loading {job.model}")
    if row.staged is not None:
        replayed = _run_stages(job, row, row.staged, settings)
    elif row.request is None:
        replayed = _unrun(job, row)
    else:
        replayed = _result(job, row, _run(job, row.request, settings))
    values = schema.to_batch([replayed]).to_pylist()[0]
    again = {name.removeprefix(schema.prefix): value for name, value in values.items()}
    columns = _columns(job, stored)
    differences = tuple(
        difference
        for name in columns
        if (difference := _compare(name, _comparable(name, stored), _comparable(name, again)))
    )
    return ReplayReport(job.id, row_index, stored["status"], columns, differences, notes)


def _check_model(job: JobRecord) -> tuple[str, ...]:
    """Refuse another model; say so where it cannot be told."""
    now = model_revision(job.model)
    if job.model_revision is None or now is None:
        return ("it is not known whether the model is the one that the row ran on",)
    if now != job.model_revision:
        raise ConflictError(
            f"the files of {job.model} are not those that job {job.id} ran on (revision {job.model_revision}, now "
            f"{now}); put the old ones back, or submit the job again",
            code="model_changed",
        )
    return ()


def _read_row(job: JobRecord, source: InputSource, row_index: int) -> RowInput:
    reader = row_reader(prompt_config(job.spec), source.schema)
    first, batch = next(iter(source.iter_batches(row_index, row_index + 1, reader.columns, 1)))
    return reader.read(batch, first)[0]


def _engine(job: JobRecord, settings: Settings) -> EngineProcess:
    return EngineProcess(
        settings.engine_factory,
        engine_config(job.spec, settings),
        stall_seconds=settings.stall_seconds,
        load_timeout_seconds=settings.load_seconds,
    )


def _run(job: JobRecord, request: Request, settings: Settings) -> Completion:
    with _engine(job, settings) as engine:
        return _ask(engine, request, job.spec.seed)


def _ask(engine: EngineProcess, request: Request, seed: int | None) -> Completion:
    engine.submit([replace(request, params=with_seed(request.params, seed, int(request.request_id)))])
    while not (found := engine.poll(_POLL_SECONDS)):
        pass
    return found[0]


def _run_stages(job: JobRecord, row: RowInput, staged: StagedRow, settings: Settings) -> ResultRow:
    """One stage after the other; a row that a filter ends at once needs no engine."""
    request = row.request
    if request is not None:
        with _engine(job, settings) as engine:
            while request is not None:
                request = staged.take(_ask(engine, request, staged.stage.seed(job.spec.seed)))
    assert staged.status is not None
    last = staged.last_answer
    return ResultRow(
        row.row_index,
        staged.status,
        job.model,
        1,
        output=last.text if last else None,
        finish_reason=last.finish_reason if last else None,
        error=staged.named_error,
        usage=staged.usage,
        extra=stage_values(staged, dict.fromkeys(staged.answers, (0, None))),
    )


def _unrun(job: JobRecord, row: RowInput) -> ResultRow:
    status = RowStatus.SKIPPED if row.error is None else RowStatus.ERRORED
    return ResultRow(row.row_index, status, job.model, 1, error=row.error, warnings=row.warnings)


def _result(job: JobRecord, row: RowInput, completion: Completion) -> ResultRow:
    is_answer = completion.status is RowStatus.SUCCEEDED
    return ResultRow(
        row.row_index,
        completion.status,
        job.model,
        1,
        output=completion.text if is_answer else None,
        finish_reason=completion.finish_reason,
        error=completion.error,
        usage=completion.usage,
        extra={"token_ids": completion.token_ids, **completion.extra},
    )


def _columns(job: JobRecord, stored: Mapping[str, Any]) -> tuple[str, ...]:
    """Columns that say what the answer was; of a row that failed, why."""
    stages = ("stopped_at", *(stage.name for stage in job.spec.stages)) if job.spec.stages else ()
    if stored["status"] == RowStatus.ERRORED:
        return ("status", "error", *stages)
    optional = stages or [name for name in job.spec.result_columns() if name not in NOT_ANSWERS and name in stored]
    usage = [] if stored["status"] == RowStatus.DEDUPLICATED else ["usage"]
    return ("status", "output", "finish_reason", *usage, *optional)


def _comparable(name: str, row: Mapping[str, Any]) -> Any:
    """What of a column depends on the row alone."""
    value = row[name]
    if name == "status":  # a copied answer is that of a row which succeeded
        return RowStatus.SUCCEEDED.value if value == RowStatus.DEDUPLICATED else value
    if name == "usage" and value:  # what the cache had does not
        return {"prompt_tokens": value["prompt_tokens"], "completion_tokens": value["completion_tokens"]}
    if name == "error" and value:
        return value["code"]
    if isinstance(value, dict) and "cost_usd" in value:  # the answer of a stage
        return {part: _comparable(part, value) for part in value if part not in ("cost_usd", "list_cost_usd")}
    return value


def _compare(column: str, stored: Any, replayed: Any) -> Difference | None:
    if _bytes_of(stored) == _bytes_of(replayed):
        return None
    if not isinstance(stored, str | list) or not isinstance(replayed, type(stored)) or column in ("status", "error"):
        return Difference(column, None, stored, replayed)
    pairs = zip(stored, replayed, strict=False)
    shorter = min(len(stored), len(replayed))
    position = next((i for i, (a, b) in enumerate(pairs) if _bytes_of(a) != _bytes_of(b)), shorter)
    if isinstance(stored, str):
        here = slice(max(0, position - _CONTEXT), position + _CONTEXT)
        return Difference(column, position, stored[here], replayed[here])
    return Difference(
        column, position, *(side[position] if position < len(side) else None for side in (stored, replayed))
    )


def _bytes_of(value: Any) -> Any:
    """A value in which floats are compared by their bits: equal are only the same, and NaN is equal to itself."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, list):
        return [_bytes_of(item) for item in value]
    if isinstance(value, dict):
        return {key: _bytes_of(item) for key, item in value.items()}
    return value
