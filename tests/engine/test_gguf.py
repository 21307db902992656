"""GGUF files: read as the gguf package reads them, and turned back into the model they were written from."""

import random

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from batchinfer.errors import ModelError
from batchinfer.models.gguf import load_gguf_model
from batchinfer.models.gguf_file import GgufFile
from tests.gguf_writer import write_gguf
from tests.small_model import gguf_path

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
CPU = torch.device("cpu")


def tiny(model_type: str, seed=0, **fields):
    """A small model with random weights, norms and biases included."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**SIZES, **fields})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.5))
    return model


def load(path, dtype=torch.float32):
    return load_gguf_model(GgufFile(path), attn_implementation="eager", dtype=dtype, device=CPU)


def logits(model, length=40) -> torch.Tensor:
    ids = torch.arange(length)[None] * 7 % SIZES["vocab_size"]
    with torch.inference_mode():
        return model(ids).logits.float()


def assert_equal_models(path, model, tolerance=2e-5) -> None:
    loaded = load(path)
    difference = (logits(loaded) - logits(model)).abs().max().item()
    assert difference < tolerance, difference
    assert not loaded.training


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tiny.gguf"


@pytest.fixture(scope="module")
def reader():
    """The real file as the gguf package reads it."""
    return gguf.GGUFReader(gguf_path())


def test_the_real_file_reads_as_the_gguf_package_reads_it(reader):
    """Every metadata value and every tensor's name, shape, type and place, against the package's own reader."""
    ours = GgufFile(gguf_path())
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == expected
    assert [
        (entry.name, list(reversed(entry.shape)), entry.kind, entry.offset, entry.num_bytes)
        for entry in ours.tensors.values()
    ] == [(t.name, t.shape.tolist(), t.tensor_type, t.data_offset, t.n_bytes) for t in reader.tensors]


def test_the_real_weights_are_those_of_transformers_own_loader(reader):
    """To the bit: transformers' name table and its undoing of llama.cpp's reordering, on the package's numbers."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, get_gguf_hf_weights_map

    model = load(gguf_path())
    processor = TENSOR_PROCESSORS["llama"]({"num_attention_heads": 9, "num_key_value_heads": 3})
    names = get_gguf_hf_weights_map(model, processor)
    state = model.state_dict()
    seen = set()
    for tensor in reader.tensors:
        expected = processor.process(gguf.dequantize(tensor.data, tensor.tensor_type), tensor.name).weights
        seen.add(names[tensor.name])
        assert np.array_equal(state[names[tensor.name]].numpy(), expected), tensor.name
    assert set(state) - seen == {"lm_head.weight"}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_real_model_gives_the_logits_of_a_plain_llama(reader):
    """Against a ``LlamaForCausalLM`` that a test builds by hand from the file."""
    from tests.engine.reference import load_reference

    ids = torch.tensor([[1, 4093, 198, 504, 3575, 282, 4649, 314, 2, 0, 49151]])
    with torch.inference_mode():
        assert torch.equal(load(gguf_path())(ids).logits, load_reference(gguf_path())(ids).logits)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_llama_with_and_without_a_head_of_its_own(path, is_tied, kv_heads):
    """Rotated rows go back to their places for every ratio of query to KV heads; a missing head is the embedding."""
    model = tiny("llama", tie_word_embeddings=is_tied, num_key_value_heads=kv_heads)
    write_gguf(path, model, "llama", extra={"rope.freq_base": 20_000.0, "rope.dimension_count": 16})
    assert load(path).config.tie_word_embeddings is is_tied
    model.config.rope_parameters["rope_theta"] = 20_000.0
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    assert_equal_models(path, model)


def test_llama_with_biases(path):
    model = tiny("llama", attention_bias=True)
    drop = [name for name in model.state_dict() if name.endswith("o_proj.bias")]
    with torch.no_grad():
        for name in drop:
            model.get_parameter(name).zero_()
    write_gguf(path, model, "llama")
    assert_equal_models(path, model)


def test_llama_3_frequency_factors(path):
    """A file has a tensor of factors where config.json has four numbers; factor 4, not the usual 8."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = tiny("llama", rope_parameters=rope)
    plain = 10_000.0 ** -(torch.arange(0, 16, 2) / 16)
    factors = plain / model.model.rotary_emb.inv_freq
    assert factors.max() > 3.9, "some frequencies are really slowed down"
    write_gguf(path, model, "llama", tensors={"rope_freqs.weight": factors})
    assert_equal_models(path, model)


@pytest.mark.parametrize(
    ("rope", "keys"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
            },
        ),
    ],
    ids=["linear", "yarn"],
)
def test_scaled_rotations(path, rope, keys):
    model = tiny("qwen2", rope_parameters={**rope, "rope_theta": 10_000.0})
    write_gguf(path, model, "qwen2", extra=keys)
    assert (logits(model) - logits(tiny("qwen2"))).abs().max() > 0.01, "the scaling shows"
    assert_equal_models(path, model)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_qwen(path, architecture, is_tied):
    """Qwen2 has biases on q, k and v; Qwen3 has norms on q and k, and a head size of its own."""
    head_dim = 16 if architecture == "qwen2" else 24
    model = tiny(architecture, tie_word_embeddings=is_tied, head_dim=head_dim)
    write_gguf(path, model, architecture, extra={"attention.key_length": head_dim})
    assert_equal_models(path, model)


def test_gemma_2(path):
    """Norms stored with 1 added, both softcaps, a window on every other layer that is shorter than the text."""
    model = tiny(
        "gemma2", head_dim=24, query_pre_attn_scalar=24, sliding_window=8, attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    )  # fmt: skip
    extra = {
        "attention.key_length": 24,
        "attention.sliding_window": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    }
    write_gguf(path, model, "gemma2", extra=extra)
    assert_equal_models(path, model)


def test_gemma_3(path):
    """Two rotations: local layers keep theirs, global ones take the file's base; the sixth layer is global."""
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    model = tiny(
        "gemma3_text",
        num_hidden_layers=7,
        head_dim=24,
        query_pre_attn_scalar=24,
        sliding_window=8,
        rope_parameters=rope,
    )
    extra = {
        "attention.key_length": 24,
        "attention.sliding_window": 8,
        "rope.freq_base": 500_000.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }
    write_gguf(path, model, "gemma3", extra=extra)
    assert load(path).config.layer_types.count("full_attention") == 1
    assert_equal_models(path, model)


@pytest.mark.parametrize("rotated", [16, 12])
def test_phi_3(path, rotated):
    """Query, key and value in one tensor, gate and up in one; part of each head may stay unrotated (Phi-4-mini)."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": rotated / 16}
    model = tiny("phi3", sliding_window=12, rope_parameters=rope, pad_token_id=None)
    extra = {"rope.dimension_count": rotated, "attention.sliding_window": 12}
    write_gguf(path, model, "phi3", extra=extra)
    assert_equal_models(path, model)


def test_phi_3_with_long_rope(path):
    """Within the first training length the short factors hold."""
    short, long = torch.linspace(1, 2, 8).tolist(), torch.linspace(2, 20, 8).tolist()
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 1.0,
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": 64,
    }
    model = tiny("phi3", rope_parameters=rope, pad_token_id=None, original_max_position_embeddings=64)
    scaling = (1 + np.log(256 / 64) / np.log(64)) ** 0.5  # the LongRoPE paper's attention factor
    extra = {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": float(scaling)}
    tensors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    write_gguf(path, model, "phi3", extra=extra, tensors=tensors)
    assert_equal_models(path, model)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16", "BF16"])
def test_quantised_weights_are_those_of_the_gguf_package(path, kind):
    """A quantised file gives the model whose matrices went through the package's own quantise and dequantise."""
    model = tiny("qwen2")
    quantized = gguf.GGMLQuantizationType[kind]
    write_gguf(path, model, "qwen2", quantize=quantized)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                blocks = gguf.quantize(parameter.numpy(), quantized)
                parameter.copy_(torch.from_numpy(gguf.dequantize(blocks, quantized).astype(np.float32)))
    assert_equal_models(path, model)


def test_weights_come_in_the_dtype_asked_for(path):
    model = tiny("llama")
    write_gguf(path, model, "llama")
    loaded = load(path, torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded.model.norm.weight, model.model.norm.weight.bfloat16())


def test_an_unknown_architecture_is_refused_with_those_that_are_known(path):
    write_gguf(path, tiny("llama"), "mamba")
    with pytest.raises(ModelError, match=r"'mamba' are not supported, only gemma2, .*llama.*safetensors"):
        load(path)


def test_a_missing_tensor_is_named(path):
    write_gguf(path, tiny("llama"), "llama", drop=["model.layers.1.mlp.up_proj.weight"])
    with pytest.raises(ModelError, match=r"lacks 1 tensors, such as blk\.1\.ffn_up\.weight"):
        load(path)


def test_a_tensor_of_another_shape_is_an_error(path):
    write_gguf(path, tiny("llama"), "llama", extra={"attention.key_length": 32})
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04 a zip file", b"GGUF\x01\0\0\0" + bytes(16)])
def test_other_files_are_no_gguf(path, content):
    path.write_bytes(content)
    with pytest.raises(ModelError, match="is not a GGUF file"):
        GgufFile(path)


@pytest.fixture
def content(path):
    """A small file's bytes and the length of its head."""
    write_gguf(path, tiny("llama", num_hidden_layers=1), "llama")
    return path.read_bytes(), min(entry.offset for entry in GgufFile(path).tensors.values())


def test_a_file_cut_short_is_a_model_error(path, content):
    whole, head = content
    for end in [*random.Random(2).sample(range(head), 100), head, head + 1000, len(whole) - 40]:
        path.write_bytes(whole[:end])
        with pytest.raises(ModelError):
            GgufFile(path)


def test_a_damaged_head_is_a_model_error_or_harmless(path, content):
    """Whichever bytes of the head are wrong: an error in words, or a model; never another exception, never for ever."""
    whole, head = content
    chance = random.Random(3)
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(head)] = chance.choice([0, 1, 9, 127, 255])
        path.write_bytes(damaged)
        try:
            load(path)
        except ModelError as error:
            assert len(str(error)) < 1000
