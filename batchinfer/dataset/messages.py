"""Chat messages as they come: Arrow lists of structs, JSON text, content in parts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from batchinfer.dataset.nulls import OnNull, failure, null_outcome
from batchinfer.types import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchinfer.types import Message

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


def parse_messages(value: Any, on_null: OnNull) -> list[Message]:
    """Messages of one row, each with a string ``role`` and a string ``content``; other keys stay unless they are null.

    ``value`` is JSON text, or a list of mappings (of key-value pairs, for a map column).

    Raises:
        RowFailure: ``invalid_messages`` naming the message at fault, ``null_field``, or ``empty_prompt``.
        RowSkipped: a null content under ``skip``.
    """
    if isinstance(value, str):
        value = _from_json(value)
    if not isinstance(value, list):
        raise _invalid(f"messages must be a list, not {type(value).__name__}")
    if not value:
        raise _invalid("the list of messages is empty")
    messages = [_message(item, index, on_null) for index, item in enumerate(value)]
    if _is_blank(messages):
        raise failure(ErrorCode.EMPTY_PROMPT, "the messages have no text")
    return messages


def _invalid(message: str) -> Exception:
    return failure(ErrorCode.INVALID_MESSAGES, message)


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise _invalid("messages are nested too deeply") from None
    except ValueError as error:
        if not text.strip():
            raise failure(ErrorCode.EMPTY_PROMPT, "the messages are empty text") from None
        raise _invalid(f"messages are not JSON: {error}") from None


def _message(item: Any, index: int, on_null: OnNull) -> Message:
    if isinstance(item, list):
        item = _from_pairs(item)
    if not isinstance(item, dict):
        raise _invalid(f"messages[{index}] is not an object with role and content")
    role = item.get("role")
    if not isinstance(role, str) or not role.strip():
        raise _invalid(f"messages[{index}] has no role")
    rest = {key: value for key, value in item.items() if value is not None and key not in ("role", "content")}
    return {"role": role, "content": _content(item, index, on_null), **rest}


def _from_pairs(pairs: list[Any]) -> Any:
    try:
        return dict(pairs)
    except (TypeError, ValueError):
        return None


def _content(item: Mapping[str, Any], index: int, on_null: OnNull) -> str:
    content = item.get("content")
    if content is None:
        # An assistant's turn that only calls tools has no content of its own.
        if item.get("tool_calls") or on_null == "empty":
            return ""
        if "content" not in item:
            raise _invalid(f"messages[{index}] has no content")
        raise null_outcome(on_null, f"messages[{index}].content")
    if isinstance(content, list):
        return "\n".join(_part(part, f"messages[{index}].content[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str):
        raise _invalid(f"messages[{index}].content is neither text nor a list of text parts")
    return content


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    text = part.get("text") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS or not isinstance(text, str):
        raise _invalid(f"{where} has type {kind!r}; only text is supported")
    return text


def _is_blank(messages: list[Message]) -> bool:
    """Whether there is nothing to answer: a system message alone counts, beside blank turns it does not."""
    turns = [message for message in messages if message["role"] not in ("system", "developer")] or messages
    return not any(message["content"].strip() or message.get("tool_calls") for message in turns)
