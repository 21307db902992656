"""A sandboxed Jinja2 template over the row's columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jinja2
import pyarrow as pa
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchinfer.dataset.input_schema import logical_type
from batchinfer.dataset.nulls import OnNull, RowSkipped, failure, template_null
from batchinfer.dataset.template_budget import MAX_CHARS, budget
from batchinfer.dataset.template_sandbox import TemplateEnvironment
from batchinfer.dataset.values import as_text, value_at
from batchinfer.errors import InputError, InvalidSpecError, RowFailure
from batchinfer.types import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Mapping

_ROW = "row"
_DICT_METHODS = frozenset({"items", "keys", "values", "get"})


class PromptTemplate:
    """A compiled template, checked against the input's columns.

    Columns are variables; a name that is no identifier is reached as ``row["my column"]``. A null counts as undefined:
    ``{% if x %}``, ``x is none``, ``x is defined`` and ``default`` see it; printing it is a null field (see
    :class:`~batchinfer.dataset.nulls.StrictNull`).

    Raises:
        InvalidSpecError: wrong syntax, or a template that includes others.
        InputError: it names columns that do not exist; the message lists those that do.
    """

    def __init__(self, source: str, schema: pa.Schema, on_null: OnNull) -> None:
        environment = TemplateEnvironment()
        try:
            tree = environment.parse(source)
            if any(True for _ in meta.find_referenced_templates(tree)):
                raise InvalidSpecError("a template cannot include, import or extend another", param="template")
            self.columns = _columns_of(tree, schema, set(environment.globals))
            self._template = environment.compile_checked(tree)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidSpecError(f"template, line {error.lineno}: {error.message}", param="template") from None
        self._on_null = on_null
        self._types = {name: logical_type(schema.field(name).type) for name in self.columns}
        self._has_row = _ROW not in schema.names

    def render(self, values: Mapping[str, list[Any]], position: int) -> str:
        """Text of one row.

        Raises:
            RowFailure: ``null_field``, ``template_error`` or ``invalid_encoding``.
            RowSkipped: a null that the row needs, under ``skip``.
        """
        context = {name: self._value(value_at(values, name, position), name) for name in self.columns}
        if self._has_row:
            context[_ROW] = dict(context)
        try:
            return self._generate(context)
        except (RowFailure, RowSkipped):
            raise
        except Exception as error:  # noqa: BLE001 -- a template may raise anything; its row fails, the job goes on
            raise failure(ErrorCode.TEMPLATE_ERROR, f"{type(error).__name__}: {error}"[:500]) from None

    def _generate(self, context: dict[str, Any]) -> str:
        """Piece by piece, so that a loop cannot fill the memory."""
        pieces, size = [], 0
        budget.reset()
        for piece in self._template.generate(context):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_CHARS:
                raise failure(ErrorCode.TEMPLATE_ERROR, f"the text is longer than {MAX_CHARS:,} characters")
        return "".join(pieces)

    def _value(self, value: Any, name: str) -> Any:
        return _template_value(value, self._types[name], name, self._on_null)


def _columns_of(tree: nodes.Template, schema: pa.Schema, globals_: set[str]) -> tuple[str, ...]:
    """Columns that the template uses, in the schema's order."""
    names = set(schema.names)
    used = meta.find_undeclared_variables(tree)
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
        is_method = key in _DICT_METHODS and key not in names
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


class _Generation(Extension):
    """transformers' tag around the assistant's text, which marks tokens for training and prints what is in it."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2's interface

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def check_chat_template(source: str) -> None:
    """Check the syntax of a model's chat template; the model's worker renders it, in a sandbox of its own.

    Raises:
        InvalidSpecError: wrong syntax.
    """
    environment = ImmutableSandboxedEnvironment(extensions=[_Generation, "jinja2.ext.loopcontrols"])
    try:
        environment.parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidSpecError(f"chat_template, line {error.lineno}: {error.message}", param="chat_template") from None
