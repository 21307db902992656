"""Planning: look at the input once, refuse what cannot work, and cut row ranges of about equal work."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from batchinfer.jobs.leases import ShardPlan
from batchinfer.model_kind import check_task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import pyarrow as pa

    from batchinfer.dataset.prompt import PromptConfig
    from batchinfer.dataset.roots import Roots
    from batchinfer.dataset.schema import ResultSchema
    from batchinfer.dataset.source import InputSource
    from batchinfer.dataset.stage_reader import Reader
    from batchinfer.jobs.ledger_files import BatchTerms
    from batchinfer.jobs.spec import JobSpec

SAMPLE_ROWS = 100
"""Rows whose prompts are rendered before anything runs."""
BYTES_PER_TOKEN = 4
"""Rough size of a token of text; shards need to be about equal only."""
MIN_SHARDS = 16
"""A large job is cut into at least so many shards, so that several workers can share it."""
MIN_SHARD_TOKENS = 2**14
MAX_SHARD_TOKENS = 2**20
"""At 3,500 tokens a second about five minutes: what a lost lease or a redelivered message may cost at most."""
MAX_SHARD_ROWS = 50_000
MAX_SHARDS_IN_ROW_GROUP = 64
"""To reach a row inside a row group, all before it are decoded: many shards in a huge one would decode it for ever."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What the ledger's ``commit_plan`` wants to know. ``shards`` tile ``[0, num_rows)`` in order."""

    num_rows: int
    fingerprint: Mapping[str, Any]
    warnings: tuple[str, ...]
    shards: Iterable[ShardPlan]


def prompt_config(spec: JobSpec, roots: Roots | None = None) -> PromptConfig:
    """The part of a spec that says how a row becomes a request.

    The job's seed is left out: the worker derives one for each row, so that equal prompts do not get equal samples.
    ``roots`` are where rows' adapters may be.
    """
    from batchinfer.dataset.prompt import PromptConfig  # noqa: PLC0415 -- pyarrow loads for planners and workers only
    from batchinfer.dataset.staged_row import StagePlan  # noqa: PLC0415 -- as above

    return PromptConfig(
        prompt_column=spec.prompt_column,
        messages_column=spec.messages_column,
        template=spec.template,
        system=spec.system,
        on_null=spec.on_null.value,
        params=spec.sampling_params().model_copy(update={"seed": None}),
        task=spec.task_options(),
        continuation_column=spec.continuation_column,
        document_column=spec.document_column,
        embedding_lists=spec.embedding_lists,
        adapter_folder=spec.adapter_folder,
        roots=roots,
        stages=tuple(
            StagePlan(stage, spec.stage_params(stage), spec.stage_columns(stage))
            if stage.generates
            else StagePlan(stage, spec.sampling_params())
            for stage in spec.stages
        ),
    )


def check_stage_templates(spec: JobSpec) -> None:
    """Refuse stages that no input could make work. Raises InvalidSpecError, with the stage at fault."""
    from batchinfer.dataset.staged_row import check_stages  # noqa: PLC0415 -- see prompt_config

    check_stages(spec.stages, {stage.name: spec.stage_columns(stage) for stage in spec.stages})


def result_schema(spec: JobSpec, input_schema: pa.Schema) -> ResultSchema:
    """The columns of a job's results.

    Raises:
        InvalidSpecError: they clash with the input's.
    """
    from batchinfer.dataset.schema import ResultSchema  # noqa: PLC0415 -- see prompt_config
    from batchinfer.dataset.stage_columns import stage_field  # noqa: PLC0415 -- see prompt_config

    stages = [stage_field(stage, spec.stage_columns(stage)) for stage in spec.stages]
    return ResultSchema(input_schema, spec.column_prefix, spec.result_columns(), stages)


def plan_job(spec: JobSpec, batch: BatchTerms | None = None, roots: Roots | None = None) -> JobPlan:
    """Read the input's metadata, check columns, ids and a sample of prompts, and cut shards.

    The lines of a ``batch`` are checked one by one before.

    Raises:
        InputError: the input cannot be read as asked.
        InvalidSpecError: the template is wrong, result columns clash with the input's, or the model cannot do the task.
    """
    from batchinfer.dataset.source import InputSource  # noqa: PLC0415 -- see prompt_config
    from batchinfer.dataset.stage_reader import row_reader  # noqa: PLC0415 -- see prompt_config
    from batchinfer.dataset.template import check_chat_template  # noqa: PLC0415 -- see prompt_config

    if roots is not None:
        for path in spec.inputs:
            roots.check_input(path)
    if batch is not None:
        _check_batch(spec, batch)
    check_task(spec.model, spec.task, has_labels=bool(spec.labels))
    source = InputSource.open(spec.inputs, spec.limit, roots)
    reader = row_reader(prompt_config(spec, roots), source.schema)
    result_schema(spec, source.schema)
    if spec.chat_template is not None:
        check_chat_template(spec.chat_template)
    id_column = spec.id_column or source.default_id_column
    if id_column is not None:
        _check_ids(spec, source, id_column, batch)
    return JobPlan(
        num_rows=source.num_rows,
        fingerprint=source.fingerprint(),
        warnings=(
            *source.warnings,
            *reader.warnings,
            *_missing_columns(spec, reader),
            *_sample_warnings(source, reader),
        ),
        shards=cut_shards(
            lambda: source.token_weights(reader.columns),
            max_tokens=spec.max_answer_tokens,
            shard_rows=spec.shard_rows,
        ),
    )


def _missing_columns(spec: JobSpec, reader: Reader) -> tuple[str, ...]:
    """For people: what rows ask for by columns of their own, and the job has no place for."""
    has = spec.result_columns()
    asked = {"tools": "tool_calls", "reasoning": "reasoning", "logprobs": "logprobs", "n": "samples"}
    return tuple(
        f"Rows have {column!r} of their own, but the results have no {result!r}: add --include-column {result}."
        for column, result in asked.items()
        if column in reader.columns and result not in has
    )


def _check_batch(spec: JobSpec, batch: BatchTerms) -> None:
    """Check the request lines of a batch. Raises BatchLinesError."""
    from batchinfer.dataset.batch_lines import check_batch_lines  # noqa: PLC0415 -- see prompt_config

    check_batch_lines(spec.inputs[0], endpoint=batch.endpoint, model=batch.model)


def _check_ids(spec: JobSpec, source: InputSource, id_column: str, batch: BatchTerms | None) -> None:
    """Raises InputError; of a batch, with the numbers of the lines."""
    from batchinfer.dataset.batch_lines import duplicate_id  # noqa: PLC0415 -- see prompt_config
    from batchinfer.dataset.ids import DuplicateIdError  # noqa: PLC0415 -- see prompt_config

    try:
        source.check_ids(id_column)
    except DuplicateIdError as error:
        if batch is None:
            raise
        raise duplicate_id(spec.inputs[0], error.first_row, error.second_row) from None


def cut_shards(
    weights: Callable[[], Iterator[tuple[int, int, int]]], *, max_tokens: int, shard_rows: int | None = None
) -> Iterator[ShardPlan]:
    """Cut shards of about equal estimated tokens.

    ``weights`` returns an iterator of ``(row_start, row_end, bytes of prompts)``, covering all rows in order; it is
    called twice. A row is estimated at its share of the bytes, plus ``max_tokens`` of answer.
    """
    total = sum(_est_tokens(end - start, size, max_tokens) for start, end, size in weights())
    target = min(max(total // MIN_SHARDS, MIN_SHARD_TOKENS), MAX_SHARD_TOKENS)
    index = row_start = num_rows = tokens = 0
    for start, end, size in weights():
        per_row = max(1, _est_tokens(end - start, size, max_tokens) // max(1, end - start))
        least_rows = (end - start) // MAX_SHARDS_IN_ROW_GROUP
        most_rows = shard_rows or max(MAX_SHARD_ROWS, least_rows)
        most_tokens = sys.maxsize if shard_rows else max(target, least_rows * per_row)
        row = start
        while row < end:
            room = min(most_rows - num_rows, (most_tokens - tokens) // per_row)
            if room < 1 and num_rows:
                yield ShardPlan(index, row_start, row, tokens)
                index, row_start, num_rows, tokens = index + 1, row, 0, 0
                continue
            taken = min(max(1, room), end - row)
            row, num_rows, tokens = row + taken, num_rows + taken, tokens + taken * per_row
    if num_rows:
        yield ShardPlan(index, row_start, row_start + num_rows, tokens)


def _est_tokens(num_rows: int, num_bytes: int, max_tokens: int) -> int:
    return num_bytes // BYTES_PER_TOKEN + num_rows * max_tokens


def _sample_warnings(source: InputSource, reader: Reader) -> tuple[str, ...]:
    """Say what the first rows tell: a person should hear at once that every prompt is empty, not after a night."""
    codes: dict[str, int] = {}
    num_rows = 0
    for first, batch in islice(source.iter_batches(0, SAMPLE_ROWS, reader.columns), SAMPLE_ROWS):
        for row in reader.read(batch, first):
            num_rows += 1
            if row.error is not None:
                codes[row.error.code] = codes.get(row.error.code, 0) + 1
    return tuple(f"{count} of the first {num_rows} rows cannot run: {code}" for code, count in sorted(codes.items()))
