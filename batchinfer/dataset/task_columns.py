"""What a task other than generating reads beside a row's prompt: continuations, choices, documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batchinfer.dataset.input_schema import is_text, logical_type
from batchinfer.dataset.nulls import failure, null_outcome
from batchinfer.dataset.text import replace_surrogates
from batchinfer.dataset.values import as_text, value_at
from batchinfer.errors import InputError
from batchinfer.tasks import Task
from batchinfer.types import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchinfer.dataset.prompt import PromptConfig
    from batchinfer.dataset.prompt_builders import BuiltPrompt

_CONTINUATIONS = ("continuation", "choices")
_DOCUMENTS = ("document", "documents")


class TaskReader:
    """Reads what a request's ``task`` says; nothing, and at no cost, where text is generated.

    Raises:
        InputError: a column that the task needs does not exist, or holds neither text nor lists of text.
    """

    def __init__(self, config: PromptConfig, schema: pa.Schema) -> None:
        self._options = config.task
        self._on_null = config.on_null
        self._plain = self._options.request()
        self._texts_column = self._choose(config, schema)
        self.columns: tuple[str, ...] = () if self._texts_column is None else (self._texts_column,)
        self.prompt_column = config.prompt_column
        """Where the prompt is: of a query, by default in ``query``."""
        if self._options.task is Task.RERANK and config.prompt_column is None and config.template is None:
            self.prompt_column = "query"

    def _choose(self, config: PromptConfig, schema: pa.Schema) -> str | None:
        task = self._options.task
        if task is Task.SCORE:
            return find_column(
                schema, config.continuation_column, _CONTINUATIONS, "continuation_column", is_needed=False
            )
        if task is Task.RERANK:
            return find_column(schema, config.document_column, _DOCUMENTS, "document_column", is_needed=True)
        return None

    def read(self, values: Mapping[str, list[Any]], position: int, built: BuiltPrompt) -> dict[str, Any] | None:
        """The ``task`` of a row's request.

        Raises:
            RowFailure, RowSkipped: what it needs is null or no text.
        """
        if self._options.generates:
            return None
        task = {**self._plain, **built.task} if built.task else self._plain
        if built.texts is not None:
            return {**task, "texts": built.texts}
        if built.token_ids is not None:
            return {**task, "token_ids": built.token_ids}
        if self._texts_column is None:
            return task
        return {**task, "texts": self._texts(values, self._texts_column, position)}

    def _texts(self, values: Mapping[str, list[Any]], name: str, position: int) -> list[str]:
        value = value_at(values, name, position)
        if value is None:
            if self._on_null == "empty":
                raise failure(ErrorCode.NO_CONTINUATION, f"field {name!r} is null")
            raise null_outcome(self._on_null, name)
        items = value if isinstance(value, list) else [value]
        if any(item is None for item in items):
            raise failure(ErrorCode.NO_CONTINUATION, f"item {items.index(None)} of field {name!r} is null")
        return [replace_surrogates(as_text(item, name))[0] for item in items]


def find_column(
    schema: pa.Schema, given: str | None, usual: tuple[str, ...], param: str, *, is_needed: bool
) -> str | None:
    """The column of texts that was named as ``param``, else the first usual one; None if there is none and none is needed.

    Raises:
        InputError: it does not exist, or holds neither text nor lists of text.
    """
    name = given or next((name for name in usual if name in schema.names), None)
    if name is None:
        if not is_needed:
            return None
        raise InputError(
            f"the input has no column {' or '.join(map(repr, usual))}; name one with --{param.replace('_', '-')}",
            param=param,
        )
    if name not in schema.names:
        raise InputError(f"the input has no column {name!r}; it has: {', '.join(schema.names)}", param=param)
    if not is_text_or_list(schema.field(name).type):
        raise InputError(
            f"column {name!r} is {schema.field(name).type}, but {param} needs text or a list of texts", param=param
        )
    return name


def is_text_or_list(kind: pa.DataType) -> bool:
    """Whether values are texts, or lists of them."""
    logical = logical_type(kind)
    if pa.types.is_list(logical) or pa.types.is_large_list(logical) or pa.types.is_fixed_size_list(logical):
        return is_text(logical.value_type)
    return is_text(logical)
