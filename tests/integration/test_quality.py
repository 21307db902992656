"""``batchinfer quality``: a job's answers and a file's texts against the reference."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer_workers.quality import sample_of
from tests.program import batchinfer

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("num_rows", "count", "rows"), [(10, 5, [0, 2, 4, 6, 8]), (3, 9, [0, 1, 2]), (0, 4, [])])
def test_the_sample_lies_at_equal_distances(num_rows, count, rows):
    assert sample_of(num_rows, count) == rows


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setenv("BATCHINFER_ENGINE_FACTORY", "tests.fakes:create_engine")
    monkeypatch.setenv("BATCHINFER_REFERENCE_FACTORY", "tests.fakes:create_reference")


def test_a_jobs_answers_are_compared(fake, tmp_path):
    pq.write_table(pa.table({"prompt": ["one two", "three DRIFT", "", "four"]}), tmp_path / "in.parquet")
    run = batchinfer("run", tmp_path / "in.parquet", "--model", "org/fake", "--json", exit_code=3)
    job = run.json["job"]["id"]
    found = batchinfer("quality", job, "--json").json
    assert (found["rows_compared"], found["tokens_compared"], found["kl_max"]) == (3, 5, 1.0)
    assert found["kl_mean"] == pytest.approx((4 * 0.01 + 1) / 5)
    assert found["differences"][0]["row_index"] == 1
    text = batchinfer("quality", job, "--rows", 2).stdout
    assert "2 tokens of 1 rows" in text, "rows 0 and 2, of which one has no answer"
    assert "prompt_column" in batchinfer("quality", job, "--prompt-column", "x", exit_code=2).stderr


def test_a_file_needs_a_model(fake, tmp_path):
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "in.parquet")
    assert "--model" in batchinfer("quality", tmp_path / "in.parquet", exit_code=2).stderr


@pytest.mark.real_model
def test_a_files_texts_in_weight_only_int8(tmp_path):
    """A precision that is known to drift a little: not nothing, and not much."""
    model = min((ROOT / ".models").glob("*.gguf"))
    text = (ROOT / "LICENSE").read_text()[:1200]
    table = pa.table({"prompt": ["Recite the licence."], "output": [text]})
    pq.write_table(table, tmp_path / "in.parquet")
    found = batchinfer(
        "quality", tmp_path / "in.parquet", "--model", model, "--quantization", "int8-weight-only",
        "--max-model-len", 512, "--json",
    ).json  # fmt: skip
    assert found["tokens_compared"] > 200
    assert 0.0001 < found["kl_mean"] < 0.05
    assert 0.9 < found["agreement"] <= 1
    assert found["perplexity"] == pytest.approx(found["reference_perplexity"], rel=0.1)
