"""Hypothesis strategies for Arrow columns of every type that Parquet holds."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

_BITS = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


def _integers(kind: pa.DataType) -> st.SearchStrategy:
    bits, unsigned = kind.bit_width, str(kind).startswith("uint")
    return st.integers(0, 2**bits - 1) if unsigned else st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _decimals(kind: pa.DataType) -> st.SearchStrategy:
    limit = 10**kind.precision - 1

    def exact(number: int) -> Decimal:
        """By digits: arithmetic would round to 28 of them, and 60 nines up to a number of 61 digits."""
        digits = tuple(int(digit) for digit in str(abs(number)))
        return Decimal((int(number < 0), digits, -kind.scale))

    return st.integers(-limit, limit).map(exact)


_TEXT = st.text(max_size=6)
_BYTES = st.binary(max_size=6)
_PLAIN: dict[pa.DataType, st.SearchStrategy] = {
    pa.null(): st.none(),
    pa.bool_(): st.booleans(),
    **{
        kind: _integers(kind)
        for kind in (
            pa.int8(),
            pa.int16(),
            pa.int32(),
            pa.int64(),
            pa.uint8(),
            pa.uint16(),
            pa.uint32(),
            pa.uint64(),
        )
    },
    pa.float16(): st.floats(width=16).map(np.float16),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    **dict.fromkeys((pa.string(), pa.large_string(), pa.string_view()), _TEXT),
    **dict.fromkeys((pa.binary(), pa.large_binary(), pa.binary_view()), _BYTES),
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.date32(): st.integers(-700_000, 2_900_000),
    pa.time32("ms"): st.integers(0, 86_399_999),
    pa.time64("us"): st.integers(0, 86_399_999_999),
    pa.time64("ns"): st.integers(0, 86_399_999_999_999),
    **{
        pa.timestamp(unit, zone): st.integers(-(2**63) + 1, 2**63 - 1)
        for unit in ("ms", "us", "ns")
        for zone in (None, "UTC", "Europe/Berlin", "+05:30")
    },
    **{pa.duration(unit): st.integers(-(2**62), 2**62) for unit in ("s", "us", "ns")},
    **{kind: _decimals(kind) for kind in (pa.decimal128(12, 3), pa.decimal128(38, 38), pa.decimal256(60, 7))},
}
_NAMES = st.text("abcé .", min_size=1, max_size=3)


def arrow_types(max_depth: int = 2) -> st.SearchStrategy[pa.DataType]:
    """Any type, nested to this depth."""
    plain = st.sampled_from(list(_PLAIN))
    if max_depth == 0:
        return plain
    inner = arrow_types(max_depth - 1)
    not_null = inner.filter(lambda kind: not pa.types.is_null(kind))
    structs = st.lists(st.tuples(_NAMES, inner), min_size=1, max_size=3, unique_by=lambda pair: pair[0])
    return st.one_of(
        plain,
        plain,
        inner.map(pa.list_),
        inner.map(pa.large_list),
        inner.map(pa.list_view),
        st.tuples(not_null, st.integers(1, 3)).map(lambda pair: pa.list_(*pair)),
        structs.map(pa.struct),
        st.tuples(st.sampled_from([pa.string(), pa.int32()]), inner).map(lambda pair: pa.map_(*pair)),
        st.sampled_from([pa.int8(), pa.int32()]).map(lambda index: pa.dictionary(index, pa.string())),
    )


def _values(kind: pa.DataType, *, nullable: bool = True) -> st.SearchStrategy:
    if pa.types.is_struct(kind):
        made = st.fixed_dictionaries({field.name: _values(field.type) for field in kind})
    elif pa.types.is_map(kind):
        keys = _values(kind.key_type, nullable=False)
        made = st.lists(st.tuples(keys, _values(kind.item_type)), max_size=2, unique_by=lambda pair: pair[0])
    elif pa.types.is_fixed_size_list(kind):
        made = st.lists(_values(kind.value_type), min_size=kind.list_size, max_size=kind.list_size)
    elif pa.types.is_dictionary(kind):
        made = _TEXT
    elif pa.types.is_nested(kind):
        made = st.lists(_values(kind.value_type), max_size=3)
    else:
        made = _PLAIN[kind]
    return st.one_of(st.none(), made) if nullable else made


_TYPES = arrow_types()


@st.composite
def tables(draw: st.DrawFn, max_columns: int = 3, max_rows: int = 8) -> pa.Table:
    """A table of random columns."""
    names = draw(st.lists(_NAMES, min_size=1, max_size=max_columns, unique=True))
    num_rows = draw(st.integers(1, max_rows))
    arrays = []
    for _ in names:
        kind = draw(_TYPES)
        values = draw(st.lists(_values(kind), min_size=num_rows, max_size=num_rows))
        arrays.append(pa.array(values, kind))
    return pa.Table.from_arrays(arrays, names=names)
