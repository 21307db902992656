"""Writes a transformers model as a GGUF file, as llama.cpp's ``convert_hf_to_gguf.py`` does, from its description.

Written from the format's side and without looking at our reader: what is done here, it has to undo.
"""

import gguf
import numpy as np
import torch

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(path, model, architecture, *, extra=None, tensors=None, quantize=None, tokenizer=None, drop=()) -> None:
    """Write ``model`` (float32) to ``path``. ``extra``: more metadata of the model's section; ``tensors``: more tensors."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in (extra or {}).items():
        add = (
            writer.add_string
            if isinstance(value, str)
            else writer.add_float32
            if isinstance(value, float)
            else writer.add_uint32
        )
        add(f"{architecture}.{key}", value)
    if tokenizer is not None:
        tokenizer(writer)
    is_tied = config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        if name in drop or (name == "lm_head.weight" and is_tied):
            continue
        array = as_llama_cpp(name, weight, config, architecture)
        kind = quantize if quantize is not None and array.ndim > 1 else None
        if kind is None:
            writer.add_tensor(gguf_name(name, architecture), array)
        else:
            writer.add_tensor(gguf_name(name, architecture), gguf.quantize(array, kind), raw_dtype=kind)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, np.asarray(array, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str, architecture: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, suffix = rest.rpartition(".")
    names = LAYER_NAMES | (GEMMA_NAMES if architecture.startswith("gemma") else {})
    return f"blk.{layer}.{names[module]}.{suffix}"


def as_llama_cpp(name: str, weight: torch.Tensor, config, architecture: str) -> np.ndarray:
    """The llama architecture interleaves the halves of each rotated head; Gemma's norms get 1 added."""
    if architecture == "llama" and ".q_proj." in name:
        weight = interleave(weight, config.num_attention_heads)
    if architecture == "llama" and ".k_proj." in name:
        weight = interleave(weight, config.num_key_value_heads)
    if architecture.startswith("gemma") and "norm" in name:
        weight = weight + 1
    return np.ascontiguousarray(weight.float().numpy())


def interleave(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Row i of a head's first half and row i of its second half become neighbours."""
    heads = []
    for head in weight.chunk(num_heads):
        first, second = head.chunk(2)
        heads.append(torch.stack((first, second), dim=1).flatten(0, 1))
    return torch.cat(heads)
