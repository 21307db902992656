"""The grammar of an answer that must call a tool: written as the model's family writes calls, arguments by the schemas.

Markers that are special tokens of a vocabulary (``[TOOL_CALLS]``) are named by their ids; no text spells them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from batchinfer.chat_params import ToolParser
from batchinfer.engine.tool_calls import MARKERS
from batchinfer.guided import Guide, embedded_schema, lark_string

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchinfer.engine.chat import ChatRenderer
    from batchinfer.sampling_params import SamplingParams


class _Form(NamedTuple):
    """Text around calls: ``begin (call (between call)*) end``, a call being ``before name after arguments close``."""

    begin: str
    before: str
    after: str
    close: str
    between: str | None
    """None where an answer has one call."""
    end: str


_FORMS: Mapping[ToolParser, _Form] = {
    ToolParser.HERMES: _Form(
        "", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n", ""
    ),
    # the family's templates refuse several calls a turn
    ToolParser.LLAMA3: _Form("", '{"name": "', '", "parameters": ', "}", None, ""),
    ToolParser.MISTRAL: _Form("[TOOL_CALLS][", '{"name": "', '", "arguments": ', "}", ", ", "]"),
}  # fmt: skip
_MISTRAL_NAMED = _Form("", "[TOOL_CALLS]", "[ARGS]", "", "", "")
_MARKER = re.compile("|".join(re.escape(text) for texts in MARKERS.values() for text in texts))


def call_guide(params: SamplingParams, renderer: ChatRenderer) -> Guide:
    """What an answer looks like that calls the tool of ``tool_choice``, or one or more of them where it is ``required``.

    Raises:
        RowFailure: ``invalid_params``: the row's template writes calls in no known way.
    """
    form = _form_of(params, renderer)
    guides = params.argument_guides
    calls = [f"call_{index}" for index in range(len(guides))]
    repeated = "call" if not params.may_call_often or form.between is None else _several(form.between, renderer)
    rules = [
        f"start: {_spelled(form.begin, renderer)} {repeated} {_spelled(form.end, renderer)}",
        f"call: {' | '.join(calls)}",
    ]
    for call, (name, guide) in zip(calls, guides.items(), strict=True):
        opening, close = _spelled(form.before + name + form.after, renderer), _spelled(form.close, renderer)
        rules += [f"{call}: {opening} {call}_arguments {close}", f"{call}_arguments: {embedded_schema(guide.text)}"]
    return Guide("tool_choice", "\n".join(rules))


def barred_opening(params: SamplingParams, renderer: ChatRenderer) -> int | None:
    """The token that begins a call, where the row's ``tool_choice`` is ``none`` and the vocabulary has such a token."""
    markers = MARKERS.get(renderer.call_format(params)) if params.forbids_calls else None
    return renderer.token_id(markers[0]) if markers else None


def _form_of(params: SamplingParams, renderer: ChatRenderer) -> _Form:
    call_format = renderer.call_format_to_force(params)
    if call_format is ToolParser.MISTRAL and "[ARGS]" in renderer.template_of(params):
        return _MISTRAL_NAMED
    return _FORMS[call_format]


def _several(between: str, renderer: ChatRenderer) -> str:
    return f"call ({_spelled(between, renderer)} call)*"


def _spelled(text: str, renderer: ChatRenderer) -> str:
    """Text in the grammar's language."""
    parts, at = [], 0
    for found in _MARKER.finditer(text):
        if (token_id := renderer.special_token_id(found[0])) is not None:
            parts += [text[at : found.start()], token_id]
            at = found.end()
    parts.append(text[at:])
    return " ".join(lark_string(part) if isinstance(part, str) else f"<[{part}]>" for part in parts if part != "")
