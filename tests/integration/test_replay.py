"""``batchinfer replay``: equal where nothing changed, the first difference where something did, refused otherwise."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.program import batchinfer

ROOT = Path(__file__).resolve().parents[2]
FAKE = "tests.fakes:create_engine"


@pytest.fixture
def model(tmp_path):
    """What the fake engine runs on: any file."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def job(tmp_path, model, monkeypatch):
    """A finished job of the fake engine, with rows of every kind."""
    monkeypatch.setenv("BATCHINFER_ENGINE_FACTORY", FAKE)
    prompts = ["one two", "SEED three", "", "ERROR here", None, "six"]
    pq.write_table(pa.table({"text": prompts, "max_tokens": [5, 5, 5, 5, 5, 1]}), tmp_path / "in.parquet")
    run = batchinfer(
        "run", tmp_path / "in.parquet", "--model", model, "--output", tmp_path / "out", "--template", "{{ text }} said",
        "--on-null", "skip", "--temperature", 1, "--seed", 7, "--token-ids", "--shard-rows", 4, "--json", exit_code=3,
    )  # fmt: skip
    return run.json["job"]["id"]


@pytest.mark.parametrize("options", [(), ("--embedding-lists",)])
def test_vectors_are_compared(tmp_path, model, monkeypatch, options):
    """To the bit: the smallest change of one number of a vector is found."""
    monkeypatch.setenv("BATCHINFER_ENGINE_FACTORY", FAKE)
    texts = ["one two", "three"]
    pq.write_table(pa.table({"prompt": [[text, "x"] for text in texts] if options else texts}), tmp_path / "in.parquet")
    run = batchinfer(
        "run", tmp_path / "in.parquet", "--model", model, "--output", tmp_path / "out", "--task", "embed", *options,
        "--json",
    )  # fmt: skip
    job = run.json["job"]["id"]
    column = "embeddings" if options else "embedding"
    report = replay(job, 1)
    assert report["equal"] and report["compared"][-1] == column
    path = tmp_path / "out" / "shard-00000.parquet"
    table = pq.read_table(path)
    values = table[column].to_pylist()
    assert values[1] == ([[1.0, np.float32(5 / 3)], [1.0, np.float32(1 / 3)]] if options else [1.0, np.float32(5 / 3)])
    (values[1][0] if options else values[1])[1] = np.nextafter(np.float32(5 / 3), np.float32(2))
    at = table.schema.get_field_index(column)
    pq.write_table(table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type)), path)
    (difference,) = replay(job, 1, exit_code=1)["differences"]
    assert (difference["column"], difference["position"]) == (column, 0 if options else 1)


def replay(job, row, exit_code=0):
    return batchinfer("replay", job, "--row", row, "--json", exit_code=exit_code).json


@pytest.mark.parametrize(
    ("row", "status"), [(0, "succeeded"), (1, "succeeded"), (3, "errored"), (4, "skipped"), (5, "succeeded")]
)
def test_an_unchanged_row_is_equal(job, row, status):
    """Also a row drawn with the seed derived for it, one with its own max_tokens, one that failed, one left out."""
    report = replay(job, row)
    assert (report["equal"], report["status"], report["notes"]) == (True, status, [])
    if status == "succeeded":
        assert report["compared"] == ["status", "output", "finish_reason", "usage", "token_ids"]
    text = batchinfer("replay", job, "--row", row).stdout
    assert text.startswith(f"equal: row {row} of {job}")


def test_the_first_difference_is_shown(job, tmp_path):
    """A result file in which somebody changed a word and a token."""
    path = tmp_path / "out" / "shard-00000.parquet"
    table = pq.read_table(path)
    output = table.column("output")
    changed = pc.replace_substring(output, "two one", "two two one")
    tokens = pa.array([[0, 9, 2] if row == 0 else ids.as_py() for row, ids in enumerate(table["token_ids"])])
    table = table.set_column(table.schema.get_field_index("output"), "output", changed)
    at = table.schema.get_field_index("token_ids")
    table = table.set_column(at, table.schema.field(at), tokens.cast(table.schema.field(at).type))
    pq.write_table(table, path)
    report = replay(job, 0, exit_code=1)
    found = {difference["column"]: difference for difference in report["differences"]}
    assert list(found) == ["output", "token_ids"]
    assert found["output"] == {
        "column": "output", "position": 9, "stored": "said two two one", "replayed": "said two one",
    }  # fmt: skip
    assert (found["token_ids"]["position"], found["token_ids"]["stored"], found["token_ids"]["replayed"]) == (1, 9, 1)
    text = batchinfer("replay", job, "--row", 0, exit_code=1).stdout
    assert text.startswith("NOT equal") and "output at 9" in text


def test_another_model_is_refused(job, model):
    model.write_bytes(b"other weights")
    run = batchinfer("replay", job, "--row", 0, exit_code=5)
    assert "not those that job" in run.stderr


def test_a_changed_input_is_refused(job, tmp_path):
    pq.write_table(pa.table({"text": ["another"] * 6, "max_tokens": [5] * 6}), tmp_path / "in.parquet")
    run = batchinfer("replay", job, "--row", 0, exit_code=2)
    assert "in.parquet" in run.stderr


def test_a_row_that_is_not_there_is_refused(job):
    assert "rows 0 to 5" in batchinfer("replay", job, "--row", 6, exit_code=4).stderr


@pytest.mark.real_model
def test_a_real_row_with_samples_and_logprobs_is_equal_to_the_bit(tmp_path):
    """Rows that ran in one batch, drawn, as chats, with log-probabilities: each alone gives the same bytes."""
    model = min((ROOT / ".models").glob("*.gguf"))
    texts = ["Name a colour.", "Count to three.", "What is the capital of France?"]
    table = pa.table({"prompt": texts, "repetition_penalty": [1.0, 1.3, 1.0], "stop": [None, "three", None]})
    pq.write_table(table, tmp_path / "in.parquet")
    run = batchinfer(
        "run", tmp_path / "in.parquet", "--model", model, "--output", tmp_path / "out", "--system", "Be brief.",
        "--temperature", 0.8, "--n", 2, "--logprobs", 2, "--max-tokens", 6, "--token-ids",
        "--json", exit_code=0,
    )  # fmt: skip
    job = run.json["job"]["id"]
    stored = pq.read_table(tmp_path / "out").to_pylist()
    assert all(len(row["samples"]) == 2 and row["logprobs"] for row in stored)
    report = replay(job, 1)
    assert report["equal"], json.dumps(report["differences"])
    assert {"token_ids", "logprobs", "samples"} <= set(report["compared"])


def test_a_row_of_several_stages_is_run_through_all_of_them(tmp_path, model, monkeypatch):
    """Succeeded, filtered, failed in the second stage; a changed word in a stage's answer is found."""
    monkeypatch.setenv("BATCHINFER_ENGINE_FACTORY", FAKE)
    stages = [
        {"name": "draft", "prompt": "say {{ text }} SEED", "sampling": {"temperature": 1}},
        {"name": "keep", "filter": "text != 'dull'"},
        {"name": "judge", "prompt": "judge {{ draft.output }} SEED", "sampling": {"temperature": 1}},
    ]
    (tmp_path / "stages.json").write_text(json.dumps(stages))
    pq.write_table(pa.table({"text": ["one", "dull", "ERROR"]}), tmp_path / "in.parquet")
    run = batchinfer(
        "run", tmp_path / "in.parquet", "--model", model, "--output", tmp_path / "out", "--stages",
        tmp_path / "stages.json", "--seed", 7, "--json", exit_code=3,
    )  # fmt: skip
    job = run.json["job"]["id"]
    assert {name: count for name, count in run.json["job"]["rows"].items() if count} == {
        "total": 3, "succeeded": 1, "errored": 1, "filtered": 1,
    }  # fmt: skip
    for row, status in enumerate(("succeeded", "filtered", "errored")):
        report = replay(job, row)
        assert (report["equal"], report["status"], report["notes"]) == (True, status, [])
        assert report["compared"][-4:] == ["stopped_at", "draft", "keep", "judge"]
    path = tmp_path / "out" / "shard-00000.parquet"
    table = pq.read_table(path)
    values = table["draft"].to_pylist()
    seeds = {word for word in f"{values[0]['output']} {table['output'][0]}".split() if word.startswith("seed=")}
    assert len(seeds) == 2, "each stage draws with a seed of its own"
    values[0]["output"] += "!"
    at = table.schema.get_field_index("draft")
    pq.write_table(table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type)), path)
    (difference,) = replay(job, 0, exit_code=1)["differences"]
    assert difference["column"] == "draft"
    assert difference["stored"]["output"] == difference["replayed"]["output"] + "!"
