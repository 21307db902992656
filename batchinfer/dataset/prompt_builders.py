"""The ways in which a row has its prompt: a text column, a messages column, a template, a request's body."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from batchinfer.dataset.input_schema import is_text, logical_type
from batchinfer.dataset.jsonl_source import BODY_ROLE
from batchinfer.dataset.messages import parse_messages
from batchinfer.dataset.nulls import OnNull, failure, null_outcome
from batchinfer.dataset.openai_body import body_params, parse_body
from batchinfer.dataset.template import PromptTemplate
from batchinfer.dataset.text import replace_in_tree, replace_surrogates
from batchinfer.dataset.values import as_text, value_at
from batchinfer.errors import InputError
from batchinfer.types import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchinfer.types import Message


@dataclass(frozen=True, slots=True)
class BuiltPrompt:
    """A row's prompt: either text or messages; parameters that came with it; whether text was replaced."""

    prompt: str | None = None
    messages: list[Message] | None = None
    params: dict[str, Any] = field(default_factory=dict)
    texts: list[str] | None = None
    """Texts to embed, in place of a prompt."""
    token_ids: list[list[int]] | None = None
    """Texts to embed as their tokens, in place of a prompt."""
    task: dict[str, Any] = field(default_factory=dict)
    """Options of the job's task that the row has of its own."""
    replaced: bool = False


class PromptBuilder(Protocol):
    """Builds the prompt of one row from its columns' values."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that it reads."""

    def build(self, values: Mapping[str, list[Any]], position: int) -> BuiltPrompt:
        """Build it.

        Raises:
            RowFailure: the row cannot run.
            RowSkipped: the row is to be skipped.
        """


class PromptColumn:
    """Text from one column of strings or of UTF-8 bytes."""

    def __init__(self, name: str, on_null: OnNull) -> None:
        self.columns = (name,)
        self._on_null = on_null

    def build(self, values: Mapping[str, list[Any]], position: int) -> BuiltPrompt:
        """See :class:`PromptBuilder`."""
        (name,) = self.columns
        value = value_at(values, name, position)
        if value is None:
            if self._on_null == "empty":
                return BuiltPrompt(prompt="")
            raise null_outcome(self._on_null, name)
        return BuiltPrompt(prompt=as_text(value, name))


class MessagesColumn:
    """Messages from one column: list<struct<role, content>>, list<map>, or JSON text."""

    def __init__(self, name: str, on_null: OnNull) -> None:
        self.columns = (name,)
        self._on_null = on_null

    def build(self, values: Mapping[str, list[Any]], position: int) -> BuiltPrompt:
        """See :class:`PromptBuilder`."""
        (name,) = self.columns
        value = value_at(values, name, position)
        if value is None:
            if self._on_null == "empty":
                raise failure(ErrorCode.EMPTY_PROMPT, f"field {name!r} is null")
            raise null_outcome(self._on_null, name)
        text = as_text(value, name) if isinstance(value, bytes) else value
        messages, replaced = replace_in_tree(parse_messages(text, self._on_null))
        return BuiltPrompt(messages=messages, replaced=replaced)


class FirstNotNull:
    """A row's messages; its prompt where they are null."""

    def __init__(self, messages: MessagesColumn, prompt: PromptColumn) -> None:
        self._messages, self._prompt = messages, prompt
        self.columns = (*messages.columns, *prompt.columns)

    def build(self, values: Mapping[str, list[Any]], position: int) -> BuiltPrompt:
        """See :class:`PromptBuilder`."""
        has_messages = values[self._messages.columns[0]][position] is not None
        return (self._messages if has_messages else self._prompt).build(values, position)


class TemplatePrompt:
    """Text that a template makes of the row."""

    def __init__(self, template: PromptTemplate) -> None:
        self.columns = template.columns
        self._template = template

    def build(self, values: Mapping[str, list[Any]], position: int) -> BuiltPrompt:
        """See :class:`PromptBuilder`."""
        text, replaced = replace_surrogates(self._template.render(values, position))
        return BuiltPrompt(prompt=text, replaced=replaced)


class OpenAIBody:
    """Prompt and parameters from the body of an OpenAI batch request."""

    def __init__(self, name: str, on_null: OnNull) -> None:
        self.columns = (name,)
        self._on_null = on_null

    def build(self, values: Mapping[str, list[Any]], position: int) -> BuiltPrompt:
        """See :class:`PromptBuilder`."""
        body, replaced = parse_body(value_at(values, self.columns[0], position))
        params = body_params(body)
        if body.get("messages") is not None:
            return BuiltPrompt(
                messages=parse_messages(body["messages"], self._on_null), params=params, replaced=replaced
            )
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            what = "neither messages nor a prompt" if prompt is None else "a prompt that is not one string"
            raise failure(ErrorCode.INVALID_MESSAGES, f"the body has {what}")
        return BuiltPrompt(prompt=prompt, params=params, replaced=replaced)


def choose_builder(
    schema: pa.Schema,
    *,
    prompt_column: str | None,
    messages_column: str | None,
    template: str | None,
    on_null: OnNull,
) -> PromptBuilder:
    """The builder that was asked for, else what the columns offer: a body, ``messages``, ``prompt``.

    Raises:
        InputError: no such column, or not of a type to read a prompt from; nothing to choose.
        InvalidSpecError: the template is wrong.
    """
    if template is not None:
        return TemplatePrompt(PromptTemplate(template, schema, on_null))
    if messages_column is not None:
        _require(schema, messages_column, "messages_column", ok=_has_messages(schema, messages_column))
        return MessagesColumn(messages_column, on_null)
    if prompt_column is not None:
        _require(schema, prompt_column, "prompt_column", ok=_has_text(schema, prompt_column))
        return PromptColumn(prompt_column, on_null)
    return _default_builder(schema, on_null)


def body_column(schema: pa.Schema) -> str | None:
    """The column of request bodies, if there is one."""
    return next((column.name for column in schema if (column.metadata or {}).items() >= BODY_ROLE.items()), None)


def _default_builder(schema: pa.Schema, on_null: OnNull) -> PromptBuilder:
    if (body := body_column(schema)) is not None:
        return OpenAIBody(body, on_null)
    messages = MessagesColumn("messages", on_null) if _has_messages(schema, "messages") else None
    prompt = PromptColumn("prompt", on_null) if _has_text(schema, "prompt") else None
    if messages is not None and prompt is not None:
        return FirstNotNull(messages, prompt)
    chosen = messages or prompt
    if chosen is None:
        raise InputError(
            "nothing to read a prompt from: there is no text column 'prompt' and no column 'messages'; "
            f"name one with --prompt-column, --messages-column or --template; the input has: {_columns(schema)}",
            param="prompt_column",
        )
    return chosen


def _require(schema: pa.Schema, name: str, param: str, *, ok: bool) -> None:
    if name not in schema.names:
        raise InputError(f"the input has no column {name!r}; it has: {_columns(schema)}", param=param)
    if not ok:
        wanted = "text" if param == "prompt_column" else "JSON text or a list of structs with role and content"
        raise InputError(f"column {name!r} is {schema.field(name).type}, but {param} needs {wanted}", param=param)


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{column.name} ({column.type})" for column in schema)


def _has_text(schema: pa.Schema, name: str) -> bool:
    return name in schema.names and is_text(schema.field(name).type)


def _has_messages(schema: pa.Schema, name: str) -> bool:
    """Text that may be JSON, or a list of structs that have a role and a content, or of maps."""
    if name not in schema.names:
        return False
    kind = logical_type(schema.field(name).type)
    if is_text(kind):
        return True
    if not pa.types.is_nested(kind) or pa.types.is_struct(kind) or pa.types.is_map(kind):
        return False
    item = logical_type(kind.value_type)
    if pa.types.is_struct(item):
        return {"role", "content"} <= {child.name for child in item}
    return bool(pa.types.is_map(item))
