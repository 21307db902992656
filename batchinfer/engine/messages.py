"""The shape of a conversation: a non-empty list of ``{role, content}``, content a text or a list of text parts."""

from __future__ import annotations

from typing import Any, NoReturn

from batchinfer.errors import RowFailure
from batchinfer.types import ErrorCode, Message, RowError


def normalize_messages(messages: object) -> list[Message]:
    """Check a conversation and write it as chat templates expect: content as one text, no keys without a value.

    Text parts are joined by newlines. Null fields are dropped: Arrow gives every struct all of the column's fields.

    Raises:
        RowFailure: ``invalid_messages``, naming the message at fault.
    """
    if not isinstance(messages, list):
        _refuse("messages", f"is {_name(messages)}; it must be a list of {{role, content}}")
    if not messages:
        _refuse("messages", "is empty")
    return [_normalize(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalize(message: object, where: str) -> Message:
    if not isinstance(message, dict):
        _refuse(where, f"is {_name(message)}; it must be {{role, content}}")
    fields = {key: value for key, value in message.items() if value is not None}
    role = fields.get("role")
    if not isinstance(role, str) or not role:
        _refuse(f"{where}.role", f"is {_name(message.get('role'))}; it must be a text such as user or assistant")
    if "content" in fields:
        return fields | {"content": _text(fields["content"], f"{where}.content")}
    if not fields.get("tool_calls"):
        _refuse(f"{where}.content", "is missing or null")
    return fields | {"content": ""}


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(where, f"is {_name(content)}; it must be a text or a list of text parts")
    if not content:
        _refuse(where, "is an empty list")
    return "\n".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        _refuse(where, f"is {_name(part)}; it must be {{type: text, text}}")
    kind = part.get("type", "text")
    if kind not in {"text", "input_text"}:
        _refuse(where, f"has type {kind!r}; this model reads text only")
    text = part.get("text")
    if not isinstance(text, str):
        _refuse(f"{where}.text", f"is {_name(text)}; it must be a text")
    return text


def _name(value: Any) -> str:
    """What a value is, in the words of JSON."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list"}
    return "an empty text" if value == "" else names.get(type(value), "an object")


def _refuse(where: str, problem: str) -> NoReturn:
    raise RowFailure(RowError(ErrorCode.INVALID_MESSAGES, f"{where} {problem}"))
