"""``docs/models.md``, written from what small models of each family do: ``python -m tests.engine.models_page``."""

from pathlib import Path

import torch

from batchinfer.errors import ModelError
from batchinfer.models.fused.families import FAMILIES as FUSED
from batchinfer.models.gguf_config import MODEL_TYPES
from batchinfer.models.parallel.shard import PARALLEL_FAMILIES, UNDIVIDED
from tests.engine.small_decoder import make_forward, small_model
from tests.engine.test_families import FAMILIES, random_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
NAMES = {
    "llama": "Llama 2 and 3, SmolLM2", "mistral": "Mistral", "qwen2": "Qwen2, Qwen2.5", "qwen3": "Qwen3", "smollm3": "SmolLM3",
    "phi3": "Phi-3, Phi-4", "olmo2": "OLMo 2", "granite": "Granite 3", "gemma": "Gemma", "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)", "mixtral": "Mixtral", "qwen3_moe": "Qwen3-MoE", "gpt_oss": "gpt-oss",
    "cohere2": "Command R7B", "starcoder2": "StarCoder2", "olmo3": "OLMo 3", "phi": "Phi-1.5, Phi-2", "glm4": "GLM-4",
    "deepseek_v3": "DeepSeek-V3",
}  # fmt: skip
"""Models that people know, by transformers' ``model_type``."""
REFUSED = {
    "mamba": {"state_size": 4, "num_hidden_layers": 2},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 12, "mamba_d_head": 16, "mamba_n_groups": 1},
    "qwen3_next": {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "lfm2": {"full_attn_idxs": [1]},
}
HEAD = """# Which models run, and how

This page is made by `python -m tests.engine.models_page`, and a test fails when it is not what small models of these
families do. "fused" layers are batchinfer's own: merged products, few passes over a row, INT8, weights read from their
files layer by layer. Everything else runs through transformers' own modules with batchinfer's paged attention: every
causal decoder it has, without INT8. Either way logits are tested against transformers' unpatched model.

Fused layers are for the CPU, for a block size of a multiple of 16 and the activations SiLU and GELU (tanh).
GGUF files are read for the architectures that say so (Mistral's call themselves `llama`); safetensors folders for all.

| models | `model_type` | on the CPU | `--quantization int8` | GGUF |
|---|---|---|---|---|
"""
TAIL = """
Refused with a sentence, since their layers are not all causal attention: {refused}.

INT8 of an expert layer quantises each expert by itself; routers stay float32. An expert that no calibration text reached
is rounded from its weights alone.

## Several devices

`--tensor-parallel-size` divides {parallel}; on a GPU too, in fused layers. Not {undivided}; all other families run
on one device.
"""


def page() -> str:
    """The whole page; each row comes from building a model and asking for its layers."""
    rows = [_row(family) for family in NAMES]
    refused = ", ".join(f"`{family}`" for family, extra in REFUSED.items() if _is_refused(family, extra))
    return (
        HEAD
        + "".join(rows)
        + TAIL.format(
            refused=refused,
            parallel=", ".join(f"`{family}`" for family in sorted(PARALLEL_FAMILIES)),
            undivided=", nor ".join(f"`{family}` ({reason})" for family, reason in UNDIVIDED.items()),
        )
    )


def _row(family: str) -> str:
    model = small_model(family) if family in FUSED else random_model(family, **FAMILIES[family])
    forward, _ = make_forward(model, torch.float32)
    path = "transformers' modules, paged attention"
    if forward.name == "fused":
        path = "fused layers, experts grouped" if _has_experts(model) else "fused layers"
    gguf = "yes" if family in MODEL_TYPES.values() else "no"
    return f"| {NAMES[family]} | `{family}` | {path} | {_int8(family)} | {gguf} |\n"


def _has_experts(model) -> bool:
    return any(type(module).__name__.endswith("Experts") for module in model.modules())


def _int8(family: str) -> str:
    model = small_model(family) if family in FUSED else random_model(family, **FAMILIES[family])
    try:
        forward, _ = make_forward(model, torch.float32, quantization="int8")
    except ModelError:
        return "no"
    return "yes" if forward.recipe else "no"


def _is_refused(family: str, extra: dict) -> bool:
    try:
        make_forward(random_model(family, **extra), torch.float32)
    except ModelError:
        return True
    return False


if __name__ == "__main__":
    PAGE.write_text(page())
