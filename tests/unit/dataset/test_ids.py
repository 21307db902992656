from __future__ import annotations

import datetime as dt
import uuid
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.dataset import ids
from batchinfer.dataset.source import InputSource
from batchinfer.errors import InputError


def check(values, kind=None, batch=4):
    array = pa.array(values, kind)
    batches = [(i, pa.record_batch([array.slice(i, batch)], names=["id"])) for i in range(0, len(array), batch)]
    ids.check_unique(batches, "id", len(array))


def first_duplicate(values):
    """By dictionary: the pair whose second row comes first."""
    seen = {}
    for row, value in enumerate(values):
        if value in seen:
            return seen[value], row
        seen[value] = row
    return None


@given(st.lists(st.integers(0, 60), max_size=40), st.booleans())
def test_the_first_duplicate_is_found_with_both_rows_in_memory_and_on_disk(values, on_disk):
    """A dictionary is the reference."""
    pair = first_duplicate(values)
    rows_per_partition = ids._ROWS_PER_PARTITION
    ids._ROWS_PER_PARTITION = 5 if on_disk else rows_per_partition
    try:
        if pair is None:
            check(values, pa.int64())
            return
        with pytest.raises(InputError, match=rf"rows {pair[0]} and {pair[1]} ") as caught:
            check(values, pa.int64())
        assert caught.value.code == "duplicate_id"
    finally:
        ids._ROWS_PER_PARTITION = rows_per_partition


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["a", "b", "", "é"], pa.string()),
        (["a", "b"], pa.dictionary(pa.int32(), pa.string())),
        ([b"\xff", b"\xfe"], pa.binary()),
        ([uuid.UUID(int=1).bytes, uuid.UUID(int=2).bytes], pa.uuid()),
        ([0.1, 0.1 + 2**-56], pa.float64()),
        ([Decimal("1.10"), Decimal("1.11")], pa.decimal128(5, 2)),
        ([dt.date(2024, 1, 1), dt.date(2024, 1, 2)], pa.date32()),
        ([1, 2], pa.timestamp("ns", "Europe/Berlin")),
        ([False, True], pa.bool_()),
    ],
)
def test_ids_of_every_plain_type(values, kind):
    check(values, kind)
    with pytest.raises(InputError, match="rows 0 and"):
        check([*values, values[0]], kind)


def test_a_null_id_and_a_nested_column_are_refused():
    with pytest.raises(InputError, match="null in row 5") as caught:
        check(["a", "b", "c", "d", "e", None])
    assert caught.value.code == "null_id"
    with pytest.raises(InputError, match="must be text or a number"):
        check([[1], [2]])


def test_duplicates_are_found_across_files(tmp_path):
    for name, values in (("a", ["x", "y"]), ("b", ["z", "y"])):
        pq.write_table(pa.table({"id": values}), tmp_path / f"{name}.parquet")
    with pytest.raises(InputError, match="rows 1 and 3 "):
        InputSource.open([str(tmp_path)]).check_ids("id")
