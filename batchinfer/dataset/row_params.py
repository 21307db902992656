"""Sampling parameters of one row: the job's, overridden by columns or by a request's body."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pydantic import ValidationError

from batchinfer.dataset.input_schema import is_text, logical_type
from batchinfer.dataset.nulls import failure
from batchinfer.dataset.values import value_at
from batchinfer.guided import GUIDES
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

STRUCT_COLUMNS = ("sampling_params", "params")
ALIASES = {
    "max_completion_tokens": "max_tokens",
    "response_format": "json_schema",
    "guided_json": "json_schema",
}
IN_STRUCTS_ONLY = frozenset({"n"})
"""Names that too many tables use for something else: as a column of its own, ``n`` is data."""
_CACHE_SIZE = 1024


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _is_list(kind: pa.DataType, is_item: Callable[[pa.DataType], bool]) -> bool:
    is_any_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_any_list and is_item(logical_type(kind.value_type))


def _is_text_or_list(kind: pa.DataType) -> bool:
    return is_text(kind) or _is_list(kind, is_text)


def _is_text_list(kind: pa.DataType) -> bool:
    return _is_list(kind, is_text)


def _is_integer_list(kind: pa.DataType) -> bool:
    return _is_list(kind, pa.types.is_integer)


def _is_bias(kind: pa.DataType) -> bool:
    """JSON text, or a map from token id to bias."""
    if pa.types.is_map(kind):
        return bool(pa.types.is_integer(kind.key_type)) and _is_number(kind.item_type)
    return is_text(kind)


def _is_schema(kind: pa.DataType) -> bool:
    """JSON text, or a struct that is written as JSON."""
    return is_text(kind) or bool(pa.types.is_struct(kind))


def _is_tools(kind: pa.DataType) -> bool:
    """JSON text, or a list of structs."""
    return is_text(kind) or _is_list(kind, pa.types.is_struct)


def _is_table(kind: pa.DataType) -> bool:
    """JSON text, a struct or a map."""
    return is_text(kind) or pa.types.is_struct(kind) or pa.types.is_map(kind)


# Whole-number parameters may be in a float column too: that is what pandas makes of integers with gaps.
_MATCHES: dict[str, Callable[[pa.DataType], bool]] = {
    **dict.fromkeys(SamplingParams.model_fields, _is_number),
    **dict.fromkeys(("stop", "bad_words"), _is_text_or_list),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), _is_integer_list),
    "logit_bias": _is_bias,
    "json_schema": _is_schema,
    **dict.fromkeys(("guided_regex", "guided_grammar"), is_text),
    "guided_choice": _is_text_list,
    "tools": _is_tools,
    "chat_template_kwargs": _is_table,
    **dict.fromkeys(("tool_choice", "tool_parser", "chat_template", "truncate", "adapter"), is_text),
    **dict.fromkeys(
        (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "echo",
            "continue_final_message",
            "retry_truncated",
            "reasoning",
            "parallel_tool_calls",
        ),
        pa.types.is_boolean,
    ),
}


def _parameter(name: str) -> str | None:
    name = ALIASES.get(name, name)
    return name if name in _MATCHES else None


class ParamReader:
    """Knows which columns override parameters.

    A column counts if it is named like a parameter, its type can hold one, and the prompt does not use it (a template
    over weather data may well have a ``temperature``), but those of :data:`IN_STRUCTS_ONLY`. A struct column ``sampling_params`` or ``params`` counts if each
    of its fields does; its values win over single columns.
    """

    def __init__(self, schema: pa.Schema, defaults: SamplingParams, used_by_prompt: Collection[str]) -> None:
        self._defaults = defaults
        self._base = defaults.model_dump()
        self._cache: dict[tuple[tuple[str, Any], ...], SamplingParams] = {}
        self._single: dict[str, str] = {}
        self._structs: list[str] = []
        warnings = []
        for field in schema:
            if field.name in used_by_prompt or not _looks_like_params(field):
                continue
            if _fits(field):
                self._add(field)
            else:
                warnings.append(
                    f"Column {field.name!r} ({field.type}) cannot hold sampling parameters and is not used."
                )
        self.columns = (*self._single, *self._structs)
        if self.columns:
            warnings.append(f"Sampling parameters come from the column(s) {', '.join(map(repr, self.columns))}.")
        self.warnings = tuple(warnings)

    def _add(self, field: pa.Field) -> None:
        name = _parameter(field.name)
        if name is None:
            self._structs.append(field.name)
        else:
            self._single[field.name] = name

    def read(self, values: Mapping[str, list[Any]], position: int, overrides: Mapping[str, Any]) -> SamplingParams:
        """Parameters of one row; ``overrides`` (of a request's body) win over columns. A null is no override.

        Raises:
            RowFailure: ``invalid_params``, naming the parameter, the value and the rule.
        """
        if not self.columns and not overrides:
            return self._defaults
        chosen = {name: value_at(values, column, position) for column, name in self._single.items()}
        for column in self._structs:
            entries = (value_at(values, column, position) or {}).items()
            chosen |= {ALIASES.get(name, name): value for name, value in entries if value is not None}
        if "json_schema" in chosen:
            chosen["json_schema"] = _without_nulls(chosen["json_schema"])
        chosen |= overrides
        return self._build({name: value for name, value in chosen.items() if value is not None})

    def _build(self, chosen: dict[str, Any]) -> SamplingParams:
        key = tuple((name, _frozen(value)) for name, value in sorted(chosen.items()))
        known = self._cache.get(key)
        if known is not None:
            return known
        params = self._validated(chosen)
        if len(self._cache) < _CACHE_SIZE:
            self._cache[key] = params
        return params

    def _validated(self, chosen: dict[str, Any]) -> SamplingParams:
        base = self._base
        if any(name in chosen for name in GUIDES):  # a row's own replaces the job's, of whichever kind that is
            base = {name: value for name, value in base.items() if name not in GUIDES}
        try:
            return SamplingParams(**{**base, **chosen})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "sampling parameters"
            given = f" (got {first['input']!r:.80})" if first["loc"] else ""
            reason = first["msg"].removeprefix("Value error, ")
            code = ErrorCode.INVALID_SCHEMA if where in GUIDES else ErrorCode.INVALID_PARAMS
            raise failure(code, f"{where}: {reason}{given}") from None


def _without_nulls(value: Any) -> Any:
    """A struct without the fields that are null: Arrow gives every struct all of the column's fields."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def _frozen(value: Any) -> Any:
    """A value that can be part of a key; unlike Python, it keeps 1, 1.0 and True apart."""
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((name, _frozen(item)) for name, item in value.items())
    return type(value).__name__, value


def _looks_like_params(field: pa.Field) -> bool:
    """By its name; a struct column also needs one field named like a parameter."""
    if _parameter(field.name):
        return field.name not in IN_STRUCTS_ONLY
    return (
        field.name in STRUCT_COLUMNS
        and pa.types.is_struct(field.type)
        and any(_parameter(child.name) for child in field.type)
    )


def _fits(field: pa.Field) -> bool:
    kind = logical_type(field.type)
    name = _parameter(field.name)
    if name is not None:
        return bool(pa.types.is_null(kind) or _MATCHES[name](kind))
    return all(_parameter(child.name) is not None and _fits(child) for child in kind)
