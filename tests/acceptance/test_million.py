"""A million rows, end to end, in a process whose memory is watched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS = 1_000_000
ALLOWED_BYTES = 200 * 2**20

PROGRAM = """
import json, sys
from batchinfer.jobs.service import JobService
from batchinfer.jobs.spec import JobSpec
from batchinfer.settings import Settings
from batchinfer_workers.embedded import run_embedded

def memory(name):
    # not getrusage: its peak is inherited from the process that started this one
    lines = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Vm"))
    return int(lines[name].split()[0]) * 1024

def run(inputs, output, limit=None):
    settings = Settings.load(engine_factory="tests.fakes:create_engine", max_num_seqs=256, log_level="warning")
    service = JobService.connect(settings.sqlalchemy_url, settings.broker_url)
    spec = JobSpec(inputs=inputs, model="fake", output=output, max_tokens=64, limit=limit)
    job, _ = service.ledger.submit(spec)
    return run_embedded(settings, job.id)

inputs, output = sys.argv[1:]
run(inputs, output + "-warm", limit=100)
base = memory("VmRSS")
job = run(inputs, output)
print(json.dumps({
    "state": job.state, "counts": job.counts.as_dict(), "base": base, "peak": memory("VmHWM"),
    "seconds": (job.finished_at - job.created_at).total_seconds(), "shards": job.num_shards,
}))
"""


def write_input(path: Path, row_group_size: int) -> None:
    prompts = (f"row {row} of a file with a million prompts in it" for row in range(NUM_ROWS))
    table = pa.table({"prompt": pa.array(prompts, pa.string()), "number": pa.array(range(NUM_ROWS), pa.int32())})
    pq.write_table(table, path, row_group_size=row_group_size)


@pytest.mark.parametrize("row_group_size", [10_000, NUM_ROWS], ids=["many row groups", "one row group"])
def test_a_million_rows_run_in_bounded_memory(tmp_path, row_group_size):
    """The worker's peak stays within 200 MiB of what a small job needs, however the file is cut."""
    write_input(tmp_path / "input.parquet", row_group_size)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BATCHINFER_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "input.parquet"), str(tmp_path / "out")],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    print(report)
    assert report["state"] == "completed"
    assert report["counts"]["succeeded"] == NUM_ROWS
    assert report["peak"] - report["base"] < ALLOWED_BYTES, report
    rows = pq.read_table(tmp_path / "out", columns=["row_index", "number"])
    expected = pa.chunked_array([pa.array(range(NUM_ROWS), pa.int64())])
    assert rows["row_index"].cast(pa.int64()).equals(expected)
    assert rows["number"].cast(pa.int64()).equals(expected)
