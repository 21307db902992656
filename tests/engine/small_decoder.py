"""Small random decoders of each family, and their logits through the pass that an engine would choose."""

from types import SimpleNamespace

import torch

from batchinfer.engine.attention import ATTENTION_NAME, register_attention
from batchinfer.engine.attention_backend import choose_attention
from batchinfer.engine.attention_groups import Span
from batchinfer.engine.forward_pass import choose_forward
from batchinfer.engine.kv_cache import LayerShape
from batchinfer.engine.probe import probe_layers

CPU = torch.device("cpu")
VOCAB, BLOCK, LONGEST = 96, 16, 64
PROMPTS = ([5, 17, 33, 2, 90, 41, 8, 66, 12, 7, 29, 54, 77, 3, 60, 21, 45, 11, 9], [70, 4, 4, 31])
ANSWER = 4
ODD = {
    "mistral": {"sliding_window": 7},
    "qwen3": {"head_dim": 24},
    "smollm3": {"no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    "phi3": {"partial_rotary_factor": 0.5, "pad_token_id": 0, "sliding_window": 9},
    "granite": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 1.7,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
    "qwen3_moe": {
        "head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
        "mlp_only_layers": [1], "norm_topk_prob": False,
    },
    "gemma": {"head_dim": 24},
    "gemma2": {"head_dim": 24, "sliding_window": 7, "query_pre_attn_scalar": 20, "final_logit_softcapping": 3.0},
    "gemma3_text": {
        "head_dim": 24, "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
        },
    },
}  # fmt: skip
"""What makes a family differ from Llama, set to values that would show if they were ignored."""


def small_model(family, **more):
    """Random weights, norms included, large enough that every part of the model moves the logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LONGEST,
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": family.startswith("gemma"),
    } | ODD.get(family, {}) | more  # fmt: skip
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields), attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 0.1 if family.startswith("gemma") else 1.0, 0.3)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.3)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.15)
    return model.eval()


class NumbersTokenizer:
    """Text to ids, any ids: calibration only needs some."""

    def encode(self, text):
        return [ord(character) % VOCAB for character in text]


def make_forward(model, dtype, owns_model=False, quantization="none", block_size=BLOCK, cache_dir=None, tokenizer=None):
    """The pass and the attention that an engine would choose."""
    model = model.to(dtype)
    return forward_of(model, probed(model), dtype, owns_model, quantization, block_size, cache_dir, tokenizer)


def probed(model):
    """How the model's layers attend."""
    register_attention()
    model.set_attn_implementation(ATTENTION_NAME)
    return probe_layers(model, CPU, "small")


def forward_of(model, layers, dtype, owns_model, quantization, block_size, cache_dir, tokenizer, peers=None):
    """The pass of a model whose layers were asked already; with ``peers`` it is a rank's share."""
    shapes = [LayerShape(layer.num_kv_heads, layer.head_dim, layer.v_head_dim) for layer in layers]
    attention = choose_attention(shapes, 16, block_size, dtype, CPU)
    loaded = SimpleNamespace(model=model, name="small", max_model_len=LONGEST, dtype=dtype, device=CPU)
    loaded.tokenizer, loaded.revision, loaded.cache_dir = tokenizer or NumbersTokenizer(), "small", cache_dir
    return choose_forward(loaded, layers, attention, quantization, owns_model=owns_model, peers=peers), attention


STEPS = ((13, 4), (6, 1), (1, 1), (1, 1), (1, 1), (1, 0))
"""Tokens of both sequences, step by step."""


@torch.inference_mode()
def logits_of(forward, attention, store=None, adapters=(None, None), steps=STEPS):
    """Both sequences: a chunk of the first beside the second, the rest, then four tokens each, with padding rows.

    ``adapters`` are what the sequences use, opened by ``store``.
    """
    tables, sequences = [[3, 9, 1], [7, 2, 12]], [[*prompt, *range(20, 20 + ANSWER)] for prompt in PROMPTS]
    done, logits = [0, 0], [[], []]
    for counts in steps:
        rows = [(i, p) for i, count in enumerate(counts) for p in range(done[i], done[i] + count)]
        spans, row = [], 0
        for i, count in enumerate(counts):
            if count:
                spans.append(Span(row, done[i], count, tables[i]))
            row += count
            done[i] += count
        tokens = torch.tensor([sequences[i][p] for i, p in rows] + [0, 0])
        positions = torch.tensor([p for _, p in rows] + [0, 0])
        context = attention.context(spans, len(tokens))
        used = {}
        for place, (i, _) in enumerate(rows):
            if adapters[i] is not None:
                used.setdefault(adapters[i], []).append(place)
        groups = store.groups(used) if used else ()
        output = forward(tokens, positions, torch.arange(len(rows)), context, range(len(rows)), groups=groups)
        assert torch.equal(output.best_index, output.logits.argmax(dim=1))
        for (i, _), line in zip(rows, output.logits.float(), strict=True):
            logits[i].append(line)
    assert [len(lines) for lines in logits] == [len(sequence) for sequence in sequences]
    return [torch.stack(lines) for lines in logits], sequences
