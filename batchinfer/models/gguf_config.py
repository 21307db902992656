"""From a GGUF file's metadata to a transformers config, family by family.

Keys are llama.cpp's (``gguf-py/gguf/constants.py``); what a file does not state, llama.cpp's loader fixes in code
(``src/llama-model.cpp``), and so does this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchinfer.errors import ModelError

if TYPE_CHECKING:
    from batchinfer.models.gguf_file import GgufFile

MODEL_TYPES = {
    "llama": "llama",  # Mistral's files call themselves llama too
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
"""llama.cpp's architecture to transformers' model type."""

GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""The 27B models scale attention by hidden size / heads instead of the head size; files do not say so."""

GEMMA3_LOCAL_ROPE_THETA = 10_000.0


def hf_config_fields(file: GgufFile) -> dict[str, Any]:
    """Fields of the transformers config that describes ``file``, ``model_type`` among them.

    Raises:
        ModelError: the architecture is not supported, or a key is missing.
    """
    architecture = file.architecture
    if architecture not in MODEL_TYPES:
        raise ModelError(
            f"{file.path}: GGUF files of the architecture {architecture!r} are not supported, only "
            f"{', '.join(sorted(MODEL_TYPES))}; take the model's safetensors folder instead"
        )
    _check_layers(file)
    fields = _common_fields(file)
    if architecture.startswith("gemma"):
        fields |= _gemma_fields(file, fields)
    # what the file does not state is the family's default, but for tokens: those belong to one vocabulary
    tokens = {f"{name}_token_id": file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return {key: value for key, value in fields.items() if value is not None} | tokens | {"pad_token_id": None}


def _check_layers(file: GgufFile) -> None:
    """Refuse a number of layers that the tensors do not bear out, before a model of that many layers is built."""
    stated = _required(file, "block_count")
    found = len({name.split(".")[1] for name in file.tensors if name.startswith("blk.")})
    if stated != found:
        raise ModelError(f"{file.path} states {stated} layers and has tensors of {found}: download it again")


def _common_fields(file: GgufFile) -> dict[str, Any]:
    hidden_size, num_heads = _required(file, "embedding_length"), _heads(file)
    return {
        "model_type": MODEL_TYPES[file.architecture],
        "vocab_size": file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0,
        "hidden_size": hidden_size,
        "intermediate_size": _same_for_all_layers(file, "feed_forward_length"),
        "num_hidden_layers": _required(file, "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _same_for_all_layers(file, "attention.head_count_kv", num_heads),
        "head_dim": file.get("attention.key_length") or hidden_size // num_heads,
        "max_position_embeddings": _required(file, "context_length"),
        "rms_norm_eps": _required(file, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(file),
        "sliding_window": file.get("attention.sliding_window"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def _rope_parameters(file: GgufFile) -> dict[str, Any]:
    base: dict[str, Any] = {"rope_theta": file.get("rope.freq_base", 10_000.0), "rope_type": "default"}
    head_dim = file.get("attention.key_length") or _required(file, "embedding_length") // _heads(file)
    rotated = file.get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        base["partial_rotary_factor"] = rotated / head_dim
    if "rope_factors_long.weight" in file.tensors:
        return base | _long_rope(file)
    kind = file.get("rope.scaling.type", "none")
    if kind == "linear":
        return base | {"rope_type": "linear", "factor": file.get("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        return base | {
            "rope_type": "yarn",
            "factor": file.get("rope.scaling.factor", 1.0),
            "original_max_position_embeddings": _required(file, "rope.scaling.original_context_length"),
        }
    return base


def _long_rope(file: GgufFile) -> dict[str, Any]:
    """Phi-3's two sets of factors, for sequences within the first training length and beyond it."""
    scaling = {
        "rope_type": "longrope",
        "long_factor": file.read("rope_factors_long.weight").tolist(),
        "short_factor": file.read("rope_factors_short.weight").tolist(),
        "original_max_position_embeddings": _required(file, "rope.scaling.original_context_length"),
        "attention_factor": file.get("rope.scaling.attn_factor"),
    }
    return {key: value for key, value in scaling.items() if value is not None}


def _gemma_fields(file: GgufFile, fields: dict[str, Any]) -> dict[str, Any]:
    is_27b = fields["num_hidden_layers"] == GEMMA_27B_LAYERS[file.architecture]
    heads_width = fields["hidden_size"] // fields["num_attention_heads"]
    added: dict[str, Any] = {
        "query_pre_attn_scalar": heads_width if is_27b else fields["head_dim"],
        "attn_logit_softcapping": file.get("attn_logit_softcapping"),
        "final_logit_softcapping": file.get("final_logit_softcapping"),
    }
    if file.architecture == "gemma3":
        local = {"rope_theta": GEMMA3_LOCAL_ROPE_THETA, "rope_type": "default"}
        theta = file.get("rope.freq_base", 1_000_000.0)
        full = fields["rope_parameters"] | {"rope_theta": theta}
        added["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    return added


def _heads(file: GgufFile) -> int:
    return int(_same_for_all_layers(file, "attention.head_count"))


def _required(file: GgufFile, key: str) -> Any:
    value = file.get(key)
    if value is None:
        raise ModelError(f"{file.path} lacks the key {file.architecture}.{key}: convert the model again")
    return value


def _same_for_all_layers(file: GgufFile, key: str, default: Any = None) -> Any:
    value = file.get(key, default)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ModelError(f"{file.path}: {file.architecture}.{key} differs between layers, which is not supported")
        return value[0]
    return value if value is not None else _required(file, key)
