"""The shape of a conversation: a non-empty list of ``{role, content}``, content a text or a list of text parts."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from batchinfer.errors import RowFailure
from batchinfer.types import ErrorCode, Message, RowError

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
"""Roles that any template may be given; one that a template names itself is known, too."""


def normalize_messages(messages: object) -> list[Message]:
    """Check a conversation and write it as chat templates expect: content as one text, no keys without a value.

    Text parts are joined by newlines. Null fields are dropped: Arrow gives every struct all of the column's fields.
    Arguments of tool calls, JSON text at OpenAI, become objects.

    Raises:
        RowFailure: ``invalid_messages``, naming the message at fault.
    """
    if not isinstance(messages, list):
        _refuse("messages", f"is {_name(messages)}; it must be a list of {{role, content}}")
    if not messages:
        _refuse("messages", "is empty")
    return [_normalize(message, f"messages[{index}]") for index, message in enumerate(messages)]


def fit_roles(messages: list[Message], template: str) -> list[Message]:
    """The same conversation with roles that the template knows: where it has no developer, that is the system.

    Raises:
        RowFailure: ``invalid_messages``: a role that nobody knows.
    """
    has_developer = "developer" in template
    fitted = []
    for index, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            known = "system, developer, user, assistant, tool"
            _refuse(f"messages[{index}].role", f"is {role[:40]!r}; the model's chat template knows {known}")
        fitted.append(message | {"role": "system"} if role == "developer" and not has_developer else message)
    return fitted


def _normalize(message: object, where: str) -> Message:
    if not isinstance(message, dict):
        _refuse(where, f"is {_name(message)}; it must be {{role, content}}")
    fields = {key: value for key, value in message.items() if value is not None}
    role = fields.get("role")
    if not isinstance(role, str) or not role:
        _refuse(f"{where}.role", f"is {_name(message.get('role'))}; it must be a text such as user or assistant")
    if not isinstance(fields.get("name", ""), str):
        _refuse(f"{where}.name", f"is {_name(fields['name'])}; it must be a text")
    if calls := fields.get("tool_calls"):
        fields["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    else:
        fields.pop("tool_calls", None)
    if "content" in fields:
        return fields | {"content": _text(fields["content"], f"{where}.content")}
    if not calls:
        _refuse(f"{where}.content", "is missing or null")
    return fields | {"content": ""}


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        _refuse(where, f"is {_name(calls)}; it must be a list of {{id, type, function}}")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        _refuse(where, f"is {_name(call)}; it must be {{id, type, function}}")
    fields = {key: value for key, value in call.items() if value is not None}
    function = fields.get("function")
    if function is None:
        return fields
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        _refuse(f"{where}.function", "must be {name, arguments}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            _refuse(f"{where}.function.arguments", "is not JSON")
    if arguments is not None and not isinstance(arguments, dict):
        _refuse(f"{where}.function.arguments", f"is {_name(arguments)}; it must be a JSON object")
    return fields | {"function": function | {"arguments": {} if arguments is None else arguments}}


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
    if kind not in {"text", "input_text", "output_text"}:
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
