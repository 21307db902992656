"""The ceilings of this machine: measured once, kept by processor and threads, mended when the file is not theirs."""

import json

import pytest
import torch

from batchinfer.engine import ceilings
from batchinfer.engine.ceilings import Ceilings, machine_ceilings
from batchinfer.engine.model_shape import ModelShape
from batchinfer.engine.roofline import Precision, Workload, predict

FOUND = Ceilings(1e11, 2e11, 8e11, 2e10)


@pytest.fixture
def measured(monkeypatch):
    """Measuring is counted and costs nothing."""
    calls = []
    monkeypatch.setattr(ceilings, "measure", lambda seconds: calls.append(seconds) or FOUND)
    return calls


def test_measured_once_for_a_number_of_threads(measured, tmp_path, monkeypatch):
    assert machine_ceilings(tmp_path / "new") == machine_ceilings(tmp_path / "new") == FOUND
    assert len(measured) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    machine_ceilings(tmp_path / "new")
    assert len(measured) == 2
    kept = json.loads((tmp_path / "new" / "ceilings.json").read_text())
    assert sorted(value["int8"] for value in kept.values()) == [8e11, 8e11]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["ceilings.json"]


@pytest.mark.parametrize("text", ["{", "[]", "null"])
def test_a_broken_file_is_written_anew(measured, tmp_path, text):
    (tmp_path / "ceilings.json").write_text(text)
    machine_ceilings(tmp_path)
    machine_ceilings(tmp_path)
    assert len(measured) == 1


def test_entries_of_another_version_are_replaced(measured, tmp_path):
    machine_ceilings(tmp_path)
    path = tmp_path / "ceilings.json"
    path.write_text(json.dumps({key: {"old": 1} for key in json.loads(path.read_text())}))
    assert machine_ceilings(tmp_path) == FOUND
    assert len(measured) == 2


def test_real_figures_are_a_device(monkeypatch):
    """Small sizes: what is asserted is units. A core of today reads 0.1 to 1,000 GB/s and multiplies 0.1 GFLOP/s to 1 PFLOP/s."""
    monkeypatch.setattr(ceilings, "SIZE", 64)
    monkeypatch.setattr(ceilings, "STREAMED", 1 << 16)
    found = ceilings.measure(0.0)
    assert 1e8 < found.bandwidth < 1e13
    assert all(1e7 < value < 1e15 for value in (found.fp32, found.bf16, found.int8))
    device = FOUND.as_device()
    assert "threads" in device.source
    shape = ModelShape(2, 8, 2, 1, 4, 16, 32)
    assert predict(device, shape, Precision("int8", "int8"), Workload(2, 3, 3)).total.sequential > 0
