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
    """CASES 21, issue 2 section 3: source, prompts, parts, merge, single file, ids, all under base + 200 MB; so is verify.

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
