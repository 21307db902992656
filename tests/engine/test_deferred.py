"""Models whose weights stay in their files until a layer is converted."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchinfer.engine.attention import ATTENTION_NAME, register_attention
from batchinfer.engine.config import EngineConfig
from batchinfer.models.deferred import read_all
from batchinfer.models.load import load_model
from batchinfer.models.skeleton import is_deferred
from tests.engine.small_decoder import logits_of, make_forward, small_model
from tests.engine.test_load import words_tokenizer
from tests.small_model import gguf_path

FAMILIES = [
    "llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "olmo2", "granite", "gemma", "gemma2", "gemma3_text",
    "mixtral", "qwen3_moe",
]  # fmt: skip


def saved(tmp_path, model):
    """As transformers saves it, in several files."""
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    words_tokenizer().save_pretrained(tmp_path)
    return EngineConfig(str(tmp_path), device="cpu", max_model_len=64)


def load(config, may_defer):
    register_attention()
    return load_model(config, ATTENTION_NAME, may_defer=may_defer).model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_deferred_model_is_the_model(family, tmp_path):
    """Its fused layers give the bytes of those made from the model in memory; read as a whole it has every weight."""
    config = saved(tmp_path, small_model(family))
    deferred = load(config, may_defer=True)
    assert is_deferred(deferred)
    whole = load(config, may_defer=False)
    assert not is_deferred(whole)
    ours = make_forward(deferred, torch.float32, owns_model=True)
    theirs = make_forward(load(config, may_defer=False), torch.float32)
    for one, other in zip(logits_of(*ours)[0], logits_of(*theirs)[0], strict=True):
        assert torch.equal(one, other)
    again = load(config, may_defer=True)
    read_all(again)
    state = again.state_dict()
    for name, expected in whole.state_dict().items():
        assert torch.equal(state[name], expected), name
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == whole.config.tie_word_embeddings
    assert again.generation_config.eos_token_id == whole.generation_config.eos_token_id


def test_what_has_no_fused_layers_is_read_as_a_whole(tmp_path):
    """Another family, an activation that the kernels lack, and a block size that they do not take."""
    assert not is_deferred(load(saved(tmp_path / "a", small_model("starcoder2")), may_defer=True))
    config = saved(tmp_path / "b", small_model("llama", hidden_act="relu"))
    model = load(config, may_defer=True)
    assert is_deferred(model)
    assert make_forward(model, torch.float32)[0].name == "transformers"
    assert not is_deferred(model)
    model = load(saved(tmp_path / "c", small_model("llama")), may_defer=True)
    assert make_forward(model, torch.float32, block_size=8)[0].name == "transformers"
    assert not is_deferred(model)


def test_a_file_that_lacks_a_weight_is_refused_as_before(tmp_path):
    from batchinfer.errors import ModelError

    config = saved(tmp_path, small_model("llama"))
    for path in tmp_path.glob("*.safetensors"):
        state = load_file(path)
        if state.pop("model.layers.1.mlp.up_proj.weight", None) is not None:
            save_file(state, path, {"format": "pt"})
    with pytest.raises(ModelError):
        load(config, may_defer=True)


def test_the_real_gguf_file_is_read_layer_by_layer(tmp_path):
    """The same weights as when it is read as a whole."""
    config = EngineConfig(str(gguf_path()), device="cpu", cache_dir=str(tmp_path))
    model = load(config, may_defer=True)
    assert is_deferred(model)
    read_all(model)
    state = load(config, may_defer=False).state_dict()
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in state.items())
