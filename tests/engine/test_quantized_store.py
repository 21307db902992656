"""Quantised weights on disk, calibration that cannot run, and weights that cannot be rounded."""

import copy

import pytest
import torch

from batchinfer.engine import quantization
from batchinfer.errors import ModelError
from batchinfer.models.fused.int8 import RECIPES
from tests.engine.small_decoder import logits_of, make_forward, small_model


class NoTokenizer:
    """One that fails, or says nothing."""

    def __init__(self, ids=None):
        self._ids = ids

    def encode(self, text):
        if self._ids is None:
            raise RuntimeError("no vocabulary")
        return self._ids


def quantised(tmp_path, model=None, **settings):
    return make_forward(
        model or small_model("mixtral"), torch.bfloat16, quantization="int8", cache_dir=tmp_path, **settings
    )


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(logits_of(*one)[0], logits_of(*other)[0], strict=True))


def test_the_second_load_reads_what_the_first_one_made(tmp_path, monkeypatch):
    first = quantised(tmp_path)
    (path,) = (tmp_path / "quantized").iterdir()
    assert path.name == "small-bfloat16-" + RECIPES["int8"] + "-1.safetensors"
    monkeypatch.setattr(quantization, "Calibration", None)
    model = small_model("mixtral")
    for name, parameter in model.named_parameters():
        if "_proj" in name or "lm_head" in name:
            torch.nn.init.constant_(parameter, float("nan"))
    second = quantised(tmp_path, model)
    assert same(first, second), "the model's own weights were not even looked at"
    assert first[0].recipe == second[0].recipe == RECIPES["int8"]


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "other"])
def test_a_damaged_file_is_made_again(tmp_path, damage):
    first = quantised(tmp_path)
    (path,) = (tmp_path / "quantized").iterdir()
    content = path.read_bytes()
    if damage == "other":  # whole, but of another model
        quantised(tmp_path, small_model("mixtral", hidden_size=32))
        assert path.read_bytes() != content
        assert same(first, quantised(tmp_path))
    else:
        path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "text": b"{ no tensors }"}[damage])
        assert same(first, quantised(tmp_path))
    assert path.stat().st_size == len(content)
    assert [file.name for file in path.parent.iterdir()] == [path.name], "no draft is left behind"


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert same(quantised(blocked), quantised(tmp_path))


def test_old_files_go(tmp_path, monkeypatch):
    monkeypatch.setattr("batchinfer.models.fused.store.MAX_FILES", 2)
    for name in "abc":
        (tmp_path / "quantized").mkdir(exist_ok=True)
        (tmp_path / "quantized" / f"{name}.safetensors").write_bytes(b"")
    quantised(tmp_path)
    assert len(list((tmp_path / "quantized").iterdir())) == 2


@pytest.mark.parametrize("tokenizer", [NoTokenizer(), NoTokenizer([]), NoTokenizer([5000] * 40)])
def test_without_text_the_model_is_quantised_by_its_weights_alone(tmp_path, caplog, tokenizer):
    """The recipe says so, a warning too, nothing is kept, and the result is near the model."""
    reference = small_model("llama")
    forward, attention = quantised(tmp_path, copy.deepcopy(reference), tokenizer=tokenizer)
    assert forward.recipe == "w8a8-hadamard512-data-free"
    assert "without calibration" in caplog.text
    assert not (tmp_path / "quantized").exists()
    for ours, sequence in zip(*logits_of(forward, attention), strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([sequence])).logits[0]
        assert ((ours - expected).square().mean().sqrt() / expected.std()).item() < 0.15


def test_a_text_that_overflows_the_model_spoils_no_weights(tmp_path):
    """An embedding of inf: the layers are quantised without data, and other rows get finite logits."""
    model = small_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[ord("T") % 96] = float("inf")
    forward, attention = quantised(tmp_path, model)
    assert forward.recipe.endswith("-partly-data-free")
    assert all(lines.isfinite().all() for lines in logits_of(forward, attention)[0])
    assert not (tmp_path / "quantized").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("quantize", ["int8", "int8-weight-only"])
def test_weights_that_are_no_numbers_are_refused_by_name(quantize, value):
    model = small_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = value
    with pytest.raises(ModelError, match=r"weights of layers\.1\.down hold inf or NaN.*quantization none") as caught:
        make_forward(model, torch.float32, quantization=quantize)
    assert caught.value.param == "quantization"


@pytest.mark.parametrize("quantize", ["int8", "int8-weight-only"])
def test_dead_rows_and_channels_stay_finite(quantize):
    """A whole projection of zeros, one dead output and one dead input."""
    model = small_model("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[1].mlp.down_proj.weight[7].zero_()
        model.model.layers[1].mlp.gate_proj.weight[:, 9].zero_()
        model.model.layers[2].input_layernorm.weight[4] = 0.0
    reference = copy.deepcopy(model)
    for ours, sequence in zip(*logits_of(*make_forward(model, torch.float32, quantization=quantize)), strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([sequence])).logits[0]
        assert ((ours - expected).square().mean().sqrt() / expected.std()).item() < 0.12
