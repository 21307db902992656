"""What only the task ``embed`` reads: bodies of ``/v1/embeddings`` requests, and columns with lists of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

from batchinfer.dataset.nulls import OnNull, failure, null_outcome
from batchinfer.dataset.openai_body import NO_EFFECT, parse_body
from batchinfer.dataset.prompt_builders import BuiltPrompt, body_column
from batchinfer.dataset.task_columns import find_column
from batchinfer.dataset.text import replace_surrogates
from batchinfer.dataset.values import as_text, value_at
from batchinfer.errors import InputError
from batchinfer.tasks import Task
from batchinfer.types import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from batchinfer.dataset.prompt import PromptConfig
    from batchinfer.dataset.prompt_builders import PromptBuilder

MAX_TEXTS = 2048
"""Texts of one row, as with OpenAI: a row's vectors are held in memory together."""
ENCODING_FORMATS = ("float", "base64")
_FIELDS = frozenset({"model", "input", "encoding_format", "dimensions"}) | NO_EFFECT
_USUAL = ("texts", "prompt")


def embedding_builder(config: PromptConfig, schema: pa.Schema) -> PromptBuilder | None:
    """The builder of such rows; None where rows have prompts like those of any task.

    Raises:
        InputError: no such column, or not one of texts; an option that requests have no place for.
    """
    if config.task.task is not Task.EMBED:
        return None
    is_default = config.prompt_column is None and config.messages_column is None and config.template is None
    body = body_column(schema) if is_default else None
    if body is not None:
        if config.system is not None:
            raise InputError("embedding requests are no chats: leave system out", param="system")
        return EmbeddingBody(body, takes_lists=config.embedding_lists)
    if not config.embedding_lists:
        return None
    name = find_column(schema, config.prompt_column, _USUAL, "prompt_column", is_needed=True)
    assert name is not None
    return TextsColumn(name, config.on_null)


class TextsColumn:
    """Texts to embed from a column of lists of text, or of text: then each list has one."""

    def __init__(self, name: str, on_null: OnNull) -> None:
        self.columns = (name,)
        self._on_null = on_null

    def build(self, values: Mapping[str, list[Any]], position: int) -> BuiltPrompt:
        """See :class:`~batchinfer.dataset.prompt_builders.PromptBuilder`."""
        (name,) = self.columns
        value = value_at(values, name, position)
        if value is None:
            if self._on_null == "empty":
                raise failure(ErrorCode.EMPTY_PROMPT, f"field {name!r} is null")
            raise null_outcome(self._on_null, name)
        items = value if isinstance(value, list) else [value]
        if any(item is None for item in items):
            raise failure(ErrorCode.NULL_FIELD, f"item {items.index(None)} of field {name!r} is null")
        _check_number(len(items), f"field {name!r}")
        texts = [replace_surrogates(as_text(item, name)) for item in items]
        return BuiltPrompt(texts=[text for text, _ in texts], replaced=any(hit for _, hit in texts))


class EmbeddingBody:
    """Texts, or token ids, from the body of a request to ``/v1/embeddings``.

    Without ``takes_lists`` a request of several texts fails, since the job's results have one vector a row.
    """

    def __init__(self, name: str, *, takes_lists: bool) -> None:
        self.columns = (name,)
        self._takes_lists = takes_lists

    def build(self, values: Mapping[str, list[Any]], position: int) -> BuiltPrompt:
        """See :class:`~batchinfer.dataset.prompt_builders.PromptBuilder`."""
        body, replaced = parse_body(value_at(values, self.columns[0], position))
        task = _options(body)
        texts, token_ids = _inputs(body.get("input"))
        number = len(texts or token_ids or ())
        _check_number(number, "input")
        if number > 1 and not self._takes_lists:
            raise failure(
                ErrorCode.INVALID_PARAMS,
                f"input has {number} texts, but the results have one vector a row; submit with --embedding-lists",
            )
        return BuiltPrompt(texts=texts, token_ids=token_ids, task=task, replaced=replaced)


def _options(body: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the task that the request sets.

    Raises:
        RowFailure: ``invalid_params``: one is wrong, or not known.
    """
    unknown = next((name for name, value in body.items() if value is not None and name not in _FIELDS), None)
    if unknown is not None:
        raise failure(ErrorCode.INVALID_PARAMS, f"parameter {unknown!r} is not supported")
    if (form := body.get("encoding_format")) is not None and form not in ENCODING_FORMATS:
        raise failure(ErrorCode.INVALID_PARAMS, f"encoding_format is {' or '.join(ENCODING_FORMATS)}")
    dimensions = body.get("dimensions")
    if dimensions is None:
        return {}
    if not _is_integer(dimensions) or dimensions < 1:
        raise failure(ErrorCode.INVALID_PARAMS, "dimensions must be an integer of at least 1")
    return {"dimensions": dimensions}


def _inputs(value: Any) -> tuple[list[str] | None, list[list[int]] | None]:
    """A request's texts, or its token ids: the other is None.

    Raises:
        RowFailure: ``empty_prompt`` or ``invalid_params``.
    """
    if value is None or value == []:
        raise failure(ErrorCode.EMPTY_PROMPT, "input is missing or empty; give a text, or a list of texts")
    if isinstance(value, str):
        return [value], None
    if isinstance(value, list):
        if all(isinstance(item, str) for item in value):
            return value, None
        if _are_token_ids(value):
            return None, [value]
        if all(isinstance(item, list) and _are_token_ids(item) for item in value):
            return None, value
    raise failure(
        ErrorCode.INVALID_PARAMS, "input must be a text, a list of texts, a list of token ids or a list of such lists"
    )


def _are_token_ids(value: list[Any]) -> TypeGuard[list[int]]:
    return all(_is_integer(item) for item in value)


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_number(number: int, what: str) -> None:
    if number > MAX_TEXTS:
        raise failure(ErrorCode.INVALID_PARAMS, f"{what} has {number} texts; a row may have {MAX_TEXTS}, so split it")
