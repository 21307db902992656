"""The explicit schema of results: never inferred, so that an all-null first batch decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from batchinfer.dataset.text import REPLACED, replace_surrogates
from batchinfer.errors import InvalidSpecError
from batchinfer.types import FinishReason, RowError, RowStatus, Usage

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

ERROR_TYPE = pa.struct(
    [
        ("code", pa.large_string()),
        ("type", pa.large_string()),
        ("message", pa.large_string()),
        ("retryable", pa.bool_()),
    ]
)
USAGE_TYPE = pa.struct(
    [("prompt_tokens", pa.int64()), ("cached_tokens", pa.int64()), ("completion_tokens", pa.int64())]
)
USD_TYPE = pa.decimal128(18, 9)
_MAX_NANOS = 10**18 - 1

ROW_INDEX = "row_index"
STATUS = "status"
WARNINGS = "warnings"
STOPPED_AT = "stopped_at"
ANSWER_FIELDS = (
    pa.field("output", pa.large_string()),
    pa.field("finish_reason", pa.large_string()),
    pa.field("error", ERROR_TYPE),
    pa.field("usage", USAGE_TYPE),
    pa.field("cost_usd", USD_TYPE),
    pa.field("list_cost_usd", USD_TYPE),
)
"""What every answer has: that of a row, and that of each stage."""
_FIELDS = (
    pa.field(ROW_INDEX, pa.int64(), nullable=False),
    pa.field(STATUS, pa.large_string(), nullable=False),
    *ANSWER_FIELDS,
    pa.field("model", pa.large_string()),
    pa.field("attempt", pa.int64()),
    pa.field(WARNINGS, pa.list_(pa.large_string())),
)
_TOKEN = (("token_id", pa.int32()), ("token", pa.large_string()), ("logprob", pa.float32()))
LOGPROBS_TYPE = pa.list_(pa.struct([*_TOKEN, ("rank", pa.int32()), ("top", pa.list_(pa.struct(_TOKEN)))]))
TOOL_CALLS_TYPE = pa.list_(
    pa.struct(
        [
            ("id", pa.large_string()),
            ("type", pa.large_string()),
            ("function", pa.struct([("name", pa.large_string()), ("arguments", pa.large_string())])),
        ]
    )
)
SAMPLES_TYPE = pa.list_(
    pa.struct(
        [
            ("sample_index", pa.int32()),
            ("output", pa.large_string()),
            ("finish_reason", pa.large_string()),
            ("token_ids", pa.list_(pa.int32())),
            ("cumulative_logprob", pa.float64()),
            ("logprobs", LOGPROBS_TYPE),
            ("reasoning", pa.large_string()),
            ("reasoning_tokens", pa.int64()),
            ("tool_calls", TOOL_CALLS_TYPE),
        ]
    )
)
CHOICES_TYPE = pa.list_(
    pa.struct(
        [
            ("logprob", pa.float64()),
            ("num_tokens", pa.int64()),
            ("num_bytes", pa.int64()),
            ("logprob_per_token", pa.float64()),
            ("logprob_per_byte", pa.float64()),
            ("is_greedy", pa.bool_()),
        ]
    )
)
BEST_CHOICE_TYPE = pa.struct([("sum", pa.int32()), ("per_token", pa.int32()), ("per_byte", pa.int32())])
EMBEDDING_TYPE = pa.list_(pa.float32())
SCORES_TYPE = pa.list_(pa.struct([("label", pa.large_string()), ("probability", pa.float64())]))
RANKING_TYPE = pa.list_(pa.struct([("index", pa.int32()), ("score", pa.float64()), ("rank", pa.int32())]))
ROW_KEY = "row_key"
REUSED_FROM = "reused_from"
OPTIONAL_COLUMNS: dict[str, pa.DataType] = {
    "token_ids": pa.list_(pa.int32()),
    "logprobs": LOGPROBS_TYPE,
    "cumulative_logprob": pa.float64(),
    "prompt_logprobs": LOGPROBS_TYPE,
    "reasoning": pa.large_string(),
    "reasoning_tokens": pa.int64(),
    "tool_calls": TOOL_CALLS_TYPE,
    "samples": SAMPLES_TYPE,
    "parsed": pa.large_string(),
    "choice_scores": CHOICES_TYPE,
    "best_choice": BEST_CHOICE_TYPE,
    "logprob": pa.float64(),
    "perplexity": pa.float64(),
    "embedding": EMBEDDING_TYPE,
    "embeddings": pa.list_(EMBEDDING_TYPE),
    "label": pa.large_string(),
    "scores": SCORES_TYPE,
    "score": pa.float64(),
    "ranking": RANKING_TYPE,
    # what decides the row's answer, in 16 bytes; the row that was computed, its tokens and what it cost
    ROW_KEY: pa.binary(16),
    # in a job of stages: the stage that filtered the row, or failed; null where it went through
    STOPPED_AT: pa.large_string(),
    REUSED_FROM: pa.struct(
        [("job_id", pa.large_string()), ("row_index", pa.int64()), ("usage", USAGE_TYPE), ("cost_usd", USD_TYPE)]
    ),
}
"""Result columns that a job has only if its spec asks for them (:meth:`JobSpec.result_columns`), in the order in which
they are written. Their values come from :attr:`ResultRow.extra`, null where a row has none."""
FIXED_COLUMNS = tuple(field.name for field in _FIELDS)
"""Result columns that every job has."""
RESULT_COLUMNS = (*FIXED_COLUMNS, *OPTIONAL_COLUMNS)
"""All result columns that there can be."""
METADATA_PREFIX = "batchinfer."


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One row's outcome. Costs are nano-dollars; ``attempt`` is the attempt id that wrote it.

    ``output`` is None unless the row succeeded or is a copy of one that did. ``clamped_max_tokens`` becomes the warning ``max_tokens_clamped:N``.
    """

    row_index: int
    status: RowStatus
    model: str
    attempt: int
    output: str | None = None
    finish_reason: FinishReason | None = None
    error: RowError | None = None
    usage: Usage = field(default_factory=Usage)
    cost_nanos: int = 0
    list_cost_nanos: int | None = None
    clamped_max_tokens: int | None = None
    warnings: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Values of optional columns, by name; text in them must be representable (see ``replace_surrogates``)."""
    saved_nanos: int = 0
    saved_list_nanos: int = 0
    """What a deduplicated row did not cost, metered and at list price; no columns."""


class ResultSchema:
    """Columns added to the input's, their names behind ``prefix``; ``optional`` are names of :data:`OPTIONAL_COLUMNS`.

    ``stages`` are the columns of a job's stages, at the end; their values come from :attr:`ResultRow.extra`, too.

    Raises:
        InvalidSpecError: result columns clash with the input's; the message names them and the way out (a prefix).
    """

    def __init__(
        self,
        input_schema: pa.Schema,
        prefix: str = "",
        optional: Collection[str] = (),
        stages: Sequence[pa.Field] = (),
    ) -> None:
        self.prefix = prefix
        self.optional = [name for name in OPTIONAL_COLUMNS if name in optional]
        self.input_schema = input_schema
        self._extra = [*(pa.field(name, OPTIONAL_COLUMNS[name]) for name in self.optional), *stages]
        fields = [*_FIELDS, *self._extra]
        self.part_schema: pa.Schema = pa.schema([f.with_name(prefix + f.name) for f in fields])
        """``row_index`` and the other result columns."""
        taken = {name.casefold() for name in input_schema.names}
        clash = [name for name in self.part_schema.names if name.casefold() in taken]
        if clash:
            names = ", ".join(map(repr, clash))
            raise InvalidSpecError(
                f"the input already has the column(s) {names}, which results are written to; "
                "choose a --column-prefix such as 'bi_', or rename them",
                param="column_prefix",
            )
        self.output_schema: pa.Schema = pa.schema([*input_schema, *self.part_schema])
        """Input columns, then result columns."""

    def name(self, column: str) -> str:
        """A result column's name in the file."""
        return self.prefix + column

    def to_batch(self, rows: Sequence[ResultRow]) -> pa.RecordBatch:
        """Rows as a batch of :attr:`part_schema`; text that UTF-8 cannot represent becomes U+FFFD and is flagged.

        Raises:
            ValueError: a cost of a billion dollars or more.
        """
        outputs, warnings = _outputs_and_warnings(rows)
        columns = [
            pa.array([row.row_index for row in rows], pa.int64()),
            pa.array([row.status.value for row in rows], pa.large_string()),
            pa.array(outputs, pa.large_string()),
            pa.array([row.finish_reason and row.finish_reason.value for row in rows], pa.large_string()),
            _errors([row.error for row in rows]),
            _usages([row.usage for row in rows]),
            _usd([row.cost_nanos for row in rows]),
            _usd([row.list_cost_nanos for row in rows]),
            pa.array([replace_surrogates(row.model)[0] for row in rows], pa.large_string()),
            pa.array([row.attempt for row in rows], pa.int64()),
            pa.array(warnings, pa.list_(pa.large_string())),
        ]
        columns += [pa.array([row.extra.get(field.name) for row in rows], field.type) for field in self._extra]
        return pa.RecordBatch.from_arrays(columns, schema=self.part_schema)


def _outputs_and_warnings(rows: Iterable[ResultRow]) -> tuple[list[str | None], list[list[str] | None]]:
    """Texts as they can be stored, and each row's warnings (None for none)."""
    outputs: list[str | None] = []
    warnings: list[list[str] | None] = []
    for row in rows:
        notes = list(row.warnings)
        if row.clamped_max_tokens is not None:
            notes.append(f"max_tokens_clamped:{row.clamped_max_tokens}")
        text = row.output
        if text is not None:
            text, replaced = replace_surrogates(text)
            if replaced and REPLACED not in notes:
                notes.append(REPLACED)
        outputs.append(text)
        warnings.append(notes or None)
    return outputs, warnings


def _errors(errors: Sequence[RowError | None]) -> pa.Array:
    absent = pa.array([error is None for error in errors], pa.bool_())
    children = [
        pa.array([error and error.code.value for error in errors], pa.large_string()),
        pa.array([error and error.type for error in errors], pa.large_string()),
        pa.array([error and replace_surrogates(error.message)[0] for error in errors], pa.large_string()),
        pa.array([None if error is None else error.retryable for error in errors], pa.bool_()),
    ]
    return pa.StructArray.from_arrays(children, fields=list(ERROR_TYPE), mask=absent)


def _usages(usages: Sequence[Usage]) -> pa.Array:
    children = [pa.array([getattr(usage, f.name) for usage in usages], f.type) for f in USAGE_TYPE]
    return pa.StructArray.from_arrays(children, fields=list(USAGE_TYPE))


def _usd(nanos: Sequence[int | None]) -> pa.Array:
    """Nano-dollars are the unscaled integers of ``decimal128(18, 9)``: copied as such, exact and without Decimal objects."""
    values = np.array([0 if value is None else value for value in nanos], np.int64)
    if len(values) and int(np.abs(values).max()) > _MAX_NANOS:
        raise ValueError("a row's cost does not fit into decimal128(18, 9)")
    wide = np.empty((len(values), 2), np.int64)
    wide[:, 0] = values
    wide[:, 1] = values >> 63
    validity = pa.array([value is not None for value in nanos], pa.bool_()).buffers()[1] if None in nanos else None
    return pa.Array.from_buffers(USD_TYPE, len(values), [validity, pa.py_buffer(wide.tobytes())])


def footer_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Key-value pairs for a file's footer."""
    return {METADATA_PREFIX + key: value for key, value in (metadata or {}).items()}


def own_metadata(schema: pa.Schema) -> dict[str, str]:
    """What :func:`footer_metadata` put into the footer of a file with this schema."""
    pairs = ((key.decode(), value.decode()) for key, value in (schema.metadata or {}).items())
    return {key.removeprefix(METADATA_PREFIX): value for key, value in pairs if key.startswith(METADATA_PREFIX)}
