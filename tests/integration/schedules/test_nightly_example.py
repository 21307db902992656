"""examples/nightly.py as a newcomer runs it: one command, two nights."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[3]


def test_tonight_is_computed_and_tomorrow_reuses_it(tmp_path):
    """Counted by the calls that the engine gets: twelve tonight, three tomorrow."""
    model, calls = tmp_path / "model.gguf", tmp_path / "calls"
    model.write_bytes(b"weights")
    environment = os.environ | {
        "BATCHINFER_ENGINE_FACTORY": "tests.fakes:create_engine",
        "CALLS_FILE": str(calls),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "examples/nightly.py", "--model", str(model), "--folder", str(tmp_path / "work")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    asked = [line.rpartition("word. ")[2] for line in calls.read_text().splitlines()]
    assert len(asked) == 15
    assert sorted(asked[12:]) == [
        "The new shelf is crooked.", "The new sofa is soft.", "The pen broke on the second day.",
    ]  # fmt: skip
    assert "10 rows (76.9% of the answers)" in done.stdout
    tomorrow = pq.read_table(tmp_path / "work" / "out" / "date=2026-03-29").to_pylist()
    assert [row["status"] for row in tomorrow] == ["deduplicated"] * 10 + ["succeeded"] * 3
