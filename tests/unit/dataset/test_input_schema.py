from __future__ import annotations

import itertools

import pyarrow as pa
import pytest

from batchinfer.dataset.input_schema import SchemaUnifier, refuse_unwritable, unify_types
from batchinfer.errors import InputError

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]


def limits(kind):
    """Least and greatest value, by arithmetic."""
    bits = kind.bit_width
    return (0, 2**bits - 1) if str(kind).startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


@pytest.mark.parametrize(("left", "right"), [*itertools.product(INTEGERS, INTEGERS)])
def test_integers_meet_in_the_least_type_that_holds_both(left, right):
    """Brute force over all integer types is the reference."""
    low, high = min(limits(left)[0], limits(right)[0]), max(limits(left)[1], limits(right)[1])
    holding = [kind for kind in INTEGERS if limits(kind)[0] <= low and high <= limits(kind)[1]]
    best = min(holding, key=lambda kind: kind.bit_width, default=None)
    assert unify_types(left, right) == best


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (pa.string(), pa.string_view(), pa.large_string()),
        (pa.dictionary(pa.int8(), pa.string()), pa.string(), pa.large_string()),
        (pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.large_string()), pa.large_string()),
        (pa.binary(), pa.binary_view(), pa.large_binary()),
        (pa.null(), pa.list_(pa.int8()), pa.list_(pa.int8())),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.timestamp("s", "UTC"), pa.timestamp("us", "UTC"), pa.timestamp("us", "UTC")),
        (pa.duration("s"), pa.duration("ms"), pa.duration("ms")),
        (pa.decimal128(5, 2), pa.decimal128(6, 4), pa.decimal128(7, 4)),
        (pa.decimal128(38, 0), pa.decimal128(38, 38), pa.decimal256(76, 38)),
        (pa.list_(pa.string()), pa.large_list(pa.string_view()), pa.large_list(pa.large_string())),
        (pa.map_(pa.string(), pa.int8()), pa.map_(pa.string(), pa.int16()), pa.map_(pa.string(), pa.int16())),
        (
            pa.struct([("a", pa.int8())]),
            pa.struct([("b", pa.string()), ("a", pa.int16())]),
            pa.struct([("a", pa.int16()), ("b", pa.string())]),
        ),
        # Nothing that would lose or change values:
        (pa.int64(), pa.float64(), None),
        (pa.string(), pa.binary(), None),
        (pa.int32(), pa.string(), None),
        (pa.timestamp("us"), pa.timestamp("us", "UTC"), None),
        (pa.timestamp("us", "UTC"), pa.timestamp("us", "Europe/Berlin"), None),
        (pa.date32(), pa.timestamp("us"), None),
        (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.string())]), None),
    ],
)
def test_types_meet_without_loss_or_not_at_all(left, right, expected):
    assert unify_types(left, right) == expected
    if not pa.types.is_struct(left):  # the order of a struct's fields follows the first
        assert unify_types(right, left) == expected


def test_every_type_is_kept_where_the_files_agree():
    kinds = [pa.binary(), pa.list_(pa.string()), pa.timestamp("us", "Europe/Berlin"), pa.decimal256(50, 3)]
    kinds += [pa.dictionary(pa.int8(), pa.string()), pa.map_(pa.string(), pa.int8()), pa.list_(pa.int8(), 3)]
    schema = pa.schema([(str(i), kind) for i, kind in enumerate(kinds)])
    unifier = SchemaUnifier()
    unifier.add("a", schema)
    unifier.add("b", schema)
    assert unifier.schema().types == kinds


def test_top_level_text_is_large_and_a_missing_column_is_nullable():
    unifier = SchemaUnifier()
    unifier.add("a", pa.schema([pa.field("x", pa.string(), nullable=False), pa.field("y", pa.string_view())]))
    unifier.add("b", pa.schema([pa.field("y", pa.string())]))
    assert unifier.schema().field("x").nullable
    assert unifier.schema().types == [pa.large_string(), pa.large_string()]
    assert unifier.missing() == ["x"]


def test_types_that_do_not_fit_are_refused_with_both_files():
    unifier = SchemaUnifier()
    unifier.add("one.parquet", pa.schema([("x", pa.int64())]))
    with pytest.raises(InputError, match=r"'x' is int64 in one\.parquet but string in two\.parquet"):
        unifier.add("two.parquet", pa.schema([("x", pa.string())]))


def test_duplicate_names_are_refused():
    """Parquet can hold them, nobody can read them."""
    with pytest.raises(InputError, match=r"one\.parquet has more than one column named 'x'"):
        SchemaUnifier().add("one.parquet", pa.schema([("x", pa.int64()), ("y", pa.int64()), ("x", pa.string())]))


def test_columns_that_parquet_cannot_hold_are_all_named():
    """An empty struct."""
    fields = [pa.field("ok", pa.int8()), pa.field("s", pa.struct([])), pa.field("l", pa.list_(pa.struct([])))]
    with pytest.raises(InputError, match=r"'s' .*'l' "):
        refuse_unwritable(fields)
