"""``explain --device``: time and cost on GPUs that no job has run on, from data sheet, config and prices."""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from batchinfer.cli.device_speeds import RooflineSpeed, split_devices
from batchinfer.cli.main import cli
from batchinfer.engine.devices import DEVICES
from batchinfer.engine.model_shape import ModelShape
from batchinfer.engine.roofline import Precision, Workload, predict
from batchinfer.errors import InvalidSpecError, ModelError
from batchinfer.jobs.predict import Interval
from batchinfer.models.config_fields import config_fields
from tests.small_model import gguf_path

SMOLLM = ModelShape(30, 576, 9, 3, 64, 1536, 49152, is_tied=True, max_length=8192)


def speed(**changes):
    fields = {"target": DEVICES["h200"], "shape": SMOLLM, "precision": Precision(), "nanos_per_hour": None,
              "max_num_seqs": 256, "max_num_batched_tokens": 8192}  # fmt: skip
    return RooflineSpeed(**fields | changes)


def test_the_bound_over_the_share():
    """1,000 rows of 100 + 50 tokens, a third of each prompt shared: the bound of that workload, over 60 (40, 80) %."""
    found = speed().seconds(
        num_rows=1000, prompt_tokens=Interval(100_000, 100_000, 100_000), cached_share=0.3,
        completion_tokens=Interval(50_000, 50_000, 50_000),
    )  # fmt: skip
    work = Workload(1000, 100, 50, 30 * 1000 / 999, max_num_seqs=256)
    bound = predict(DEVICES["h200"], SMOLLM, Precision(), work).total.sequential
    assert (found.low, found.expected, found.high) == pytest.approx((bound / 0.8, bound / 0.6, bound / 0.4))


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_few_rows_and_prompts_that_are_all_cached(rows):
    tokens = Interval(10 * rows, 10 * rows, 10 * rows)
    found = speed().seconds(num_rows=rows, prompt_tokens=tokens, cached_share=1.0, completion_tokens=tokens)
    assert (found.expected > 0) == (rows > 0)


def test_a_model_that_does_not_fit_is_refused_before_the_input_is_read():
    huge = ModelShape(126, 16384, 128, 8, 128, 53248, 128256)
    with pytest.raises(InvalidSpecError, match="h200x2"):
        speed(shape=huge).check()


def test_devices_of_the_table_and_one_of_the_workers():
    assert split_devices(["h200", "cpu", "H200"]) == ("cpu", [DEVICES["h200"]])
    assert split_devices([]) == (None, [])
    with pytest.raises(InvalidSpecError, match=r"'cpu' and 'k80' are not in the table"):
        split_devices(["cpu", "k80"])


def test_a_folder_s_config_is_enough(tmp_path):
    """No weights, no tokenizer, no torch: in a process of its own, which ends by naming what it imported."""
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "num_attention_heads": 4}))
    code = (
        "import sys; from batchinfer.models.config_fields import config_fields; import batchinfer.cli.device_speeds; "
        f"print(config_fields({str(tmp_path)!r})['hidden_size'], 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["64", "False", "False"]


@pytest.mark.parametrize("text", ["[]", "{", None])
def test_a_config_that_cannot_be_read_is_a_sentence(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json .*give the folder of a transformers model"):
        config_fields(str(tmp_path))


@pytest.mark.real_model
def test_a_gguf_file_s_sizes():
    assert ModelShape.from_config(config_fields(str(gguf_path()))) == SMOLLM


@pytest.mark.real_model
def test_explain_puts_devices_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHINFER_HOME", str(tmp_path / "home"))
    pq.write_table(pa.table({"prompt": [f"Say {i}" for i in range(40)]}), tmp_path / "p.parquet")

    def explain(*words):
        given = ["explain", str(tmp_path / "p.parquet"), "--model", str(gguf_path()), "--max-tokens", "8", *words]
        return CliRunner().invoke(cli, given, standalone_mode=False, catch_exceptions=False).stdout

    CliRunner().invoke(cli, ["price", "set-device", "h200", "--per-hour", "3.6"], standalone_mode=False)
    view = json.loads(explain("--device", "h200x2", "--device", "a100", "--json"))
    alone = {m["device"]: m for m in view["makespans"] if m["num_workers"] == 1}
    assert alone.keys() == {"h200x2", "a100"}
    assert all(m["basis"].startswith("roofline, not measured: 60%") for m in alone.values())
    # two GPUs at 3.60 an hour are two thousandths of a dollar a second; nobody said what an A100 costs
    assert float(alone["h200x2"]["cost_usd"]["expected"]) == pytest.approx(
        0.002 * alone["h200x2"]["seconds"]["expected"], abs=2e-6
    )
    assert alone["a100"]["cost_usd"] is None
    text = explain("--device", "a100", "--usd-per-hour", "1.2")
    assert "roofline, not measured" in text
    assert "unknown" not in text.split("time and cost")[-1]
