"""The members of a JSON object as they are written: a value's text, not what Python would make of it."""

from __future__ import annotations

import json
import re
from typing import NoReturn

_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=lambda name: _refuse(f"{name} is no JSON"))


def members(text: str) -> dict[str, str]:
    """Each member's name and the text of its value: numbers with all their digits, strings with their escapes.

    Raises:
        ValueError: the text is no JSON object, or has a name twice.
    """
    at = _skip(text, 0)
    if text[at : at + 1] != "{":
        _refuse("not a JSON object")
    found: dict[str, str] = {}
    at = _skip(text, at + 1)
    while text[at : at + 1] != "}":
        if found:
            at = _skip(text, _expect(text, at, ","))
        name, at = _value(text, at)
        if not isinstance(name, str):
            _refuse(f"a name at character {at} is no text")
        if name in found:
            _refuse(f"{name!r} stands there twice")
        start = _skip(text, _expect(text, _skip(text, at), ":"))
        _, end = _value(text, start)
        found[name] = text[start:end]
        at = _skip(text, end)
    if _skip(text, at + 1) != len(text):
        _refuse("something follows the object")
    return found


def object_of(parts: dict[str, str]) -> str:
    """The object of members that are JSON text, in one line."""
    return "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in parts.items()) + "}"


def in_one_line(text: str) -> str:
    """JSON text without line ends, which can only stand between its parts."""
    return text.replace("\r", " ").replace("\n", " ")


def _value(text: str, at: int) -> tuple[object, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except RecursionError:
        _refuse("nested too deeply")


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _expect(text: str, at: int, sign: str) -> int:
    if text[at : at + 1] != sign:
        _refuse(f"character {at + 1} is not {sign!r}")
    return at + 1


def _refuse(problem: str) -> NoReturn:
    raise ValueError(problem)
