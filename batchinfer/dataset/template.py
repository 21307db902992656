"""A sandboxed Jinja2 template over the row's columns."""

from __future__ import annotations

from contextlib import contextmanager
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar

import jinja2
import pyarrow as pa
from jinja2 import meta, nodes
from jinja2.parser import Parser

from batchinfer.chat_template import ChatTemplate
from batchinfer.dataset.input_schema import logical_type
from batchinfer.dataset.nulls import Null, OnNull, RowSkipped, failure, template_null
from batchinfer.dataset.values import as_text, value_at
from batchinfer.errors import InputError, InvalidSpecError, RowFailure
from batchinfer.template_budget import budget
from batchinfer.template_sandbox import TemplateEnvironment, render_checked
from batchinfer.types import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

T = TypeVar("T")
_ROW = "row"
_RESULT = "_bi_result"
"""Where an expression's value is kept."""
DICT_METHODS = frozenset({"items", "keys", "values", "get"})


class RowTemplate:
    """What templates and expressions over a row's columns share.

    Columns are variables; a name that is no identifier is reached as ``row["my column"]``. A null counts as undefined:
    ``{% if x %}``, ``x is none``, ``x is defined`` and ``default`` see it; printing it is a null field (see
    :class:`~batchinfer.dataset.nulls.StrictNull`).

    Raises:
        InvalidSpecError: wrong syntax, or a template that includes others.
        InputError: it names columns that do not exist; the message lists those that do.
    """

    def __init__(self, tree: nodes.Template, schema: pa.Schema, on_null: OnNull) -> None:
        environment = TemplateEnvironment()
        self.columns = _columns_of(tree, schema, set(environment.globals))
        with _syntax_errors():
            self._template = environment.compile_checked(tree)
        self._on_null = on_null
        self._types = {name: logical_type(schema.field(name).type) for name in self.columns}
        self._has_row = _ROW not in schema.names

    def _run(self, values: Mapping[str, list[Any]], position: int, use: Callable[[dict[str, Any]], T]) -> T:
        """Give the row's variables to ``use``; whatever that raises is the row's failure."""
        context = {name: self._value(value_at(values, name, position), name) for name in self.columns}
        if self._has_row:
            context[_ROW] = dict(context)
        try:
            with budget.of_a_row():
                return use(context)
        except (RowFailure, RowSkipped):
            raise
        except Exception as error:  # noqa: BLE001 -- a template may raise anything; its row fails, the job goes on
            raise failure(ErrorCode.TEMPLATE_ERROR, f"{type(error).__name__}: {error}"[:500]) from None

    def _value(self, value: Any, name: str) -> Any:
        return _template_value(value, self._types[name], name, self._on_null)


class PromptTemplate(RowTemplate):
    """A compiled template, checked against the input's columns."""

    def __init__(self, source: str, schema: pa.Schema, on_null: OnNull) -> None:
        super().__init__(parse_template(source), schema, on_null)

    def render(self, values: Mapping[str, list[Any]], position: int) -> str:
        """Text of one row.

        Raises:
            RowFailure: ``null_field``, ``template_error`` or ``invalid_encoding``.
            RowSkipped: a null that the row needs, under ``skip``.
        """
        return self._run(values, position, lambda context: render_checked(self._template, context))


class RowCondition(RowTemplate):
    """A compiled expression that is true or false of a row."""

    def __init__(self, source: str, schema: pa.Schema, on_null: OnNull) -> None:
        super().__init__(parse_expression(source), schema, on_null)

    def holds(self, values: Mapping[str, list[Any]], position: int) -> bool:
        """Whether it is true of one row; a null or a number counts as in Python, a text or a list does not count.

        Raises:
            RowFailure: what :meth:`PromptTemplate.render` raises; ``template_error`` for what is neither true nor false.
            RowSkipped: a null that the row needs, under ``skip``.
        """
        return self._run(values, position, self._evaluate)

    def _evaluate(self, context: dict[str, Any]) -> bool:
        variables = self._template.new_context(context)
        for _ in self._template.root_render_func(variables):
            pass
        value = variables.vars[_RESULT]
        if value is None or isinstance(value, bool | int | float | Decimal | Null):
            return bool(value)
        kind = type(value).__name__
        raise failure(
            ErrorCode.TEMPLATE_ERROR, f"the filter gives a value of type {kind}, neither true nor false: compare it"
        )


def parse_template(source: str) -> nodes.Template:
    """The syntax tree of a template. Raises InvalidSpecError: wrong syntax, or it includes others."""
    with _syntax_errors():
        tree = TemplateEnvironment().parse(source)
    if any(True for _ in meta.find_referenced_templates(tree)):
        raise InvalidSpecError("a template cannot include, import or extend another", param="template")
    return tree


def parse_expression(source: str) -> nodes.Template:
    """The syntax tree of a template that keeps an expression's value. Raises InvalidSpecError: wrong syntax."""
    environment = TemplateEnvironment()
    with _syntax_errors():
        parser = Parser(environment, source, state="variable")
        expression = parser.parse_expression()
        if not parser.stream.eos:
            raise jinja2.TemplateSyntaxError("more follows the end of the expression", parser.stream.current.lineno)
    result = nodes.Assign(nodes.Name(_RESULT, "store", lineno=1), expression, lineno=1)
    tree = nodes.Template([result], lineno=1)
    tree.set_environment(environment)
    return tree


def names_in(tree: nodes.Template) -> set[str]:
    """Variables that a tree does not set itself. Raises InvalidSpecError: it has a filter or a test that there is not."""
    with _syntax_errors():
        return meta.find_undeclared_variables(tree)


@contextmanager
def _syntax_errors() -> Iterator[None]:
    """Jinja's errors become an InvalidSpecError with the line."""
    try:
        yield
    except jinja2.TemplateSyntaxError as error:
        raise InvalidSpecError(f"template, line {error.lineno}: {error.message}", param="template") from None
    except (SyntaxError, RecursionError, MemoryError):
        raise InvalidSpecError("template: its blocks or brackets are nested too deeply", param="template") from None


def _columns_of(tree: nodes.Template, schema: pa.Schema, globals_: set[str]) -> tuple[str, ...]:
    """Columns that the template uses, in the schema's order."""
    names = set(schema.names)
    used = names_in(tree)
    if _ROW in used and _ROW not in names:
        used = (used - {_ROW}) | _columns_of_row(tree, names)
    unknown = sorted(used - names - globals_)
    if unknown:
        raise InputError(
            f"the template uses {', '.join(map(repr, unknown))}, but the input has no such column; "
            f"it has: {', '.join(schema.names)}",
            param="template",
        )
    return tuple(name for name in schema.names if name in used)


def _columns_of_row(tree: nodes.Template, names: set[str]) -> set[str]:
    """Columns that are reached as ``row[...]``: the constant ones, or all where ``row`` is used in any other way."""
    found: set[str] = set()
    num_constant = 0
    keys: list[tuple[nodes.Expr, Any]] = [(node.node, node.attr) for node in tree.find_all(nodes.Getattr)]
    keys += [(node.node, getattr(node.arg, "value", None)) for node in tree.find_all(nodes.Getitem)]
    for owner, key in keys:
        is_method = key in DICT_METHODS and key not in names
        if isinstance(owner, nodes.Name) and owner.name == _ROW and isinstance(key, str) and not is_method:
            found.add(key)
            num_constant += 1
    num_names = sum(node.name == _ROW for node in tree.find_all(nodes.Name))
    return found if num_names == num_constant else found | names


def _template_value(value: Any, kind: pa.DataType, path: str, on_null: OnNull) -> Any:
    """A value as templates see it: maps are dicts, bytes are text, nulls at any depth are :class:`Null`."""
    if value is None:
        return template_null(on_null, path)
    if isinstance(value, bytes):
        return as_text(value, path)
    if pa.types.is_struct(kind):
        return {f.name: _template_value(value[f.name], logical_type(f.type), f"{path}.{f.name}", on_null) for f in kind}
    if pa.types.is_map(kind):
        key, item = logical_type(kind.key_type), logical_type(kind.item_type)
        return {
            _template_value(k, key, path, on_null): _template_value(v, item, f"{path}.{k}", on_null) for k, v in value
        }
    if pa.types.is_nested(kind):
        item = logical_type(kind.value_type)
        return [_template_value(v, item, f"{path}[{i}]", on_null) for i, v in enumerate(value)]
    return value


def check_chat_template(source: str) -> None:
    """Check the syntax of a job's chat template.

    Raises:
        InvalidSpecError: wrong syntax.
    """
    try:
        ChatTemplate(source)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidSpecError(f"chat_template, line {error.lineno}: {error.message}", param="chat_template") from None
