from __future__ import annotations

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.dataset.manifest import read_manifest
from batchinfer.dataset.verify import verify
from batchinfer.errors import NotFoundError
from tests.dataset_job import DatasetJob


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    values = [1.5, float("nan"), None] * 10
    table = pa.table(
        {"prompt": [f"p{i}" for i in range(30)], "f": values, "d": pa.array(["x", "y"] * 15).dictionary_encode()}
    )
    pq.write_table(table, folder / "in.parquet", row_group_size=4)
    DatasetJob([str(folder / "in.parquet")], str(folder / "out")).run()
    return folder


@pytest.fixture
def out(finished, tmp_path):
    """A copy to tamper with; the input stays where it was."""
    shutil.copytree(finished / "out", tmp_path / "out")
    return tmp_path / "out"


def rewrite(path, change):
    """Write a file again after a change to its rows, as somebody with a notebook would."""
    table = pq.read_table(path)
    pq.write_table(pa.Table.from_pylist(change(table.to_pylist()), schema=table.schema), path)


def problems(out, **options):
    return verify(str(out), **options).problems


def test_a_whole_output_has_no_problems_and_says_what_was_checked(out):
    report = verify(str(out))
    assert (report.ok, report.problems, report.input_checked) == (True, (), True)
    assert (report.num_files, report.num_rows, report.counts["succeeded"]) == (3, 30, 30)


def test_a_missing_file_is_named_with_its_rows(out):
    (out / "shard-00001.parquet").unlink()
    assert problems(out) == (
        "shard-00001.parquet is missing, with the rows 10 to 19",
        "the files have 20 succeeded, but the manifest says 30 succeeded",
    )


def test_a_missing_row_is_named(out):
    rewrite(out / "shard-00001.parquet", lambda rows: [row for row in rows if row["row_index"] != 13])
    found = problems(out)
    assert "shard-00001.parquet was changed after it was finished" in found[0]
    assert found[1] == "shard-00001.parquet: 1 row(s) (13) without an outcome"
    assert found[2] == "the files have 29 succeeded, but the manifest says 30 succeeded"


def test_missing_rows_at_the_end_are_named(out):
    rewrite(out / "shard-00001.parquet", lambda rows: rows[:3])
    assert "shard-00001.parquet: 7 row(s) (13, 14, 15, 16, 17, ...) without an outcome" in problems(out)


def test_a_row_that_comes_twice_is_named(out):
    rewrite(out / "shard-00002.parquet", lambda rows: [*rows[:5], rows[4], *rows[5:]])
    assert "shard-00002.parquet: 1 row(s) (24) with more than one outcome" in problems(out)


def test_a_row_in_place_of_another_is_both_missing_and_double(out):
    rewrite(out / "shard-00000.parquet", lambda rows: [*rows[:3], rows[0], *rows[4:]])
    found = problems(out)
    assert "shard-00000.parquet: 1 row(s) (3) without an outcome" in found
    assert "shard-00000.parquet: 1 row(s) (0) with more than one outcome" in found


def test_rows_of_another_file_and_a_wrong_order_are_told_apart(out):
    rewrite(out / "shard-00000.parquet", lambda rows: [*rows[:9], {**rows[9], "row_index": 25}])
    rewrite(out / "shard-00001.parquet", lambda rows: rows[::-1])
    found = problems(out)
    assert "shard-00000.parquet: 1 row(s) that belong to another file, such as [25]" in found
    assert "shard-00001.parquet: the rows are all there, but not in input order" in found


def test_an_edited_answer_shows_in_the_hash_and_an_edited_input_column_by_row(out):
    rewrite(
        out / "shard-00001.parquet",
        lambda rows: [{**row, "output": "42"} if row["row_index"] == 12 else row for row in rows],
    )
    (found,) = problems(out)
    assert found.startswith("shard-00001.parquet was changed after it was finished")
    assert found.endswith("its rows are all there, so values in them were edited")
    rewrite(
        out / "shard-00002.parquet",
        lambda rows: [{**row, "prompt": "?"} if row["row_index"] == 21 else row for row in rows],
    )
    assert "shard-00002.parquet: column 'prompt' is not the input's in 1 row(s): 21" in problems(out)


def test_a_relabelled_status_shows_in_the_counts(out):
    rewrite(
        out / "shard-00000.parquet",
        lambda rows: [{**rows[0], "status": "errored"}, {**rows[1], "status": "fine"}, *rows[2:]],
    )
    found = problems(out, check_input=False)
    assert "shard-00000.parquet has rows of unknown status fine" in found
    assert "the files have 1 errored, 1 fine, 28 succeeded, but the manifest says 30 succeeded" in found


def test_a_truncated_file_and_one_that_is_no_parquet_are_named(out):
    data = (out / "shard-00000.parquet").read_bytes()
    (out / "shard-00000.parquet").write_bytes(data[:-9])
    (out / "shard-00001.parquet").write_bytes(b"")
    text = " ".join(problems(out))
    assert "shard-00000.parquet cannot be read as Parquet" in text
    assert "shard-00001.parquet cannot be read as Parquet" in text


def test_a_file_that_readers_would_read_too_is_named(out):
    shutil.copy(out / "shard-00000.parquet", out / "copy.parquet")
    assert problems(out) == ("copy.parquet is not in the manifest: who reads the folder reads it too",)


def test_a_manifest_whose_files_do_not_tile_the_input_is_wrong(out):
    text = (out / "_manifest.json").read_text()
    (out / "_manifest.json").write_text(text.replace('"num_rows": 30', '"num_rows": 31', 1))
    assert "no file of the manifest has the rows 30 to 30" in problems(out)
    (out / "_manifest.json").write_text(text.replace('"row_start": 10', '"row_start": 8', 1))
    assert "two files of the manifest have the rows 8 to 9" in problems(out)


def test_without_the_input_the_proof_stands_on_the_files_and_says_so(out, finished, tmp_path):
    manifest = read_manifest(str(out))
    gone = (out / "_manifest.json").read_text().replace(str(finished / "in.parquet"), str(tmp_path / "gone.parquet"))
    (out / "_manifest.json").write_text(gone)
    report = verify(str(out))
    assert (report.ok, report.input_checked) == (True, False)
    assert manifest.input_fingerprint["num_rows"] == 30


def test_without_a_manifest_there_is_nothing_to_prove(tmp_path):
    with pytest.raises(NotFoundError, match="has no manifest"):
        verify(str(tmp_path))
