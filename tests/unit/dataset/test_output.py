from __future__ import annotations

import json

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.dataset.layout import OutputLayout
from batchinfer.dataset.manifest import Manifest, ManifestFile, read_manifest
from batchinfer.dataset.merge import merge_shard
from batchinfer.dataset.verify import verify
from batchinfer.errors import BatchInferError, ConflictError, InputError, NotFoundError
from tests.dataset_job import DatasetJob


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": [f"p{i}" for i in range(25)]}), path)
    return str(path)


def rows_by_duckdb(pattern):
    return [row[0] for row in duckdb.sql(f"SELECT row_index FROM '{pattern}' ORDER BY 1").fetchall()]


def test_the_folder_is_a_readable_data_set_at_every_moment(tmp_path, source):
    """DESIGN 3.7, seen by two independent readers; a shard appears whole, with its rows in input order."""
    job = DatasetJob([source], str(tmp_path / "out"))
    job.layout.prepare()
    shards, seen = [], []
    for index, (start, end) in enumerate(job.ranges()):
        parts = job.write_parts(index, start, end)
        merged = merge_shard(job.source, job.schema, start, end, parts, job.layout.merged_path(index, 1))
        assert pq.read_table(tmp_path / "out").num_rows == start  # hidden until it is committed
        job.layout.publish_shard(merged.path)
        assert pq.read_table(tmp_path / "out").column("row_index").to_pylist() == list(range(end))
        seen.append(rows_by_duckdb(f"{tmp_path}/out/**/*.parquet"))
        shards.append((index, start, end, merged))
    assert seen[-1] == list(range(25))
    assert [len(rows) for rows in seen] == [10, 20, 25]


def test_publishing_twice_is_publishing_once_and_a_lost_file_is_an_error(tmp_path, source):
    job = DatasetJob([source], str(tmp_path / "out"))
    shard = job.run_shard(0, 0, 10)
    visible = job.layout.publish_shard(shard.path)
    assert visible == job.layout.shard_path(0) == str(tmp_path / "out" / "shard-00000.parquet")
    (tmp_path / "out" / "shard-00000.parquet").unlink()
    with pytest.raises(BatchInferError, match="is gone"):
        job.layout.publish_shard(shard.path)
    with pytest.raises(ValueError, match="no merged shard"):
        job.layout.publish_shard("elsewhere.parquet")


def test_a_zombie_that_wakes_up_after_a_newer_commit_cannot_touch_the_visible_file(tmp_path, source):
    """Its merged file has its own name; what it was about to publish was moved on its behalf, so there is nothing left."""
    job = DatasetJob([source], str(tmp_path / "out"))
    parts = job.write_parts(0, 0, 10)
    job.next_attempt = 2
    zombie = merge_shard(job.source, job.schema, 0, 10, parts, job.layout.merged_path(0, 1), metadata={"who": "zombie"})
    job.layout.publish_shard(zombie.path)  # the finalizer did it, while the worker was stopped
    newer = merge_shard(job.source, job.schema, 0, 10, parts, job.layout.merged_path(0, 2), metadata={"who": "newer"})
    job.layout.publish_shard(newer.path)
    job.layout.publish_shard(zombie.path)
    footer = pq.ParquetFile(job.layout.shard_path(0)).metadata.metadata
    assert footer[b"batchinfer.who"] == b"newer"


def test_a_finished_folder_has_manifest_and_mark_and_no_leftovers(tmp_path, source):
    job = DatasetJob([source], str(tmp_path / "out"))
    garbage = tmp_path / "out" / "_parts" / "shard-00000" / "part-77-00000.part"  # of a fenced-out attempt
    garbage.parent.mkdir(parents=True)
    garbage.write_bytes(b"garbage")
    manifest = job.finalize([job.run_shard(i, *span) for i, span in enumerate(job.ranges())])
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    shards = [f"shard-{i:05d}.parquet" for i in range(3)]
    assert names == ["_SUCCESS", "_manifest.json", *shards]
    assert read_manifest(str(tmp_path / "out")) == manifest
    assert [(file.name, file.row_start, file.row_end) for file in manifest.files] == [
        (shards[0], 0, 10), (shards[1], 10, 20), (shards[2], 20, 25)
    ]  # fmt: skip
    assert manifest.counts == {
        "succeeded": 25, "errored": 0, "expired": 0, "cancelled": 0, "skipped": 0, "deduplicated": 0,
        "filtered": 0,
    }  # fmt: skip


def test_a_sweep_with_an_old_list_spares_what_a_retry_wrote_since(tmp_path, source):
    """A finalizer that was stopped in mid-sweep must not delete the parts of the retry that came after it."""
    job = DatasetJob([source], str(tmp_path / "out"))
    old = job.write_parts(0, 0, 10)
    listed = job.layout.leftovers()
    job.next_attempt = 2
    new = job.write_parts(0, 0, 10)
    assert job.layout.sweep_garbage(garbage=listed) == len(old)
    assert sorted(where.uri for where in job.layout.leftovers()) == sorted(new)
    assert job.layout.sweep_garbage(known=new[:1]) == len(new) - 1


def test_a_single_file_appears_at_the_end_with_its_manifest_beside_it(tmp_path, source):
    out = tmp_path / "results"
    job = DatasetJob([source], str(out / "x.parquet"))
    job.layout.prepare()
    shards = [job.run_shard(i, *span) for i, span in enumerate(job.ranges())]
    assert not (out / "x.parquet").exists()
    assert [path.name for path in out.iterdir()] == [".x.parquet.job_1"]
    job.finalize(shards)
    assert sorted(path.name for path in out.iterdir()) == ["_x.manifest.json", "x.parquet"]
    assert pq.read_table(out).column("row_index").to_pylist() == list(range(25))  # the folder reads as a data set, too
    assert rows_by_duckdb(out / "x.parquet") == list(range(25))
    assert verify(str(out / "x.parquet")).ok


def test_an_output_that_is_taken_is_refused_and_the_jobs_own_is_not(tmp_path, source):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("do not overwrite")
    with pytest.raises(ConflictError, match=r"thesis\.txt") as caught:
        OutputLayout(str(tmp_path / "out"), "job_1").prepare()
    assert caught.value.code == "output_exists"
    OutputLayout(str(tmp_path / "new"), "job_1").prepare()
    OutputLayout(str(tmp_path / "new"), "job_1").prepare()
    with pytest.raises(ConflictError, match="job job_1"):
        OutputLayout(str(tmp_path / "new"), "job_2").prepare()
    with pytest.raises(ConflictError, match="already exists"):
        OutputLayout(source, "job_1").prepare()


@pytest.mark.parametrize("name", ["out", "out.parquet"])
def test_a_job_without_rows_ends_as_one_file_without_rows(tmp_path, name):
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "in.parquet")
    job = DatasetJob([str(tmp_path / "in.parquet")], str(tmp_path / name))
    manifest = job.run()
    assert manifest.num_rows == 0
    assert pq.read_table(tmp_path / name).schema.remove_metadata() == job.schema.output_schema
    assert verify(str(tmp_path / name)).ok


def test_a_prefix_is_put_before_every_column_of_ours(tmp_path):
    pq.write_table(pa.table({"prompt": ["a"], "status": ["mine"], "bi": [1]}), tmp_path / "in.parquet")
    job = DatasetJob([str(tmp_path / "in.parquet")], str(tmp_path / "out"), prefix="bi_")
    assert job.run().counts["succeeded"] == 1
    row = pq.read_table(tmp_path / "out").to_pylist()[0]
    assert (row["status"], row["bi_status"], row["bi_row_index"]) == ("mine", "succeeded", 0)
    assert verify(str(tmp_path / "out")).ok


def test_a_manifest_that_is_missing_damaged_or_too_new_is_said(tmp_path):
    with pytest.raises(NotFoundError, match="has not finished"):
        read_manifest(str(tmp_path))
    manifest = Manifest("job_1", 1, (ManifestFile("a", 0, 1, 2, "ff"),), {"succeeded": 1})
    for text in ("{", "[]", '{"job_id": 1}', '{"files": [{"nope": 1}]}'):
        (tmp_path / "_manifest.json").write_text(text)
        with pytest.raises(InputError, match="damaged"):
            read_manifest(str(tmp_path))
    (tmp_path / "_manifest.json").write_text(manifest.to_json())
    assert read_manifest(str(tmp_path)) == manifest
    (tmp_path / "_manifest.json").write_text(json.dumps(json.loads(manifest.to_json()) | {"version": 99}))
    with pytest.raises(InputError, match="version 99"):
        read_manifest(str(tmp_path))
