"""The data set layer over a real S3 API (moto's server), through pyarrow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import boto3
import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs as pafs

from batchinfer.dataset.filesystem import Location
from batchinfer.dataset.layout import OutputLayout
from batchinfer.dataset.source import InputSource
from batchinfer.dataset.staged_file import StagedFile
from batchinfer.dataset.verify import verify
from batchinfer.errors import ConflictError, InputError
from tests.dataset_job import DatasetJob

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.service


@pytest.fixture
def client(s3_endpoint: str):
    """boto3, as an independent view of the bucket."""
    client = boto3.client("s3", endpoint_url=s3_endpoint)
    client.create_bucket(Bucket="bucket")
    yield client
    client.close()


def keys(client, prefix=""):
    found = client.list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", [])
    return [entry["Key"] for entry in found]


def upload(client, key, rows, tmp_path: Path):
    pq.write_table(pa.table(rows), tmp_path / "upload.parquet", row_group_size=4)
    client.upload_file(str(tmp_path / "upload.parquet"), "bucket", key)


@pytest.mark.parametrize("output", ["s3://bucket/results/run", "s3://bucket/results/x.parquet"])
def test_a_job_from_bucket_to_bucket(client, tmp_path, output):
    """Folder and single file; the objects that are visible are the results and nothing else."""
    upload(client, "in/a.parquet", {"prompt": [f"p{i}" for i in range(15)]}, tmp_path)
    upload(client, "in/b.parquet", {"prompt": [f"p{i}" for i in range(15, 25)]}, tmp_path)
    job = DatasetJob(["s3://bucket/in"], output)
    assert job.source.num_rows == 25
    assert job.run().counts["succeeded"] == 25
    single = output.endswith(".parquet")
    shards = [f"results/run/shard-{i:05d}.parquet" for i in range(3)]
    expected = ["results/_x.manifest.json", "results/x.parquet"] if single else [
        "results/run/_SUCCESS", "results/run/_job.json", "results/run/_manifest.json", *shards
    ]  # fmt: skip
    found = keys(client, "results")
    assert [key for key in found if not key.endswith("/")] == expected
    assert not any("_parts" in key or ".x.parquet" in key for key in found)  # no trace of the working folders either
    table = pq.read_table(job.layout.output.path, filesystem=job.layout.output.filesystem)
    assert table.column("output").to_pylist() == [f"echo p{i}" for i in range(25)]
    report = verify(output)
    assert (report.problems, report.input_checked) == ((), True)


def test_globs_and_single_objects_and_what_is_not_there(client, tmp_path):
    upload(client, "in/a1.parquet", {"prompt": ["x"]}, tmp_path)
    upload(client, "in/sub/a2.parquet", {"prompt": ["y"]}, tmp_path)
    for uri, rows in [
        ("s3://bucket/in/a1.parquet", 1),
        ("s3://bucket/in/*.parquet", 1),
        ("s3://bucket/**/a*.parquet", 2),
    ]:
        assert InputSource.open([uri]).num_rows == rows
    for uri in ("s3://bucket/nope", "s3://nobucket/in", "s3://bucket/in/b*.parquet"):
        with pytest.raises(InputError):
            InputSource.open([uri])


def test_an_object_that_was_replaced_is_a_change(client, tmp_path):
    upload(client, "in/a.parquet", {"prompt": ["x", "y"]}, tmp_path)
    fingerprint = InputSource.open(["s3://bucket/in"]).fingerprint()
    InputSource.reopen(fingerprint).verify_unchanged()
    upload(client, "in/a.parquet", {"prompt": ["x", "z"]}, tmp_path)
    with pytest.raises(InputError, match=r"s3://bucket/in/a\.parquet changed"):
        list(InputSource.reopen(fingerprint).iter_batches())


def test_a_write_that_fails_leaves_no_object(client):
    """Arrow's own stream publishes what it has when it is dropped; the staged file does not."""
    target = Location.parse("s3://bucket/out/x.bin")
    with pytest.raises(RuntimeError), StagedFile(target) as staged:
        staged.write(b"half")
        raise RuntimeError
    assert keys(client) == []
    with StagedFile(target) as staged:
        staged.write(b"whole" * (3 << 20))  # several upload parts
    assert client.head_object(Bucket="bucket", Key="out/x.bin")["ContentLength"] == 15 << 20


def test_shards_become_visible_one_by_one_and_only_after_their_commit(client, tmp_path):
    """Here there is no rename: the hidden object is copied once the ledger has committed it, then deleted."""
    upload(client, "in/a.parquet", {"prompt": [f"p{i}" for i in range(20)]}, tmp_path)
    job = DatasetJob(["s3://bucket/in/a.parquet"], "s3://bucket/out")
    job.layout.prepare()
    job.layout.prepare()
    shard = job.run_shard(0, 0, 10)
    visible = [key for key in keys(client, "out") if not key.removeprefix("out/").startswith("_")]
    assert visible == ["out/shard-00000.parquet"]
    assert job.layout.publish_shard(shard.path) == "s3://bucket/out/shard-00000.parquet"  # again: nothing to do
    with pytest.raises(ConflictError):
        OutputLayout("s3://bucket/out", "job_2").prepare()


def test_duckdb_reads_what_was_written(client, tmp_path):
    """A second reader, over the bytes that boto3 downloads."""
    upload(client, "in/a.parquet", {"prompt": ["x", None]}, tmp_path)
    DatasetJob(["s3://bucket/in/a.parquet"], "s3://bucket/x.parquet").run()
    client.download_file("bucket", "x.parquet", str(tmp_path / "x.parquet"))
    rows = duckdb.sql(f"SELECT prompt, status, error.code FROM '{tmp_path}/x.parquet' ORDER BY row_index").fetchall()
    assert rows == [("x", "succeeded", None), (None, "errored", "null_field")]


def test_the_endpoint_comes_from_the_environment(client, s3_endpoint):
    assert isinstance(Location.parse("s3://bucket/x").filesystem, pafs.S3FileSystem)
    Location.parse("s3://bucket/x").filesystem.open_output_stream("bucket/x").close()
    assert keys(client) == ["x"]
