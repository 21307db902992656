"""Models whose weights stay in their files until a layer is converted."""

import subprocess
import sys

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


MEASURE = """
import sys, threading, torch
from pathlib import Path
torch.set_num_threads(1)
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.engine import create_engine
folder, quantization, cache = sys.argv[1:]
tiny = str(Path(folder).parent / "tiny")
settings = dict(dtype="bfloat16", device="cpu", quantization=quantization, cache_dir=cache, kv_cache_bytes=1 << 20)
create_engine(EngineConfig(tiny, **settings)).close()  # imports, kernels and buffers

def anonymous():
    fields = (line.split() for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(next(fields)[1]) * 1024

before, most, done = anonymous(), [0], threading.Event()
def watch():
    while not done.wait(0.002):
        most[0] = max(most[0], anonymous())
thread = threading.Thread(target=watch)
thread.start()
engine = create_engine(EngineConfig(folder, **settings))
done.set()
thread.join()
print(max(most[0], anonymous()) - before)
"""


@pytest.mark.parametrize("quantization, bytes_a_weight", [("none", 2)])
def test_the_peak_is_the_model_at_its_final_precision_and_one_layer(tmp_path, quantization, bytes_a_weight):
    """Of a folder of many files, in a process of its own: its own pages; the files' belong to the system's cache."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1000}
    for name, layers, inner in (("tiny", 1, 64), ("large", 32, 1024)):
        config = AutoConfig.for_model(
            "llama", num_hidden_layers=layers, intermediate_size=inner, max_position_embeddings=256, **sizes
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / name, max_shard_size="20MB")
        words_tokenizer().save_pretrained(tmp_path / name)
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    rest = 2 * model.model.embed_tokens.weight.numel()
    total = 32 * layer + rest
    assert len(list((tmp_path / "large").glob("*.safetensors"))) > 8
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "large"), quantization, str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    used = int(done.stdout.split()[-1])
    # a layer in float32, its float32 copy in the kernels' layout, and what rounding its widest matrix takes in float64
    one_layer = (4 + 4) * layer + 5 * 8 * 1024**2
    limit = bytes_a_weight * total + rest + one_layer + 24 * 2**20
    assert used < limit, (used, total, layer)
    assert used < 0.8 * 2 * bytes_a_weight * total, "twice the model would show"
