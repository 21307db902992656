"""A Jinja2 environment for templates that strangers wrote: no way out of it, and no way to keep a worker busy or full.

Jinja's own sandbox keeps Python's internals away, but not ``'a'.center(10**9)``, loops in loops in loops, or a list of
two lists of two lists. So each template is rewritten before it is compiled: whatever loops, joins, compares, builds or
prints goes through a function that charges the row's budget by the size of what it touches. Counting is exact, so that
a template which fits on one machine fits on every other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sized
from functools import wraps
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from batchinfer.template_budget import (
    CALL_UNITS,
    CHARS_A_UNIT,
    KEPT_CHARS_A_UNIT,
    LOOP_UNITS,
    MAX_CHARS,
    MAX_INTEGER_BITS,
    MAX_JSON_INDENT,
    MAX_WIDTH,
    TooMuch,
    budget,
    check_length,
    counted,
    weigh,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jinja2.runtime import Context

_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{5,}|\*)")
_WIDE_FIELD = re.compile(r"\d{5}|:[^{}]*\{")
_DIGITS = re.compile(r"[:.]\D?\D?\d")
_PERCENT_DIGITS = re.compile(r"%[^a-zA-Z%]*\d")
# each makes a string of any size in one call
_FORBIDDEN_METHODS = frozenset({
    "ljust", "rjust", "center", "zfill", "expandtabs", "translate", "maketrans",
})  # fmt: skip
_FREE_NUMBERS = frozenset({"int", "float", "abs", "default", "d", "string", "sum", "min", "max", "filesizeformat"})
_A_CHARACTER = {
    "urlize": 2, **dict.fromkeys(("title", "wordcount", "wordwrap", "unique", "map", "select", "reject", "sort", "min", "max",
                                  "batch", "slice", "list", "join", "groupby", "pprint", "tojson"), 1),
}  # fmt: skip
"""Units for each character of a text, of filters that look at each by itself."""
_OWN = ("_bi_counted", "_bi_weighed", "_bi_concat", "_bi_charge")


@pass_context  # which also keeps the optimiser from computing it before there is a budget
def _counted_filter(_context: Context, values: Any, weight: int) -> Any:
    """What a loop goes over; its length stays known where it was, for ``loop.length``."""
    if isinstance(values, list | tuple | dict | str | range):
        budget.charge(len(values) * weight)
        return values
    if isinstance(values, jinja2.Undefined):
        return values
    return counted(values, weight)


@pass_context
def _weighed_filter(_context: Context, value: Any) -> Any:
    return weigh(value)


@pass_context
def _concat_filter(_context: Context, parts: list[Any]) -> str:
    """``a ~ b``."""
    texts = [str(weigh(part)) for part in parts]
    check_length(sum(map(len, texts)))
    return str(weigh("".join(texts)))


@pass_context
def _charge_filter(_context: Context, text: str, units: int) -> str:
    budget.charge(units)
    return text


def _finalize(value: Any) -> Any:
    """What is printed: it may be kept, in a ``set`` block or by a macro."""
    if isinstance(value, str):
        budget.charge(1 + len(value) // KEPT_CHARS_A_UNIT)
        return value
    return weigh(value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which a prompt is not."""
    width = max(len(str(part)) for part in (*(separators or ()), indent if isinstance(indent, str) else ""))
    if max(width, indent if isinstance(indent, int) else 0) > MAX_JSON_INDENT:
        raise TooMuch(f"the filter tojson takes an indent and separators of up to {MAX_JSON_INDENT} characters")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_json_default
    )
    if indent is None:
        return encoder.encode(value)
    pieces, size = [], 0
    for piece in encoder.iterencode(value):  # a line's indent grows with its depth
        pieces.append(piece)
        size += len(piece)
        check_length(size)
    return "".join(pieces)


def _json_default(value: Any) -> Any:
    if isinstance(value, jinja2.Undefined):
        return None
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _range(*args: int) -> range:
    """``range``, charged for by its length."""
    numbers = range(*args)
    if len(numbers) > MAX_WIDTH:
        raise TooMuch(f"a range has at most {MAX_WIDTH:,} numbers")
    budget.charge(len(numbers))
    return numbers


def _checked_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that weighs what goes in and what comes out."""
    num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        given = [weigh(arg) if isinstance(arg, str | list | tuple | dict) else arg for arg in args[num_passed:]]
        _check_arguments(name, given, options)
        return weigh(function(*args[:num_passed], *given, **options))

    return checked


def _check_arguments(name: str, given: list[Any], options: dict[str, Any]) -> None:
    for number in (*given[1:], *options.values()):
        if isinstance(number, int) and name not in _FREE_NUMBERS and abs(number) > MAX_WIDTH:
            raise TooMuch(f"the filter {name} takes numbers up to {MAX_WIDTH:,}")
    value = given[0] if given else None
    if isinstance(value, str):
        budget.charge(len(value) * _A_CHARACTER.get(name, 0))
        _check_text_filter(name, value, given[1:], options)
    elif name == "join":
        separator = str(given[1] if len(given) > 1 else options.get("d", ""))
        check_length(len(separator) * _most_items(value))
    elif name == "sum" and not isinstance(given[2] if len(given) > 2 else options.get("start", 0), int | float):
        raise TooMuch("the filter sum adds numbers only")


def _most_items(values: Any) -> int:
    """How many texts are joined; nobody knows it of a stream, whose separator is then taken to be short."""
    return len(values) if isinstance(values, Sized) else MAX_WIDTH


def _check_text_filter(name: str, text: str, given: list[Any], options: dict[str, Any]) -> None:
    """Filters whose result is longer than what goes in, by more than a number."""
    arguments = [str(value) for value in (*given, *options.values())]
    longest = max(map(len, arguments), default=0)
    if name == "replace" and len(arguments) > 1:
        _check_replace(text, *arguments[:2])
    elif name == "format":
        _check_percent(text, [*given, *options.values()])
    elif name in ("join", "wordwrap"):
        check_length(len(text) * longest)
    elif name == "indent":
        width = given[0] if given else options.get("width", 4)
        check_length((text.count("\n") + 1) * (width if isinstance(width, int) else len(str(width))) + len(text))


def _check_replace(text: str, old: str, new: str) -> None:
    times = text.count(old) if old else len(text) + 1
    check_length(len(text) + times * len(new))


def _check_format(text: str, values: list[Any]) -> None:
    """A field is as long as its width or its value; one whose width is a value may be of any length."""
    if _WIDE_FIELD.search(text):
        raise TooMuch("format takes no widths of five digits and more, and none that are values")
    _check_fields(text, text.count("{"), values, has_widths=bool(_DIGITS.search(text)))


def _check_percent(text: str, values: list[Any]) -> None:
    """``text % values``, see :func:`_check_format`."""
    if _WIDE_FORMAT.search(text):
        raise TooMuch("% takes no widths of five digits and more, and none that are values")
    _check_fields(text, text.count("%"), values, has_widths=bool(_PERCENT_DIGITS.search(text)))


def _check_fields(text: str, num_fields: int, values: list[Any], *, has_widths: bool) -> None:
    longest = max((len(str(weigh(value))) for value in values), default=0)
    check_length(len(text) + num_fields * max(longest, 10_000 if has_widths else 0))


def _product_size(left: Any, right: Any) -> int:
    for repeated, times in ((left, right), (right, left)):
        if isinstance(repeated, str | bytes | list | tuple) and isinstance(times, int):
            return len(repeated) * max(times, 0)
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_INTEGER_BITS:
        return MAX_CHARS + 1
    return 0


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox; compile with :meth:`compile_checked`, and render with :func:`render_checked`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, undefined: type[jinja2.Undefined] = jinja2.StrictUndefined, **options: Any) -> None:
        super().__init__(undefined=undefined, autoescape=False, finalize=_finalize, **options)  # a prompt is no HTML
        self.filters["tojson"] = _to_json
        self.filters = {name: _checked_filter(name, function) for name, function in self.filters.items()}
        own = (_counted_filter, _weighed_filter, _concat_filter, _charge_filter)
        self.filters.update(zip(_OWN, own, strict=True))
        self.tests["none"] = lambda value: value is None or value == None  # noqa: E711 -- a Null equals None
        self.globals["range"] = _range
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name, None)

    def compile_checked(self, tree: nodes.Template) -> jinja2.Template:
        """The template of a parsed tree, which is changed. Raises jinja2.TemplateSyntaxError."""
        _refuse_own_filters(tree)
        return jinja2.Template.from_code(self, self.compile(_Charging().visit(tree)), dict(self.globals))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic, without what exhausts memory in one step."""
        size = 0
        if operator == "*":
            size = _product_size(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            size = (MAX_CHARS + 1) * (left.bit_length() * max(right, 0) > MAX_INTEGER_BITS)
        elif operator == "%" and isinstance(left, str):
            _check_percent(left, list(right) if isinstance(right, tuple) else [right])
        if size > MAX_CHARS:
            raise TooMuch(f"{operator} makes a value that is too large")
        return weigh(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, /, *args: Any, **options: Any) -> Any:
        """Functions, macros and methods."""
        budget.charge(CALL_UNITS)
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str | bytes | list | tuple | dict):  # all of which a method may look through
            budget.charge(len(owner) // CHARS_A_UNIT)
        if isinstance(owner, str) and name == "replace" and len(args) > 1:
            _check_replace(owner, str(args[0]), str(args[1]))
        elif isinstance(owner, str) and name == "join" and args:
            check_length(len(owner) * _most_items(args[0]))
        return weigh(super().call(context, obj, *args, **options))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format``, which Jinja's sandbox lets through, without what fills the memory."""
        function = super().wrap_str_format(value)
        if function is None:
            return None

        @wraps(function)
        def checked(*args: Any, **options: Any) -> str:
            _check_format(value.__self__, [*args, *options.values()])
            return function(*args, **options)

        return checked

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use an attribute."""
        if isinstance(obj, str | bytes) and attr in _FORBIDDEN_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)


def render_checked(template: jinja2.Template, values: Mapping[str, Any]) -> str:
    """Text of one row; piece by piece, so that a loop cannot fill the memory.

    Raises:
        TooMuch: it does more than a row may cost.
        Exception: whatever the template raises.
    """
    pieces, size = [], 0
    with budget.of_a_row():
        for piece in template.generate(values):
            pieces.append(piece)
            size += len(piece)
            check_length(size)
    return "".join(pieces)


def _refuse_own_filters(tree: nodes.Template) -> None:
    for node in tree.find_all(nodes.Filter):
        if node.name in _OWN:
            raise jinja2.TemplateSyntaxError(f"no filter named {node.name!r}", node.lineno)


class _Charging(NodeTransformer):
    """Puts the charging filters where a template loops, joins, compares and builds."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 -- Jinja's own names
        self.generic_visit(node)
        iterated: Any = node.iter
        node.iter = _filtered(iterated, "_bi_counted", nodes.Const(LOOP_UNITS + _data_units(node)))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802 -- as above
        return self._charged_body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802 -- as above
        return self._charged_body(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 -- as above
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_bi_concat")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802 -- as above
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "_bi_weighed")
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "_bi_weighed")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802 -- as above
        self.generic_visit(node)
        return _filtered(node, "_bi_weighed") if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802 -- as above
        self.generic_visit(node)
        return _filtered(node, "_bi_weighed")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802 -- as above
        self.generic_visit(node)
        return _filtered(node, "_bi_weighed")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802 -- as above
        self.generic_visit(node)
        return node if node.ctx == "store" else _filtered(node, "_bi_weighed")

    def _charged_body(self, node: nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        charge = _filtered(nodes.Const("", lineno=node.lineno), "_bi_charge", nodes.Const(1 + _data_units(node)))
        node.body.insert(0, nodes.Output([charge], lineno=node.lineno))
        return node


def _filtered(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _data_units(node: nodes.Node) -> int:
    """What the plain text inside a body costs each time that it is printed."""
    return sum(len(data.data) for data in node.find_all(nodes.TemplateData)) // KEPT_CHARS_A_UNIT
