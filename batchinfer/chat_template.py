"""Chat templates that rows and jobs bring: rendered as transformers renders the model's own, within a row's budget."""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.utils import Namespace

from batchinfer.template_budget import TooMuch, budget
from batchinfer.template_sandbox import TemplateEnvironment, render_checked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_CACHED = 64
"""Compiled templates kept."""
MAX_TIME_FORMAT = 1024
_REASONING = ("reasoning_content", "thinking", "reasoning")
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class _Generation(Extension):
    """transformers' tag around the assistant's text, which marks tokens for training and prints what is in it."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2's interface

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """Jinja's namespace, without names that begin with an underscore, as at transformers."""

    def __init__(self, *args: Any, **values: Any) -> None:
        given = dict(*args, **values)
        for name in given:
            _check_name(name)
        super().__init__(given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class ChatTemplate:
    """A compiled chat template.

    Raises:
        jinja2.TemplateSyntaxError: wrong syntax, or a template that includes others.
    """

    def __init__(self, source: str) -> None:
        environment = _environment()
        try:
            with budget.of_a_row():  # constants are computed here
                tree = environment.parse(source)
                if any(True for _ in meta.find_referenced_templates(tree)):
                    raise jinja2.TemplateSyntaxError("a chat template cannot include, import or extend another", 1)
                self._template = environment.compile_checked(tree)
        except (SyntaxError, RecursionError, MemoryError):
            raise jinja2.TemplateSyntaxError("blocks or brackets are nested too deeply", 1) from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any], *, continues: bool = False
    ) -> str:
        """Text of a conversation; with ``continues`` up to the end of the last message's content, which is a text.

        ``values`` are the template's other variables.

        Raises:
            TooMuch: it does more than a row may cost.
            Exception: whatever the template raises.
        """
        shown = [_message(message) for message in messages]
        variables = {"tools": None, "documents": None} | _plain(dict(values))
        with budget.of_a_row():
            if not continues:
                return render_checked(self._template, variables | {"messages": shown})
            shown[-1]["content"] += _TAG
            return _before_tag(render_checked(self._template, variables | {"messages": shown}), messages[-1]["content"])


@lru_cache(maxsize=MAX_CACHED)
def compiled(source: str) -> ChatTemplate:
    """The template of a source, which is the same in row after row. Raises jinja2.TemplateSyntaxError."""
    return ChatTemplate(source)


@lru_cache(maxsize=1)
def _environment() -> TemplateEnvironment:
    environment = TemplateEnvironment(
        undefined=jinja2.Undefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now, "namespace": _Namespace}
    return environment


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    if len(form) > MAX_TIME_FORMAT:
        raise TooMuch(f"the form of a time has at most {MAX_TIME_FORMAT:,} characters")
    return datetime.now().strftime(form)  # noqa: DTZ005 -- the wall clock's, as at transformers


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.TemplateError(f"a namespace takes no name that begins with an underscore, such as {name!r}")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates get it: no nulls, and its reasoning by the names that templates know it by."""
    shown: dict[str, Any] = _plain({key: value for key, value in message.items() if value is not None})
    reasoning = next((shown[name] for name in _REASONING if name in shown), None)
    return shown if reasoning is None else {"thinking": reasoning} | shown | {"reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy made of JSON's types; anything else, which may have methods, is named only."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else f"<{type(value).__name__}>"


def _before_tag(text: str, content: str) -> str:
    at = text.rfind(_TAG.strip())
    if at < 0 or content.strip() not in text:
        raise jinja2.TemplateError("the final message, which is to be continued, is not in the text of the template")
    return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()  # a template that trims its messages
