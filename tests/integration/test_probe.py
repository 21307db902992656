"""``estimate --probe``: a few rows are run first, and what they show is what the estimate rests on."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.program import batchinfer
from tests.small_model import gguf_path

ROWS, PROBED, TOKENS = 40, 6, 5


@pytest.fixture
def spec(tmp_path, monkeypatch):
    """A file and options whose rows all answer with ``TOKENS`` tokens, on the fake engine; the tokenizer is real."""
    monkeypatch.setenv("BATCHINFER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BATCHINFER_ENGINE_FACTORY", "tests.fakes:create_engine")
    prompts = [" ".join(["word"] * TOKENS)] * ROWS
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "p.parquet")
    return (tmp_path / "p.parquet", "--model", gguf_path(), "--max-tokens", 100)


@pytest.mark.real_model
def test_a_probe_is_a_small_job_that_the_estimate_learns_from(spec, tmp_path):
    blind = batchinfer("estimate", *spec, "--json").json
    assert (blind["device_seconds"], blind["cost_usd"]) == (None, None)

    probed = batchinfer("estimate", *spec, "--probe", PROBED, "--json")
    assert f"{PROBED} of {PROBED} rows succeeded" in probed.stderr
    view = probed.json
    assert view["num_rows"] == ROWS
    assert view["completion_tokens"]["low"] <= ROWS * TOKENS <= view["completion_tokens"]["high"]
    assert 0 < view["device_seconds"]["low"] <= view["device_seconds"]["high"]
    assert float(view["cost_usd"]["low"]) > 0

    jobs = batchinfer("ls", "--json").json["data"]
    assert [(job["name"], job["rows"]["total"], job["rows"]["succeeded"]) for job in jobs] == [
        ("probe", PROBED, PROBED)
    ]
    assert not list(tmp_path.glob("*.results"))
    again = batchinfer("estimate", *spec, "--json").json
    assert again["completion_tokens"] == view["completion_tokens"]


@pytest.mark.real_model
def test_jsonl_is_not_probed(spec, tmp_path):
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "word"}}
    (tmp_path / "p.jsonl").write_text(json.dumps(line) + "\n")
    refused = batchinfer("estimate", tmp_path / "p.jsonl", *spec[1:], "--probe", 2, exit_code=2)
    assert "--limit" in refused.stderr
