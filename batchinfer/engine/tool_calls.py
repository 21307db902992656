"""Tool calls in an answer's text: the ways in which families of models write them."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NoReturn

from batchinfer.chat_params import ToolParser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

MARKERS: Mapping[ToolParser, tuple[str, ...]] = {
    ToolParser.HERMES: ("<tool_call>", "</tool_call>"),
    ToolParser.LLAMA3: ("<|python_tag|>",),
    ToolParser.MISTRAL: ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
}
"""Texts that a vocabulary may have as special tokens, which are left out of other answers."""
_HERMES_TAG, _HERMES_END = "<tool_call>", "</tool_call>"
_LLAMA_TAG = "<|python_tag|>"
_MISTRAL_TAG = "[TOOL_CALLS]"
_MISTRAL_NAMED = re.compile(r"([A-Za-z0-9_.-]+)(?:\[CALL_ID\]([A-Za-z0-9]+))?\[ARGS\]", re.ASCII)
_SPACE = " \t\r\n"
_JSON = json.JSONDecoder(parse_constant=lambda name: _malformed(f"{name} is no JSON"))


class MalformedCallError(ValueError):
    """Text that begins like a tool call and is none."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call; ``arguments`` is JSON text of an object, ``id`` the model's own where it gave one."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer taken apart: the text before the calls, and the calls."""

    text: str
    calls: tuple[Call, ...]


def call_format_of(template: str) -> ToolParser:
    """How a chat template writes the assistant's calls; ``none`` where it shows none of the known ways."""
    for call_format, signs in (
        (ToolParser.MISTRAL, ("[TOOL_CALLS]",)),
        (ToolParser.HERMES, ("<tool_call>",)),
        (ToolParser.LLAMA3, ("<|python_tag|>", '"parameters": ', "<|eom_id|>")),
    ):
        if any(sign in template for sign in signs):
            return call_format
    return ToolParser.NONE


def parse_calls(text: str, call_format: ToolParser, names: frozenset[str]) -> ParsedAnswer | None:
    """Take an answer apart; None where it has no calls. ``names`` are the row's tools.

    Raises:
        MalformedCallError: it has what should be calls and cannot be read as such.
    """
    return _PARSERS[call_format](text, names)


def call_id(request_id: str, sample: int, index: int, call_format: ToolParser) -> str:
    """An id for a call that has none: the same whenever the row runs. Mistral's templates want nine characters."""
    digest = blake2b(f"{request_id}:{sample}:{index}".encode(errors="surrogatepass"), digest_size=12).hexdigest()
    return digest[:9] if call_format is ToolParser.MISTRAL else f"call_{digest}"


def _parse_hermes(text: str, _names: frozenset[str]) -> ParsedAnswer | None:
    """Calls between tags; the last may lack its end. What stands between calls is left out."""
    at = text.find(_HERMES_TAG)
    if at < 0:
        return None
    before, calls = text[:at].strip(), []
    while at >= 0:
        value, at = _value(text, at + len(_HERMES_TAG))
        if at < len(text) and not text.startswith(_HERMES_END, at):
            _malformed(f"more than an object at character {at}")
        calls.append(_call(value, ("arguments",)))
        at = text.find(_HERMES_TAG, at)
    return ParsedAnswer(before, tuple(calls))


def _parse_llama(text: str, names: frozenset[str]) -> ParsedAnswer | None:
    """Objects with ``;`` or white space between; without the tag only those that name one of the row's tools."""
    before, tag, rest = text.partition(_LLAMA_TAG)
    try:
        calls = _llama_bare(text.strip(), names)
    except MalformedCallError:
        if not tag:
            raise
        calls = None
    if calls:
        return ParsedAnswer("", calls)  # a tag would be part of an argument
    return ParsedAnswer(before.strip(), tuple(_llama_tagged(rest.strip()))) if tag else None


def _llama_bare(body: str, names: frozenset[str]) -> tuple[Call, ...] | None:
    if not body.startswith("{"):
        return None
    try:
        values = list(_objects(body))
    except MalformedCallError:
        if re.match(r'\{\s*"name"\s*:', body):
            raise
        return None
    if not all(_is_named(value, names) for value in values):
        return None
    return tuple(_call(value, ("parameters", "arguments")) for value in values)


def _is_named(value: Any, names: frozenset[str]) -> bool:
    return isinstance(value, dict) and isinstance(name := value.get("name"), str) and name in names


def _llama_tagged(body: str) -> Iterator[Call]:
    if body.startswith("{"):
        yield from (_call(value, ("parameters", "arguments")) for value in _objects(body))
    else:
        yield _llama_builtin(body)


def _llama_builtin(body: str) -> Call:
    """``brave_search.call(query="...")``: how Llama 3.1 calls the tools that it was trained with."""
    try:
        node = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        _malformed("neither JSON nor tool.call(...)")
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "call"
    if not is_call or not isinstance(node.func.value, ast.Name) or node.args:  # type: ignore[attr-defined]
        _malformed("neither JSON nor tool.call(...)")
    try:
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}  # type: ignore[attr-defined]
        return Call(node.func.value.id, json.dumps(arguments, ensure_ascii=False, allow_nan=False))  # type: ignore[attr-defined]
    except (ValueError, TypeError, RecursionError):
        _malformed("arguments that are no literals")


def _parse_mistral(text: str, _names: frozenset[str]) -> ParsedAnswer | None:
    """A list of objects after one marker, or a marker, the name and ``[ARGS]`` before each call's arguments."""
    before, tag, rest = text.partition(_MISTRAL_TAG)
    if not tag:
        return None
    rest = rest.strip()
    if rest.startswith("["):
        values = _whole(rest)
        calls = tuple(_call(value, ("arguments",)) for value in values)
    else:
        calls = tuple(_mistral_named(rest))
    if not calls:
        _malformed("an empty list")
    return ParsedAnswer(before.strip(), calls)


def _mistral_named(text: str) -> Iterator[Call]:
    """Calls with a tag between them."""
    at = 0
    while True:
        match = _MISTRAL_NAMED.match(text, at)
        if match is None:
            _malformed("no name before [ARGS]")
        arguments, at = _value(text, match.end())
        yield _call({"name": match[1], "arguments": arguments, "id": match[2]}, ("arguments",))
        if at == len(text):
            return
        if not text.startswith(_MISTRAL_TAG, at):
            _malformed(f"more than an object at character {at}")
        at = _skip(text, at + len(_MISTRAL_TAG))


_PARSERS: Mapping[ToolParser, Callable[[str, frozenset[str]], ParsedAnswer | None]] = {
    ToolParser.HERMES: _parse_hermes,
    ToolParser.LLAMA3: _parse_llama,
    ToolParser.MISTRAL: _parse_mistral,
}


def _call(value: Any, keys: tuple[str, ...]) -> Call:
    """A call from its object; ``keys`` are names for the arguments."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        _malformed("an object without a name")
    arguments: Any = next((value[key] for key in keys if value.get(key) is not None), {})
    if isinstance(arguments, str):
        arguments = _whole(arguments)
    if not isinstance(arguments, dict):
        _malformed("arguments that are no object")
    given = value.get("id")
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        _malformed("a number beyond all bounds")
    return Call(name, text, given if isinstance(given, str) and given else None)


def _whole(text: str) -> Any:
    """The JSON value that a text is."""
    try:
        return json.loads(text, parse_constant=lambda name: _malformed(f"{name} is no JSON"))
    except MalformedCallError:
        raise
    except (ValueError, RecursionError) as error:
        _malformed(str(error))


def _objects(text: str) -> Iterator[Any]:
    """JSON values one after the other, with white space or ``;`` between."""
    at = 0
    while at < len(text):
        value, at = _value(text, at, between=_SPACE + ";")
        yield value


def _value(text: str, at: int, between: str = _SPACE) -> tuple[Any, int]:
    """The JSON value there, and where what follows begins; the characters ``between`` are passed over on both sides."""
    try:
        value, at = _JSON.raw_decode(text, _skip(text, at, between))
    except MalformedCallError:
        raise
    except (ValueError, RecursionError) as error:
        _malformed(str(error))
    return value, _skip(text, at, between)


def _skip(text: str, at: int, characters: str = _SPACE) -> int:
    """The first place from ``at`` on that has none of the characters."""
    while at < len(text) and text[at] in characters:
        at += 1
    return at


def _malformed(reason: str) -> NoReturn:
    raise MalformedCallError(reason)
