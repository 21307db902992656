"""What a row's answer must look like: a JSON schema, a regular expression, one of some texts, or a grammar.

Grammars are llguidance's, a small library that loads in milliseconds, and only where something is asked of it.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any, NamedTuple

_CONTROL = re.compile("[\x7f-\x9f]")
GUIDES = ("json_schema", "guided_regex", "guided_choice", "guided_grammar")
"""Sampling parameters of which a row has at most one."""
MAX_GUIDE_LENGTH = 256 * 1024
"""Characters of a schema, expression or grammar, and of all choices together."""
MAX_CHOICES = 4096
_JSON_OPTIONS = {
    # white space is not the model's to choose: no run of it can use up a row's tokens, and separators are forced
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    # a keyword that is not understood is a refusal, never ignored
    "lenient": False,
    "coerce_one_of": False,
}
_RESPONSE_TYPES = ("text", "json_object", "json_schema")
_STRING_OR_SPACE = re.compile(r'("(?:[^"\\]|\\.)*")|[ \t\n\r]+')
_UNPRINTABLE = "\n<state>"
"""Where the library's message turns to the inside of its parser."""


class Guide(NamedTuple):
    """One of :data:`GUIDES` and its text; of choices, the text is a JSON list.

    The kind ``tool_choice`` is a Lark grammar of tool calls.
    """

    kind: str
    text: str

    @property
    def is_json(self) -> bool:
        """Whether a complete answer is JSON."""
        return self.kind == "json_schema"

    @property
    def all_or_nothing(self) -> bool:
        """Whether an answer that is cut off is of no use."""
        return self.kind in ("json_schema", "tool_choice")

    def grammar(self) -> str:
        """The grammar in the library's own form.

        Raises:
            ValueError: a grammar in llama.cpp's form cannot be converted.
        """
        from llguidance import LLMatcher  # noqa: PLC0415 -- see above

        if self.kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(self.text, overrides=_JSON_OPTIONS)  # type: ignore[arg-type]
        if self.kind == "guided_regex":
            return LLMatcher.grammar_from_regex(self.text)
        if self.kind == "guided_choice":
            texts = map(lark_string, json.loads(self.text))
            return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
        if self.kind == "tool_choice":
            return LLMatcher.grammar_from_lark(self.text)
        return LLMatcher.grammar_from_lark(_lark(self.text))

    def fault(self) -> str | None:
        """Why no answer can be like this, in the library's words; None if nothing speaks against it.

        No model is needed for the question: the answer is spelled in bytes.
        """
        from llguidance import LLMatcher  # noqa: PLC0415 -- see above

        try:
            grammar = self.grammar()
        except (ValueError, RecursionError) as error:
            return plain_message(str(error))
        if self.kind == "guided_grammar":  # it may name special tokens, which only the model's vocabulary has
            return plain_message(LLMatcher.validate_grammar(grammar)) or None
        return first_fault(LLMatcher(_byte_tokenizer(), grammar, log_level=0))


def first_fault(matcher: Any) -> str | None:
    """What a new matcher of the library finds wrong with its grammar, that nothing matches it included."""
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error():
        return None
    return plain_message(matcher.get_error())


def plain_message(message: str) -> str:
    """The library's message in one line, without what is for its own developers."""
    text = " ".join(message.partition(_UNPRINTABLE)[0].split())
    if text.startswith("NoExtension"):
        return "nothing matches it"
    return text.partition(" Enable 'coerce_one_of'")[0]


def schema_text(value: object) -> str | None:
    """JSON text of a schema: given as an object, as JSON text, or as OpenAI's ``response_format``; None is no schema.

    ``{"type": "json_object"}`` is any JSON object, ``{"type": "text"}`` no schema. Properties keep their order.

    Raises:
        ValueError: it is neither.
    """
    if value is None:
        return None
    if isinstance(value, bytes):
        value = value.decode()
    if isinstance(value, str):
        return _schema_of_text(value)
    schema = _unwrapped(value)
    return None if schema is None else _written(schema)


def embedded_schema(text: str) -> str:
    """A schema inside a Lark grammar; it is followed as one that stands alone."""
    return "%json " + json.dumps(json.loads(text) | {"x-guidance": _JSON_OPTIONS}, ensure_ascii=False)


def single_schema(fields: object) -> object:
    """Fields in which ``response_format``, another name of ``json_schema``, goes by that name.

    Raises:
        ValueError: both are given.
    """
    if not isinstance(fields, dict) or "response_format" not in fields:
        return fields
    rest = dict(fields)
    value = rest.pop("response_format")
    if rest.get("json_schema") is not None:
        raise ValueError("json_schema and response_format exclude each other: an answer follows one schema")
    return rest | {"json_schema": value}


@lru_cache(maxsize=16)
def _schema_of_text(text: str) -> str | None:
    """A job's rows bring the same text again and again."""
    if len(text) > MAX_GUIDE_LENGTH:
        raise ValueError(f"the schema has {len(text)} characters; at most {MAX_GUIDE_LENGTH} are read")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the schema is not JSON: {error}") from None
    schema = _unwrapped(value)
    return None if schema is None else _written(schema)


def _written(schema: object) -> str:
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the schema cannot be written as JSON: {error}") from None
    if len(text) > MAX_GUIDE_LENGTH:
        raise ValueError(f"the schema has {len(text)} characters; at most {MAX_GUIDE_LENGTH} are read")
    return text


def lark_string(text: str) -> str:
    """A text as a grammar spells it: JSON, with the control characters escaped that JSON leaves as they are."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


def _unwrapped(value: object) -> object:
    """The schema inside a ``response_format``; what is not one is a schema itself."""
    if not isinstance(value, dict):
        if isinstance(value, bool):
            return value
        raise ValueError('a schema is a JSON object such as {"type": "object", "properties": {...}}')
    kind = value.get("type")
    if kind not in _RESPONSE_TYPES:
        return value
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    inner = value.get("json_schema", value.get("schema"))
    if isinstance(inner, dict) and isinstance(inner.get("schema"), dict | bool):
        return inner["schema"]
    if "json_schema" in value or not isinstance(inner, dict):
        raise ValueError('response_format json_schema needs {"json_schema": {"name": ..., "schema": {...}}}')
    return inner


def compact(text: str) -> str:
    """JSON text without white space between its tokens; numbers and strings stay as they are written."""
    return _STRING_OR_SPACE.sub(r"\1", text)


def _lark(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark  # noqa: PLC0415 -- see above

    try:
        lark: str = any_to_lark(text)
    except Exception as error:  # noqa: BLE001 -- a parser of regular expressions: it may raise anything
        raise ValueError(f"the grammar is not Lark and cannot be read as GBNF: {error}") from None
    return lark


class _Bytes:
    """A vocabulary of single bytes, in the form the library asks for."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (256,)
    is_tokenizer_wrapper = True

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@lru_cache(maxsize=1)
def _byte_tokenizer() -> Any:
    from llguidance import LLTokenizer  # noqa: PLC0415 -- see above

    return LLTokenizer(_Bytes())  # type: ignore[arg-type]
