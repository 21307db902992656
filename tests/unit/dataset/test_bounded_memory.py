from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NUM_ROWS = 1_000_000
LIMIT_MB = 200

PROGRAM = textwrap.dedent(
    """
    import json, sys
    from tests.dataset_job import DatasetJob
    from batchinfer.dataset.verify import verify

    def peak_mb():
        # Not getrusage: its ru_maxrss begins with that of the process that started this one.
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024

    base = peak_mb()
    job = DatasetJob([sys.argv[1]], sys.argv[2], shard_rows=100_000, part_rows=8192)
    counts = job.run().counts
    job.source.check_ids("id")
    grown = peak_mb() - base
    report = verify(sys.argv[2])
    print(json.dumps({
        "grown_mb": grown, "verify_mb": peak_mb() - base, "counts": counts, "problems": report.problems,
        "warnings": job.source.warnings,
    }))
    """
)


def write_input(path, rows_per_group):
    schema = pa.schema([("id", pa.int64()), ("prompt", pa.string()), ("weight", pa.float64())])
    random = np.random.default_rng(0)
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, NUM_ROWS, rows_per_group):
            ids = np.arange(start, start + rows_per_group)
            prompts = [
                f"What is {i} plus {i * 7919 % 10007}? Answer with the number and nothing else." for i in ids.tolist()
            ]
            columns = {"id": ids, "prompt": prompts, "weight": random.random(rows_per_group)}
            writer.write_table(pa.table(columns, schema=schema), row_group_size=rows_per_group)


def test_a_million_rows_stream_through_in_bounded_memory_with_many_row_groups_and_with_one(tmp_path):
    """Source, prompts, parts, merge, single file, ids, all under base + 200 MB; so is verify.

    Two child processes, side by side, each measured by the kernel's high-water mark.
    """
    children = {}
    for name, rows_per_group in (("many", 5_000), ("one", NUM_ROWS)):
        write_input(tmp_path / f"{name}.parquet", rows_per_group)
        output = str(tmp_path / ("results.parquet" if name == "many" else "results"))
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / f"{name}.parquet"), output]
        children[name] = subprocess.Popen(command, stdout=subprocess.PIPE)
    found = {name: json.loads(child.communicate()[0]) for name, child in children.items()}
    for name, result in found.items():
        assert result["counts"]["succeeded"] == NUM_ROWS, name
        assert result["problems"] == [], name
        assert result["grown_mb"] < LIMIT_MB, found
        assert result["verify_mb"] < LIMIT_MB, found
    assert found["many"]["warnings"] == []


WIDE_PROGRAM = textwrap.dedent(
    """
    import json, sys
    from batchinfer.dataset.layout import OutputLayout
    from batchinfer.dataset.merge import merge_shard
    from batchinfer.dataset.schema import ResultRow, ResultSchema
    from batchinfer.dataset.sink import PartWriter
    from batchinfer.dataset.source import InputSource
    from batchinfer.types import RowStatus

    def peak_mb():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024

    base = peak_mb()
    source = InputSource.open([sys.argv[1]])
    schema, layout = ResultSchema(source.schema), OutputLayout(sys.argv[2], "job_1")
    rows = [ResultRow(i, RowStatus.SUCCEEDED, "m", 1) for i in range(source.num_rows)]
    part = PartWriter(layout, schema, 0, 1).write(rows)
    merged = merge_shard(source, schema, 0, source.num_rows, [part.path], layout.merged_path(0, 1))
    print(json.dumps({"grown_mb": peak_mb() - base, "path": merged.path}))
    """
)


def test_more_than_two_gigabytes_in_one_string_column_pass_through_in_bounded_memory(tmp_path):
    """Offsets of int32 end at 2 GiB, and so must no buffer of ours. One long context is repeated in each row."""
    num_rows, text = 2200, "0123456789abcdef" * (1 << 16)  # 1 MiB
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(num_rows, np.int32)), pa.array([text]))
    schema = pa.schema([("n", pa.int64()), ("context", pa.string())])
    with pq.ParquetWriter(tmp_path / "in.parquet", schema) as writer:
        for start in range(0, num_rows, 100):
            part = {"n": range(start, start + 100), "context": column.slice(start, 100).dictionary_decode()}
            writer.write_table(pa.table(part, schema=schema))
    command = [sys.executable, "-c", WIDE_PROGRAM, str(tmp_path / "in.parquet"), str(tmp_path / "out")]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert found["grown_mb"] < LIMIT_MB
    merged = pq.ParquetFile(found["path"])
    assert merged.schema_arrow.field("context").type == pa.large_string()
    num_bytes = 0
    for batch in merged.iter_batches(batch_size=16, columns=["context"]):
        assert set(batch.column(0).to_pylist()) == {text}
        num_bytes += batch.num_rows * len(text)
    assert num_bytes > 2**31
