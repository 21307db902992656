"""Arrow columns become Python values, one bad value at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batchinfer.dataset.nulls import failure
from batchinfer.errors import RowFailure
from batchinfer.types import ErrorCode, RowError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class BadValue:
    """A value that Python cannot hold: its row fails if, and only if, it needs the value."""

    error: RowError


def column_values(name: str, array: pa.Array) -> list[Any]:
    """Values of a column; nanoseconds are cut to microseconds, what cannot be read is a :class:`BadValue`."""
    array = _in_microseconds(array)
    try:
        values: list[Any] = array.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException):
        return [_one_value(name, array, position) for position in range(len(array))]
    return values


def _in_microseconds(array: pa.Array) -> pa.Array:
    """Python's times have no nanoseconds, and Arrow refuses to drop them by itself."""
    kind = array.type
    if getattr(kind, "unit", "") != "ns":
        return array
    if pa.types.is_timestamp(kind):
        return array.cast(pa.timestamp("us", kind.tz), safe=False)
    return array.cast(pa.time64("us") if pa.types.is_time64(kind) else pa.duration("us"), safe=False)


def _one_value(name: str, array: pa.Array, position: int) -> Any:
    try:
        return array[position].as_py()
    except UnicodeDecodeError as error:
        message = f"column {name!r} is not valid UTF-8 (byte {error.start})"
        return BadValue(RowError(ErrorCode.INVALID_ENCODING, message))
    except (ValueError, OverflowError, pa.ArrowException) as error:
        return BadValue(RowError(ErrorCode.TEMPLATE_ERROR, f"column {name!r} cannot be read: {error}"))


def value_at(values: Mapping[str, list[Any]], name: str, position: int) -> Any:
    """The value of one column in one row.

    Raises:
        RowFailure: it is a :class:`BadValue`.
    """
    value = values[name][position]
    if isinstance(value, BadValue):
        raise RowFailure(value.error)
    return value


def as_text(value: str | bytes, name: str) -> str:
    """Text of a string or of bytes in UTF-8.

    Raises:
        RowFailure: ``invalid_encoding``: to guess at a prompt's bytes would silently ask another question.
    """
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        message = f"column {name!r} is not valid UTF-8 (byte {error.start})"
        raise failure(ErrorCode.INVALID_ENCODING, message) from None
