from __future__ import annotations

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.dataset.source import InputSource
from batchinfer.errors import InputError


def write(path, rows, **options):
    pq.write_table(rows if isinstance(rows, pa.Table) else pa.table(rows), path, **options)


def numbers(source, *span, **options):
    """All values of column n, with a check that the indexes follow each other."""
    found, expected = [], span[0] if span else 0
    for first, batch in source.iter_batches(*span, columns=["n"], **options):
        assert first == expected
        expected += batch.num_rows
        found += batch.column("n").to_pylist()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Rows 0 to 99 over three files with small row groups, one of them without rows."""
    folder = tmp_path_factory.mktemp("input")
    write(folder / "a.parquet", {"n": range(40), "s": ["x"] * 40}, row_group_size=7)
    write(folder / "b.parquet", {"n": pa.array([], pa.int64()), "s": pa.array([], pa.string())})
    write(folder / "c.parquet", {"n": range(40, 100), "s": ["y"] * 60}, row_group_size=13)
    return folder


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_range_in_any_batch_size_gives_exactly_its_rows(folder, data):
    """The value of a row is its global index, so a slice of range(100) is the reference."""
    start = data.draw(st.integers(0, 100))
    stop = data.draw(st.integers(start, 100))
    size = data.draw(st.integers(1, 120))
    source = InputSource.open([str(folder)])
    assert numbers(source, start, stop, batch_rows=size) == list(range(start, stop))


def test_batches_have_the_canonical_types_and_the_columns_asked_for(folder):
    source = InputSource.open([str(folder)])
    assert source.schema == pa.schema([("n", pa.int64()), ("s", pa.large_string())])
    batches = [batch for _, batch in source.iter_batches(columns=["s", "n"])]
    assert {batch.schema for batch in batches} == {pa.schema([("s", pa.large_string()), ("n", pa.int64())])}
    with pytest.raises(InputError, match=r"no column 'z'; it has: n, s"):
        next(source.iter_batches(columns=["z"]))


def test_a_limit_takes_the_first_rows_only(folder):
    source = InputSource.open([str(folder)], limit=45)
    assert source.num_rows == 45
    assert numbers(source) == list(range(45))
    assert list(source.token_weights())[-1][1] == 45
    assert InputSource.reopen(source.fingerprint()).num_rows == 45
    assert InputSource.open([str(folder)], limit=1000).num_rows == 100


def test_weights_cover_all_rows_in_order_and_follow_the_columns_bytes(folder):
    source = InputSource.open([str(folder)])
    for columns in (None, ["s"], ["n", "s"]):
        spans = list(source.token_weights(columns))
        assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])]
        assert spans[-1][1] == 100
    total = {name: sum(span[2] for span in source.token_weights([name])) for name in ("n", "s")}
    assert total["n"] > total["s"]  # eight bytes a number; one letter, dictionary-encoded


def test_a_fingerprint_opens_the_same_rows_later_even_if_files_were_added(folder, tmp_path):
    """A job's input is what was planned; JSON is how the fingerprint travels."""
    for name in ("a.parquet", "c.parquet"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    fingerprint = json.loads(json.dumps(InputSource.open([str(tmp_path)]).fingerprint()))
    write(tmp_path / "b2.parquet", {"n": [-1], "s": ["new"]})
    source = InputSource.reopen(fingerprint)
    assert source.schema == pa.schema([("n", pa.int64()), ("s", pa.large_string())])
    assert numbers(source) == list(range(100))


def test_a_changed_file_is_refused_by_name_when_it_is_read_and_a_touched_one_is_not(tmp_path):
    for name, offset in (("a.parquet", 0), ("b.parquet", 10)):
        write(tmp_path / name, {"n": range(offset, offset + 10)}, compression="none")
    source = InputSource.open([str(tmp_path)])
    fingerprint = source.fingerprint()
    os.utime(tmp_path / "b.parquet", (1, 1))
    assert numbers(InputSource.reopen(fingerprint)) == list(range(20))
    source.verify_unchanged(fingerprint)

    data = bytearray((tmp_path / "b.parquet").read_bytes())
    data[10] ^= 1  # same size, same time
    (tmp_path / "b.parquet").write_bytes(data)
    os.utime(tmp_path / "b.parquet", (1, 1))
    reopened = InputSource.reopen(fingerprint)
    assert numbers(reopened, 0, 10) == list(range(10))
    with pytest.raises(InputError, match=r"b\.parquet changed") as caught:
        numbers(reopened)
    assert caught.value.code == "input_changed"
    (tmp_path / "b.parquet").unlink()
    with pytest.raises(InputError, match=r"b\.parquet changed .* it is gone"):
        source.verify_unchanged()


def test_a_file_that_is_being_written_again_is_changed_and_not_damaged(tmp_path):
    """After its first rows were read and found as planned; half of it is no Parquet file."""
    path = tmp_path / "a.parquet"
    write(path, {"n": range(40)}, row_group_size=10)
    source = InputSource.open([str(path)])
    assert numbers(source, 0, 10) == list(range(10))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"a\.parquet changed") as caught:
        numbers(source, 10, 20)
    assert caught.value.code == "input_changed"


def test_a_large_file_written_again_is_a_change_even_with_equal_ends(tmp_path):
    """Beyond 4 MiB only head and tail are hashed, so the time decides."""
    noise = np.random.default_rng(1).integers(0, 2**60, 1_000_000)
    write(tmp_path / "a.parquet", {"n": noise}, compression="none", use_dictionary=False, write_statistics=False)
    source = InputSource.open([str(tmp_path)])
    source.verify_unchanged()
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[3_000_000] ^= 1
    (tmp_path / "a.parquet").write_bytes(data)
    os.utime(tmp_path / "a.parquet", (1, 1))
    with pytest.raises(InputError, match="written again"):
        source.verify_unchanged()


def test_text_of_every_encoding_in_one_folder_is_one_column(tmp_path):
    """String, large_string, dictionary and string_view in different files, a column missing in one."""
    kinds = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
    for i, kind in enumerate(kinds):
        write(tmp_path / f"{i}.parquet", {"n": [i], "t": pa.array([f"text {i}"]).cast(kind)})
    write(tmp_path / "9.parquet", {"n": [9]})
    source = InputSource.open([str(tmp_path)])
    assert source.schema.field("t").type == pa.large_string()
    texts = [value for _, batch in source.iter_batches(columns=["t"]) for value in batch.column(0).to_pylist()]
    assert texts == ["text 0", "text 1", "text 2", "text 3", None]
    assert "'t'" in source.warnings[0]


def test_dictionaries_stay_dictionaries_where_all_files_have_them(tmp_path):
    for i in range(2):
        write(tmp_path / f"{i}.parquet", {"d": pa.array([f"a{i}", "b", None]).dictionary_encode()})
    source = InputSource.open([str(tmp_path)])
    assert pa.types.is_dictionary(source.schema.field("d").type)
    values = [value for _, batch in source.iter_batches() for value in batch.column(0).to_pylist()]
    assert values == ["a0", "b", None, "a1", "b", None]


def test_all_bad_files_are_named_together_before_anything_runs(tmp_path):
    """A zero-byte file, a cut-off one, one that is no Parquet: the good ones wait for the mending."""
    write(tmp_path / "good.parquet", {"n": [1]})
    (tmp_path / "zero.parquet").write_bytes(b"")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "good.parquet").read_bytes()[:-20])
    (tmp_path / "text.parquet").write_bytes(b"hello " * 100)
    with pytest.raises(InputError) as caught:
        InputSource.open([str(tmp_path)])
    for name in ("zero.parquet", "cut.parquet", "text.parquet"):
        assert name in caught.value.message
    assert "0 bytes" in caught.value.message
    assert "good.parquet" not in caught.value.message


def test_data_damaged_behind_a_good_footer_is_a_user_error_that_names_file_and_row(tmp_path):
    write(tmp_path / "a.parquet", {"n": range(10_000)}, use_dictionary=False, write_page_checksum=True)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[100:10_000] = bytes(9_900)
    (tmp_path / "a.parquet").write_bytes(data)
    source = InputSource.open([str(tmp_path)])
    with pytest.raises(InputError, match=r"a\.parquet is damaged near row 0"):
        numbers(source)


def test_an_input_without_rows_is_allowed_and_said(tmp_path):
    write(tmp_path / "a.parquet", {"n": pa.array([], pa.int64())})
    source = InputSource.open([str(tmp_path)])
    assert source.num_rows == 0
    assert list(source.iter_batches()) == []
    assert "no rows" in source.warnings[-1]


def test_one_huge_row_group_is_named_in_a_warning_and_many_tiny_ones_are_read(tmp_path):
    write(tmp_path / "a.parquet", {"n": range(1_200_000)}, row_group_size=1_200_000)
    source = InputSource.open([str(tmp_path)])
    assert "a.parquet: row group 0 has 1,200,000 rows" in source.warnings[0]
    assert numbers(source, 1_100_000, 1_100_010) == list(range(1_100_000, 1_100_010))
    write(tmp_path / "a.parquet", {"n": range(20_000)}, row_group_size=1)
    source = InputSource.open([str(tmp_path)])
    assert "20,000 row groups" in source.warnings[0]
    assert numbers(source, 15_000, 17_000) == list(range(15_000, 17_000))


def test_wide_rows_come_in_small_batches(tmp_path):
    """The bytes of a batch are bounded, not only its rows."""
    text = [os.urandom(1 << 19).hex() for _ in range(40)]  # 1 MiB a row, which no encoding shrinks much
    write(tmp_path / "a.parquet", {"n": range(40), "t": text}, compression="none", use_dictionary=False)
    source = InputSource.open([str(tmp_path)])
    sizes = [batch.num_rows for _, batch in source.iter_batches()]
    assert sum(sizes) == 40
    assert max(sizes) <= 16


def test_text_that_repeats_is_small_in_the_file_and_bounded_in_memory(tmp_path):
    """Dictionary-encoded, 2,000 rows of 1 MiB are 1 MiB on disk; only reading tells. The first rows may be small, too."""
    text = "x" * (1 << 20)
    for small in (0, 500):
        column = pa.array(["s"] * small + [text] * 40, pa.string())
        write(tmp_path / "a.parquet", {"n": range(small + 40), "t": column})
        assert (tmp_path / "a.parquet").stat().st_size < 2 << 20
        source = InputSource.open([str(tmp_path)])
        batches = [(first, batch.num_rows, batch.nbytes) for first, batch in source.iter_batches(batch_rows=520)]
        assert [first for first, _, _ in batches] == [sum(b[1] for b in batches[:i]) for i in range(len(batches))]
        assert sum(rows for _, rows, _ in batches) == small + 40
        # One batch may be too large before it is noticed: here of 20 MiB, in a file of 40.
        assert max(size for _, _, size in batches[small // 500 :]) <= 64 << 20


def test_column_names_with_dots_do_not_mix_with_struct_fields(tmp_path):
    write(tmp_path / "a.parquet", {"a": [{"b": 1}], "a.b": [2], "": [3]})
    source = InputSource.open([str(tmp_path)])
    for name, value in (("a", {"b": 1}), ("a.b", 2), ("", 3)):
        batch = next(source.iter_batches(columns=[name]))[1]
        assert batch.schema.names == [name]
        assert batch.column(0).to_pylist() == [value]
