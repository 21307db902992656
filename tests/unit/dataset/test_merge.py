from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchinfer.dataset import part_index
from batchinfer.dataset.merge import base_rows_with_status, merge_shard
from batchinfer.dataset.schema import ResultRow
from batchinfer.dataset.sink import PartWriter
from batchinfer.errors import BatchInferError
from batchinfer.types import ErrorCode, RowError, RowStatus
from tests.dataset_job import DatasetJob, echo


@pytest.fixture
def job(tmp_path):
    pq.write_table(pa.table({"prompt": [f"p{i}" for i in range(30)], "n": range(30)}), tmp_path / "in.parquet")
    return DatasetJob([str(tmp_path / "in.parquet")], str(tmp_path / "out"), shard_rows=30)


def merge(job, parts, start=0, end=30, **options):
    return merge_shard(job.source, job.schema, start, end, parts, job.layout.merged_path(0, 1), **options)


def results(job, rows, attempt=1):
    return [ResultRow(row, RowStatus.SUCCEEDED, "m", attempt, output=f"{row} by {attempt}") for row in rows]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_come_out_in_input_order_however_they_ended(job, data):
    """Any order of completion, any cut into parts, any shard range."""
    start = data.draw(st.integers(0, 29))
    end = data.draw(st.integers(start + 1, 30))
    rows = data.draw(st.permutations(range(start, end)))
    writer, parts = PartWriter(job.layout, job.schema, 0, data.draw(st.integers(1, 10**9))), []
    while rows:
        size = data.draw(st.integers(1, len(rows)))
        parts.append(writer.write(results(job, rows[:size])).path)
        rows = rows[size:]
    merged = merge(job, data.draw(st.permutations(parts)), start, end)
    table = pq.read_table(merged.path)
    assert table.schema.remove_metadata() == job.schema.output_schema
    assert table.column("n").to_pylist() == list(range(start, end))
    assert table.column("row_index").to_pylist() == list(range(start, end))
    assert table.column("output").to_pylist() == [f"{row} by 1" for row in range(start, end)]


def test_a_tiny_cache_and_tiny_row_groups_change_nothing(job, monkeypatch):
    """The worst order of completion: every part has rows of the whole shard."""
    monkeypatch.setattr(part_index, "_CACHE_BYTES", 1)
    writer = PartWriter(job.layout, job.schema, 0, 1)
    parts = [writer.write(results(job, range(i, 30, 7))).path for i in range(7)]
    assert pq.read_table(merge(job, parts).path).column("output").to_pylist() == [f"{i} by 1" for i in range(30)]


def test_large_parts_of_several_row_groups(tmp_path):
    num_rows = 10_000
    pq.write_table(pa.table({"prompt": ["x"] * num_rows}), tmp_path / "in.parquet")
    job = DatasetJob([str(tmp_path / "in.parquet")], str(tmp_path / "out"))
    parts = [PartWriter(job.layout, job.schema, 0, 1).write(results(job, range(num_rows))).path]
    outputs = pq.read_table(merge(job, parts, 0, num_rows).path)
    assert outputs.column("output").to_pylist() == [f"{i} by 1" for i in range(num_rows)]


def test_a_row_without_outcome_with_two_or_of_another_shard_stops_the_merge_and_nothing_is_written(job):
    """Nothing lost, nothing twice: the merge is the place where it would show."""
    one = PartWriter(job.layout, job.schema, 0, 1)
    parts = [one.write(results(job, range(20))).path]
    with pytest.raises(BatchInferError, match="10 rows have no outcome, the first is row 20"):
        merge(job, parts)
    parts.append(one.write(results(job, range(19, 30))).path)
    with pytest.raises(BatchInferError, match="row 19 has two outcomes"):
        merge(job, parts)
    with pytest.raises(BatchInferError, match="not of its shard"):
        merge(job, parts[:1], 0, 19)
    assert not Path(job.layout.merged_path(0, 1)).exists()


def test_the_footer_says_where_the_file_comes_from(job):
    parts = job.write_parts(0, 0, 30)
    merged = merge(job, parts, metadata={"job_id": "job_1", "model": "é"})
    footer = pq.ParquetFile(merged.path).metadata.metadata
    assert footer[b"batchinfer.job_id"] == b"job_1"
    assert footer[b"batchinfer.model"] == "é".encode()
    assert len(footer[b"batchinfer.input_digest"]) == 64


def fail_some(row, attempt):
    result = echo(row, attempt)
    if row.row_index % 7 == 3:
        error = RowError(ErrorCode.ENGINE_ERROR, "boom")
        return replace(result, status=RowStatus.ERRORED, output=None, error=error, finish_reason=None)
    return result


@pytest.mark.parametrize("single", [False, True])
def test_a_retry_runs_the_failed_rows_only_and_keeps_the_others_byte_for_byte(tmp_path, single):
    """The base is the published shard, or the single output file."""
    pq.write_table(pa.table({"prompt": [f"p{i}" for i in range(35)]}), tmp_path / "in.parquet")
    output = str(tmp_path / ("out.parquet" if single else "out"))
    job = DatasetJob([str(tmp_path / "in.parquet")], output, answer=fail_some)
    job.layout.prepare()
    shards = [job.run_shard(i, *span) for i, span in enumerate(job.ranges())]
    assert job.finalize(shards).counts["errored"] == 5
    before = pq.read_table(output).to_pylist()

    index, start, end = 1, 10, 20  # rows 10 and 17 failed here; only this shard is run again
    base = job.layout.base(index, start)
    failed = base_rows_with_status(base, start, end, {RowStatus.ERRORED, RowStatus.EXPIRED})
    assert failed == {10: RowStatus.ERRORED, 17: RowStatus.ERRORED}
    job.layout.retract()
    attempt = 99
    writer = PartWriter(job.layout, job.schema, index, attempt)
    part = writer.write([echo(row, attempt) for row in job.rows(start, end) if row.row_index in failed])
    merged = merge_shard(
        job.source, job.schema, start, end, [part.path], job.layout.merged_path(index, attempt), base=base
    )
    job.layout.publish_shard(merged.path)
    shards[1] = replace(shards[1], path=merged.path, num_bytes=merged.num_bytes, sha256=merged.sha256)
    assert job.finalize(shards).counts["errored"] == 3

    after = pq.read_table(output).to_pylist()
    changed = [i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    assert changed == [10, 17]
    assert [after[i]["attempt"] for i in changed] == [99, 99]

    from batchinfer.dataset.verify import verify

    assert verify(output).problems == ()
    assert job.finalize(shards).counts["errored"] == 3  # and once more, as after a crash of the finalizer
    assert verify(output).problems == ()


def test_invalid_utf8_of_the_input_is_repaired_in_the_output_and_flagged(tmp_path):
    """So that every reader can read the output."""
    binary = pa.array([b"ok", b"\xff", "ü".encode()])
    text = pa.Array.from_buffers(pa.string(), 3, binary.buffers())
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], "note": text}), tmp_path / "in.parquet")
    DatasetJob([str(tmp_path / "in.parquet")], str(tmp_path / "out")).run()
    table = pq.read_table(tmp_path / "out")
    assert table.column("note").to_pylist() == ["ok", "\ufffd", "ü"]
    assert table.column("warnings").to_pylist() == [None, ["text_replaced"], None]

    from batchinfer.dataset.verify import verify

    assert verify(str(tmp_path / "out")).problems == ()
