from __future__ import annotations

import fnmatch
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.dataset.listing import _glob_regex, find_files
from batchinfer.errors import InputError


def make(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".jsonl"):
            path.write_text('{"custom_id": "a", "body": {}}\n')
        else:
            pq.write_table(pa.table({"prompt": ["x"]}), path)


def names(listing, folder):
    return [os.path.relpath(found.location.path, folder) for found in listing.files]


def test_a_folder_is_read_at_any_depth_sorted_without_hidden_files(tmp_path):
    """Rows are numbered over files sorted by path; what begins with _ or . is no data."""
    make(tmp_path, "b.parquet", "a.parquet", "sub/c.parquet", "_parts/x.parquet", ".y.parquet", "sub/_z.parquet")
    assert names(find_files([str(tmp_path)]), tmp_path) == ["a.parquet", "b.parquet", "sub/c.parquet"]


def test_inputs_keep_the_order_in_which_they_were_given_and_none_is_read_twice(tmp_path):
    make(tmp_path, "b.parquet", "a.parquet")
    listing = find_files([str(tmp_path / "b.parquet"), str(tmp_path), str(tmp_path / "*.parquet")])
    assert names(listing, tmp_path) == ["b.parquet", "a.parquet"]
    assert "more than once" in listing.warnings[0]


def test_globs_match_within_one_name_and_two_stars_any_depth(tmp_path):
    make(tmp_path, "a1.parquet", "a2.parquet", "b1.parquet", "sub/a3.parquet", "sub/deep/a4.parquet")
    assert names(find_files([f"{tmp_path}/a?.parquet"]), tmp_path) == ["a1.parquet", "a2.parquet"]
    assert names(find_files([f"{tmp_path}/[!b]*.parquet"]), tmp_path) == ["a1.parquet", "a2.parquet"]
    assert names(find_files([f"{tmp_path}/*/a3.parquet"]), tmp_path) == ["sub/a3.parquet"]
    found = names(find_files([f"{tmp_path}/**/a*.parquet"]), tmp_path)
    assert found == ["a1.parquet", "a2.parquet", "sub/a3.parquet", "sub/deep/a4.parquet"]


def test_a_name_that_exists_is_no_pattern(tmp_path):
    make(tmp_path, "odd[1].parquet", "odd1.parquet")
    assert names(find_files([str(tmp_path / "odd[1].parquet")]), tmp_path) == ["odd[1].parquet"]


@given(st.text("ab.-_", min_size=1, max_size=6), st.text("ab*?.-_", min_size=1, max_size=6))
def test_patterns_without_folders_agree_with_fnmatch(name, pattern):
    """The standard library is the reference for ``*`` and ``?``."""
    assert bool(_glob_regex(pattern).fullmatch(name)) == fnmatch.fnmatchcase(name, pattern)


def test_results_of_an_earlier_job_inside_the_input_folder_are_no_input(tmp_path):
    make(tmp_path, "a.parquet", "results/shard-00000.parquet")
    (tmp_path / "results" / "_job.json").write_text("{}")
    assert names(find_files([str(tmp_path)]), tmp_path) == ["a.parquet"]
    assert names(find_files([str(tmp_path / "results")]), tmp_path) == ["results/shard-00000.parquet"]


def test_a_file_without_an_extension_is_known_by_its_first_bytes(tmp_path):
    make(tmp_path, "a.parquet", "b.jsonl")
    (tmp_path / "a.parquet").rename(tmp_path / "part-0")
    (tmp_path / "b.jsonl").rename(tmp_path / "requests.txt")
    assert find_files([str(tmp_path / "part-0")]).files[0].format == "parquet"
    assert find_files([str(tmp_path / "requests.txt")]).files[0].format == "jsonl"


def test_what_is_left_out_is_said(tmp_path):
    make(tmp_path, "day=1/a.parquet")
    (tmp_path / "README.md").write_text("hello")
    warnings = " ".join(find_files([str(tmp_path)]).warnings)
    assert "1 file(s)" in warnings
    assert "Hive" in warnings


def test_inputs_that_lead_nowhere_are_refused_by_name(tmp_path):
    make(tmp_path, "a.parquet", "b.jsonl")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").write_bytes(b"hello")
    for uri, words in [
        (tmp_path / "nope", "does not exist"),
        (tmp_path / "empty", "no .parquet or .jsonl"),
        (tmp_path / "*.csv", "no .parquet or .jsonl"),
        (tmp_path / "notes", "neither Parquet nor JSONL"),
        (tmp_path, "mix"),
        ("gopher://x/y", "gopher"),
    ]:
        with pytest.raises(InputError, match=words):
            find_files([str(uri)])
