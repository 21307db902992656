"""One canonical Arrow schema over files that were written by different hands."""

from __future__ import annotations

import io
from collections import Counter
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MAX_NAMED = 10
_INTEGER_BITS = {
    pa.int8(): 8, pa.int16(): 16, pa.int32(): 32, pa.int64(): 64,
    pa.uint8(): -8, pa.uint16(): -16, pa.uint32(): -32, pa.uint64(): -64,
}  # fmt: skip
_FLOATS = (pa.float16(), pa.float32(), pa.float64())


def is_string(kind: pa.DataType) -> bool:
    """Whether it is plain text, of any width."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_bytes(kind: pa.DataType) -> bool:
    """Whether it is variable-length bytes, of any width."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def logical_type(kind: pa.DataType) -> pa.DataType:
    """The type of the values: without dictionary encoding and extension wrapping."""
    if pa.types.is_dictionary(kind):
        return logical_type(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return logical_type(kind.storage_type)
    return kind


def is_text(kind: pa.DataType) -> bool:
    """Whether values can be read as text: strings, bytes, dictionaries of them, JSON; or nothing but nulls."""
    logical = logical_type(kind)
    return is_string(logical) or is_bytes(logical) or bool(pa.types.is_null(logical))


def map_type(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """The type with its leaves changed, at any depth; list views that would change become large lists."""

    def inside(field: pa.Field) -> pa.Field:
        return field.with_type(map_type(field.type, change))

    if not pa.types.is_nested(kind) or pa.types.is_union(kind):
        return change(kind)
    if pa.types.is_struct(kind):
        return pa.struct([inside(field) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(inside(kind.key_field), inside(kind.item_field), kind.keys_sorted)
    value = inside(kind.value_field)
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(value, getattr(kind, "list_size", -1))
    is_view = not pa.types.is_large_list(kind)
    return kind if is_view and value.type.equals(kind.value_type) else pa.large_list(value)


def _without_view(kind: pa.DataType) -> pa.DataType:
    """Arrow cannot yet slice string and bytes views inside structs when it writes Parquet."""
    if pa.types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(kind) else kind


class SchemaUnifier:
    """Collects the schemas of all files, one by one, and says what the common schema is.

    Top-level text becomes ``large_string`` (a column may hold more than 2 GB), and views of text and bytes the large
    types without views. Every other type is kept where all files agree; where they differ, only changes that lose
    nothing are made.
    """

    def __init__(self) -> None:
        self._fields: dict[str, pa.Field] = {}
        self._source: dict[str, str] = {}
        self._num_files = 0
        self._present: Counter[str] = Counter()

    def add(self, path: str, schema: pa.Schema) -> None:
        """Take in the schema of one file.

        Raises:
            InputError: duplicate names, types that Parquet cannot hold, or that do not fit those of an earlier file.
        """
        _refuse_duplicates(path, schema.names)
        self._num_files += 1
        for field in schema:
            self._present[field.name] += 1
            kind = pa.large_string() if is_string(field.type) else map_type(field.type, _without_view)
            known = self._fields.get(field.name)
            if known is None:
                self._fields[field.name] = field.with_type(kind)
                self._source[field.name] = path
                continue
            merged = unify_types(known.type, kind)
            if merged is None:
                raise InputError(
                    f"column {field.name!r} is {known.type} in {self._source[field.name]} but {field.type} in {path}; "
                    "rewrite one of them, or submit them as two jobs"
                )
            self._fields[field.name] = known.with_type(merged).with_nullable(known.nullable or field.nullable)

    def schema(self) -> pa.Schema:
        """The common schema: columns in the order in which they first appeared; without file-level metadata.

        Raises:
            InputError: a column whose type cannot be written to Parquet.
        """
        fields = [f.with_nullable(f.nullable or f.name in self.missing()) for f in self._fields.values()]
        refuse_unwritable(fields)
        return pa.schema(fields)

    def missing(self) -> list[str]:
        """Columns that some files lack; their rows hold null."""
        return [name for name, count in self._present.items() if count < self._num_files]


def _refuse_duplicates(path: str, names: Iterable[str]) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise InputError(f"{path} has more than one column named {', '.join(map(repr, repeated))}; rename them")


def refuse_unwritable(fields: Iterable[pa.Field]) -> None:
    """Refuse columns that could not be passed through, before anything runs.

    Raises:
        InputError: naming each of them.
    """
    problems = []
    for field in fields:
        try:
            pq.ParquetWriter(io.BytesIO(), pa.schema([field])).close()
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
            problems.append(f"{field.name!r} ({field.type}): {str(error).splitlines()[0]}")
    if problems:
        raise InputError("these columns cannot be written to Parquet: " + "; ".join(problems[:_MAX_NAMED]))


def unify_types(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both without loss, or None."""
    if left.equals(right):
        return left
    if pa.types.is_null(left) or pa.types.is_null(right):
        return right if pa.types.is_null(left) else left
    if pa.types.is_dictionary(left) or pa.types.is_dictionary(right):
        # Index widths and value widths differ from file to file; plain values are what all can become.
        return unify_types(_plain(left), _plain(right))
    if is_string(left) and is_string(right):
        return pa.large_string()
    if is_bytes(left) and is_bytes(right):
        return pa.large_binary()
    return _unify_numbers(left, right) or _unify_times(left, right) or _unify_nested(left, right)


def _plain(kind: pa.DataType) -> pa.DataType:
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.large_string() if is_string(value) else value


def _unify_numbers(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    if left in _INTEGER_BITS and right in _INTEGER_BITS:
        return _unify_integers(_INTEGER_BITS[left], _INTEGER_BITS[right])
    if left in _FLOATS and right in _FLOATS:
        return max(left, right, key=_FLOATS.index)
    if pa.types.is_decimal(left) and pa.types.is_decimal(right):
        scale = max(left.scale, right.scale)
        digits = scale + max(left.precision - left.scale, right.precision - right.scale)
        if digits <= 38:
            return pa.decimal128(digits, scale)
        return pa.decimal256(digits, scale) if digits <= 76 else None
    return None


def _unify_integers(left: int, right: int) -> pa.DataType | None:
    """Negative bits are unsigned. A signed type must have a bit more than the unsigned one it takes in."""
    if (left < 0) == (right < 0):
        widest = max(left, right, key=abs)
    else:
        signed, unsigned = max(left, right), -min(left, right)
        widest = max(signed, 2 * unsigned)
    return next((kind for kind, bits in _INTEGER_BITS.items() if bits == widest), None)


def _unify_times(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    """Finer of two units; the zones must agree, for a zone is part of the value's meaning."""
    units = ("s", "ms", "us", "ns")
    for is_kind, make in ((pa.types.is_timestamp, pa.timestamp), (pa.types.is_duration, pa.duration)):
        if is_kind(left) and is_kind(right):
            unit = max(left.unit, right.unit, key=units.index)
            if make is pa.duration:
                return pa.duration(unit)
            return pa.timestamp(unit, left.tz) if left.tz == right.tz else None
    return None


def _unify_nested(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    if pa.types.is_struct(left) and pa.types.is_struct(right):
        return _unify_structs(left, right)
    if pa.types.is_map(left) and pa.types.is_map(right):
        key, item = unify_types(left.key_type, right.key_type), unify_types(left.item_type, right.item_type)
        return pa.map_(key, item) if key is not None and item is not None else None
    lists = [kind for kind in (left, right) if pa.types.is_list(kind) or pa.types.is_large_list(kind)]
    if len(lists) == 2:
        value = unify_types(left.value_type, right.value_type)
        make = pa.large_list if any(pa.types.is_large_list(kind) for kind in lists) else pa.list_
        return make(value) if value is not None else None
    return None


def _unify_structs(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    fields = {field.name: field for field in left}
    if len(fields) < left.num_fields or len({f.name for f in right}) < right.num_fields:
        return None
    for field in right:
        known = fields.get(field.name)
        kind = field.type if known is None else unify_types(known.type, field.type)
        if kind is None:
            return None
        fields[field.name] = pa.field(field.name, kind)
    return pa.struct([field.with_nullable(True) for field in fields.values()])
