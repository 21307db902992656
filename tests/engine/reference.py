"""The truth: transformers' own model and ``generate``, on weights read from the GGUF file by another route than ours."""

from dataclasses import dataclass

import gguf
import torch

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_reference(path):
    """A plain ``LlamaForCausalLM`` in float32 with eager attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(path)

    def value(key):
        return reader.fields[f"llama.{key}"].contents()

    config = LlamaConfig(
        vocab_size=value("vocab_size"),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        max_position_embeddings=value("context_length"),
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            if parts[2] in heads:
                weight = unpermute(weight, heads[parts[2]])
            state[f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.weight"] = weight
        elif parts[0] in ("token_embd", "output_norm"):
            state["model.embed_tokens.weight" if parts[0] == "token_embd" else "model.norm.weight"] = weight
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are not in the file
    return model.eval()


def unpermute(weight, num_heads):
    """llama.cpp keeps the two halves of RoPE interleaved; transformers keeps them one after the other."""
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


@dataclass(frozen=True)
class Truth:
    """What ``generate`` gave for a prompt, and the logits it chose from ``[num_tokens, vocab_size]``."""

    prompt: list
    tokens: list
    logits: torch.Tensor


def generate_alone(model, prompt, max_new_tokens, eos_token_id):
    """Greedy ``generate`` of one prompt in a batch of one: no padding, nothing beside it."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos_token_id,
        pad_token_id=eos_token_id,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return Truth(prompt, output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits))


TIE = 1e-4
"""Two logits nearer than this are a tie in float32: which is larger is an accident of the order of sums."""


def check_tokens(truth, tokens):
    """Compare with the truth; True if equal, False if they part at a tie *by the reference's own logits*.

    After a tie the texts differ rightly, so nothing can be compared from there on.

    Raises:
        AssertionError: they part where the reference had a clear favourite.
    """
    expected = truth.tokens[: len(tokens)]
    if tokens == expected:
        return True
    at = next(i for i, (ours, theirs) in enumerate(zip(tokens, expected, strict=False)) if ours != theirs)
    margin = (truth.logits[at, expected[at]] - truth.logits[at, tokens[at]]).item()
    assert margin <= TIE, f"token {at}: {tokens[at]} instead of {expected[at]}, whose logit is {margin} higher"
    return False
