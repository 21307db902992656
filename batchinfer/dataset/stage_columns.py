"""The columns of a job's stages: a struct for each answer, true or false for each filter."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.dataset.schema import ANSWER_FIELDS, FIXED_COLUMNS, OPTIONAL_COLUMNS, STOPPED_AT, USAGE_TYPE
from batchinfer.dataset.text import replace_in_tree
from batchinfer.errors import InvalidSpecError
from batchinfer.money import nanos_to_usd
from batchinfer.types import Completion, RowStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from batchinfer.dataset.staged_row import StagedRow
    from batchinfer.stages import Stage
    from batchinfer.types import RowError, Usage

_SEEN_USAGE = pa.struct([("prompt_tokens", pa.int64()), ("completion_tokens", pa.int64())])


def stage_field(stage: Stage, optional: Collection[str] = ()) -> pa.Field:
    """A stage's result column; ``optional`` are names of ``OPTIONAL_COLUMNS`` that its answers have."""
    if not stage.generates:
        return pa.field(stage.name, pa.bool_())
    more = [pa.field(name, OPTIONAL_COLUMNS[name]) for name in OPTIONAL_COLUMNS if name in optional]
    return pa.field(stage.name, pa.struct([*ANSWER_FIELDS, *more]))


def seen_field(stage: Stage, optional: Collection[str] = ()) -> pa.Field:
    """A stage as the templates after it see it: without what differs from run to run, such as its cost."""
    if not stage.generates:
        return pa.field(stage.name, pa.bool_())
    more = [pa.field(name, OPTIONAL_COLUMNS[name]) for name in OPTIONAL_COLUMNS if name in optional]
    return pa.field(stage.name, pa.struct([*ANSWER_FIELDS[:2], pa.field("usage", _SEEN_USAGE), *more]))


def check_names(stages: Iterable[Stage]) -> None:
    """Refuse stages named like another result column. Raises InvalidSpecError."""
    taken = {name.casefold() for name in (*FIXED_COLUMNS, STOPPED_AT)}
    for stage in stages:
        if stage.name.casefold() in taken:
            raise InvalidSpecError(
                f"stage {stage.name!r}: results have a column of that name already; choose another name", param="stages"
            )


def stage_values(row: StagedRow, costs: Mapping[str, tuple[int, int | None]]) -> dict[str, Any]:
    """Values of ``stopped_at`` and of the stages' columns, for a row that has ended.

    ``costs`` are nano-dollars of the stages that the engine has run: metered, and at list price.
    """
    columns = {plan.stage.name: plan.columns for plan in row.program.plans}
    values: dict[str, Any] = {STOPPED_AT: row.stopped_at, **row.verdicts}
    for name, completion in row.answers.items():
        values[name] = answer_value(completion, columns[name], *costs[name])
    if row.error is not None and row.stopped_at not in row.answers and row.stage.generates:
        values[row.stage.name] = answer_value(Completion("", RowStatus.ERRORED, error=row.error), (), 0, None)
    return values


def answer_value(
    completion: Completion, optional: Iterable[str], cost_nanos: int, list_nanos: int | None
) -> dict[str, Any]:
    """The struct of a stage that the engine has run."""
    is_answer = completion.status is RowStatus.SUCCEEDED
    extra = {"token_ids": list(completion.token_ids), **completion.extra}
    value = {
        "output": completion.text if is_answer else None,
        "finish_reason": completion.finish_reason and completion.finish_reason.value,
        "error": error_value(completion.error),
        "usage": usage_value(completion.usage),
        "cost_usd": nanos_to_usd(cost_nanos),
        "list_cost_usd": None if list_nanos is None else nanos_to_usd(list_nanos),
        **{name: extra.get(name) for name in optional},
    }
    return dict(replace_in_tree(value)[0])


def error_value(error: RowError | None) -> dict[str, Any] | None:
    """An error as its struct."""
    if error is None:
        return None
    return {"code": error.code.value, "type": error.type, "message": error.message, "retryable": error.retryable}


def count_stops(status: pa.Array, stopped_at: pa.Array) -> Counter[tuple[str, str]]:
    """How many rows ended at each stage, and how; those that went through all are left out."""
    text = pa.large_string()
    tab = pa.scalar("\t", text)  # no name of a stage has one
    pairs = pc.binary_join_element_wise(stopped_at.cast(text), status.cast(text), tab)
    found: Counter[tuple[str, str]] = Counter()
    for entry in pc.value_counts(pairs.drop_null()).to_pylist():
        stage, _, how = entry["values"].partition("\t")
        found[stage, how] += entry["counts"]
    return found


def stops_table(stops: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """The same for people and manifests: stage, then status."""
    table: dict[str, dict[str, int]] = {}
    for (stage, how), number in sorted(stops.items()):
        table.setdefault(stage, {})[how] = number
    return table


def usage_value(usage: Usage) -> dict[str, int]:
    """Token counts as their struct."""
    return {name: getattr(usage, name) for name in (field.name for field in USAGE_TYPE)}


def seen_value(completion: Completion, optional: Iterable[str], parsed: Any) -> dict[str, Any]:
    """A stage's answer as templates see it; ``parsed`` is the value of its JSON."""
    given = {"token_ids": list(completion.token_ids), **completion.extra}
    # Arrow gives each struct all of its fields
    extra = {
        name: pa.scalar(replace_in_tree(given.get(name))[0], OPTIONAL_COLUMNS[name]).as_py()
        for name in optional
        if name != "parsed"
    }
    return {
        "output": completion.text,
        "finish_reason": completion.finish_reason and completion.finish_reason.value,
        "usage": {
            "prompt_tokens": completion.usage.prompt_tokens,
            "completion_tokens": completion.usage.completion_tokens,
        },
        **extra,
        **({"parsed": parsed} if "parsed" in optional else {}),
    }
