"""Fused decoder layers on the Triton kernels, under the interpreter: transformers' logits, and the CPU's INT8 ones."""

import copy

import pytest
import torch

from batchinfer.engine import quantization
from batchinfer.engine.forward_pass import FusedPass
from batchinfer.engine.triton_attention import TritonAttention
from batchinfer.models.lora_store import LoraStore
from tests.engine import small_decoder
from tests.engine.adapters import save_adapter
from tests.engine.small_decoder import logits_of, make_forward, small_model
from tests.triton import interpreter

F32, BF16 = torch.float32, torch.bfloat16
SIZES = {"num_hidden_layers": 2}
STEPS = ((13, 4), (9, 3), (1, 1))
"""Fewer than on a CPU: chunks of both, a chunk on a context, decode tokens."""
FAMILIES = {
    "llama": {"attention_bias": True},
    "smollm3": {"no_rope_layers": [1, 0]},
    "phi3": {"partial_rotary_factor": 0.5, "head_dim": 32},
    "olmo2": {},
    "gemma2": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "mlp_only_layers": []},
}


def truth(model, tokens):
    """transformers' own logits of a whole sequence, in float32."""
    model = copy.deepcopy(model).float()
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


@pytest.fixture(autouse=True)
def short_calibration(monkeypatch):
    """The interpreter takes minutes for the whole text; both backends calibrate on the same."""
    monkeypatch.setattr(quantization, "TEXTS", [text[:40] for text in quantization.TEXTS[:2]])
    monkeypatch.setattr(quantization, "MIN_TOKENS", 1)


def on_triton(model, dtype, monkeypatch, **options):
    """The pass that an engine chooses beside Triton's attention."""

    def choose(shapes, num_blocks, block_size, dtype, device, **_):
        return TritonAttention(shapes, num_blocks, block_size, dtype, device, split=64)

    with monkeypatch.context() as patch:
        patch.setattr(small_decoder, "choose_attention", choose)
        return make_forward(copy.deepcopy(model), dtype, **options)


def largest_error(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_gives_transformers_logits(family, monkeypatch):
    """What differs in shape between families: biases, norms, rotary parts, windows, caps, scales, experts."""
    model = small_model(family, **SIZES, **FAMILIES[family])
    forward, attention = on_triton(model, F32, monkeypatch)
    assert isinstance(forward, FusedPass)
    found, sequences = logits_of(forward, attention, steps=STEPS)
    for logits, tokens in zip(found, sequences, strict=True):
        assert largest_error(logits, truth(model, tokens)) < 3e-4
    assert forward.profile() == {}


@pytest.mark.parametrize(("family", "scheme"), [
    ("llama", "int8"), ("qwen3_moe", "int8"), ("qwen3_moe", "int8-weight-only"),
])  # fmt: skip
def test_int8_layers_are_the_cpus(family, scheme, monkeypatch):
    """The same recipe, calibrated on the kernels: as near to the float model as the CPU's, and near the CPU's."""
    sizes = {**FAMILIES[family], "num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 256}
    if family == "qwen3_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2}
    model = small_model(family, **sizes)
    ours, attention = on_triton(model, F32, monkeypatch, quantization=scheme)
    theirs, their_attention = make_forward(copy.deepcopy(model), F32, quantization=scheme)
    assert ours.recipe == theirs.recipe
    found, sequences = logits_of(ours, attention, steps=STEPS)
    expected, _ = logits_of(theirs, their_attention, steps=STEPS)
    for logits, reference, tokens in zip(found, expected, sequences, strict=True):
        exact = truth(model, tokens)
        variance = exact.var()
        assert (logits - reference).square().mean() < 0.002 * variance
        assert (logits - exact).square().mean() < 2 * (reference - exact).square().mean() + 1e-4 * variance


@pytest.mark.parametrize("scheme", ["none", "int8"])
def test_two_adapters_in_a_batch_are_pefts_merged_models(scheme, monkeypatch, tmp_path):
    """Each sequence its own, of ranks that are no multiples of 16; INT8 stays as near as it is without any."""
    model = small_model("llama", num_hidden_layers=1, attention_bias=True)
    merged = [save_adapter(model, tmp_path / name, rank=rank, alpha=8) for name, rank in (("a", 8), ("b", 20))]
    forward, attention = on_triton(model, F32, monkeypatch, quantization=scheme)
    store = LoraStore(forward.adapters, 1 << 30)
    files = [store.open(str(tmp_path / name)) for name in ("a", "b")]
    make = store.groups

    def reached(rows):
        groups = make(rows)
        interpreter.reach(*(x.weight for g in groups for d in g.deltas.values() for x in (d.down, d.up)))
        return groups

    monkeypatch.setattr(store, "groups", reached)
    found, sequences = logits_of(forward, attention, store, files, steps=STEPS)
    for logits, truth_of, tokens in zip(found, merged, sequences, strict=True):
        expected = truth(truth_of, tokens)
        if scheme == "none":
            assert largest_error(logits, expected) < 3e-4
        else:
            without = (truth(model, tokens) - expected).square().mean()
            assert (logits - expected).square().mean() < without / 4


def test_bfloat16_is_near_and_quantised_weights_are_shared_with_the_cpu(monkeypatch, tmp_path):
    """A CPU's file of quantised weights is read, and not made again."""
    model = small_model("llama", **SIZES)
    make_forward(copy.deepcopy(model), BF16, quantization="int8", cache_dir=tmp_path)
    (file,) = (tmp_path / "quantized").iterdir()
    before = file.stat().st_mtime_ns
    forward, attention = on_triton(model, BF16, monkeypatch, quantization="int8", cache_dir=tmp_path)
    assert file.stat().st_mtime_ns == before
    assert "gptq" in forward.recipe
    found, sequences = logits_of(forward, attention, steps=STEPS)
    exact = truth(model, sequences[0])
    assert (found[0] - exact).square().mean() < 0.01 * exact.var()
