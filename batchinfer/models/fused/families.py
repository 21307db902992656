"""Reads decoders of the Llama shape out of transformers' modules: which families, and how they differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from batchinfer.models.deferred import read
from batchinfer.models.fused.parts import ExpertStack, ModulePart, TensorPart
from batchinfer.models.fused.spec import DecoderSpec, ExpertsSpec, LayerSpec, MlpSpec, Norm, Projection
from batchinfer_kernels.cpu import RotaryEmbedding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.models.fused.spec import LayerAttention
    from batchinfer_kernels.cpu.operands import Activation

FAMILIES = frozenset({
    "llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "olmo2", "granite", "gemma", "gemma2", "gemma3_text",
    "mixtral", "qwen3_moe",
})  # fmt: skip
"""``model_type`` of the families this module understands; each is tested against its unpatched model."""
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def describe(model: Any, attention: Sequence[LayerAttention], num_positions: int) -> DecoderSpec | None:
    """The model's parts if it is a decoder that the fused layers can run, else None.

    ``attention`` is what each layer told the attention function; ``num_positions`` is the longest sequence.
    """
    config = model.config.get_text_config()
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if config.model_type not in FAMILIES or activation not in ACTIVATIONS or len(attention) != len(model.model.layers):
        return None
    family = _Family(model, config, num_positions)
    embed = model.model.embed_tokens
    scale = getattr(embed, "embed_scale", None)
    embedding = read(embed.weight)
    is_tied = model.lm_head.weight is embed.weight and model.lm_head.bias is None
    return DecoderSpec(
        embedding=embedding,
        # Gemma multiplies by the scale rounded to the weights' precision
        embedding_scale=(
            float(scale.to(embed.weight.dtype)) if scale is not None else getattr(config, "embedding_multiplier", 1.0)
        ),
        layers=[family.layer(i, seen, ACTIVATIONS[activation]) for i, seen in enumerate(attention)],
        final_norm=family.norm(model.model.norm),
        head=Projection("head", [TensorPart(embedding) if is_tied else ModulePart(model.lm_head)]),
        logits_scale=1.0 / getattr(config, "logits_scaling", 1.0),
        logits_softcap=getattr(config, "final_logit_softcapping", None),
    )


class _Family:
    """One model's reading."""

    def __init__(self, model: Any, config: Any, num_positions: int) -> None:
        self._layers = model.model.layers
        self._rotary = model.model.rotary_emb
        self._config = config
        self._num_positions = num_positions
        self._norm_offset = 1.0 if config.model_type.startswith("gemma") else 0.0
        self._tables: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}

    def norm(self, module: Any) -> Norm:
        eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
        return Norm(read(module.weight).detach().float(), eps, self._norm_offset)

    def layer(self, index: int, attention: LayerAttention, activation: Activation) -> LayerSpec:
        module = self._layers[index]
        attn = module.self_attn
        residual_scale = getattr(self._config, "residual_multiplier", 1.0)
        per_head = hasattr(attn, "q_norm") and attn.q_norm.weight.numel() == attention.head_dim
        whole = hasattr(attn, "q_norm") and not per_head
        qkv = ["qkv_proj"] if hasattr(attn, "qkv_proj") else ["q_proj", "k_proj", "v_proj"]
        has_inner_norms = hasattr(module, "input_layernorm")
        has_outer_norms = hasattr(module, "post_feedforward_layernorm")
        before_mlp = "pre_feedforward_layernorm" if has_outer_norms else "post_attention_layernorm"
        return LayerSpec(
            attention=attention,
            rope=self._rope(index, attn, has_norms=per_head),
            attention_norm=self.norm(module.input_layernorm) if has_inner_norms else None,
            qkv=_projection(f"layers.{index}.qkv", attn, "self_attn", qkv),
            q_norm=self.norm(attn.q_norm) if whole else None,
            k_norm=self.norm(attn.k_norm) if whole else None,
            o=_projection(f"layers.{index}.o", attn, "self_attn", ["o_proj"], residual_scale),
            post_attention_norm=self.norm(module.post_attention_layernorm) if has_outer_norms else None,
            mlp_norm=self.norm(getattr(module, before_mlp)) if has_inner_norms else None,
            mlp=_mlp(f"layers.{index}", module.mlp, activation, residual_scale),
            post_mlp_norm=self.norm(module.post_feedforward_layernorm) if has_outer_norms else None,
        )

    def _rope(self, index: int, attn: Any, *, has_norms: bool) -> RotaryEmbedding:
        cos, sin = self._table(self._config.layer_types[index] if hasattr(self._rotary, "layer_types") else None)
        if not getattr(attn, "use_rope", True):  # SmolLM3 leaves some layers without positions
            cos, sin = cos[:, :0].contiguous(), sin[:, :0].contiguous()
        if not has_norms:
            return RotaryEmbedding(cos, sin)
        q, k = self.norm(attn.q_norm), self.norm(attn.k_norm)
        return RotaryEmbedding(
            cos, sin, q_norm=q.weight, k_norm=k.weight, norm_offset=self._norm_offset, norm_eps=q.eps
        )

    def _table(self, layer_type: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of all positions, float32 ``[num_positions, rotary_dim / 2]``, shared between layers."""
        if layer_type not in self._tables:
            device = next(self._rotary.buffers()).device
            positions = torch.arange(self._num_positions, device=device).unsqueeze(0)
            arguments = (torch.zeros(1, device=device), positions, *([] if layer_type is None else [layer_type]))
            cos, sin = self._rotary(*arguments)
            half = cos.shape[-1] // 2  # the second half repeats the first
            self._tables[layer_type] = (cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
        return self._tables[layer_type]


def _projection(name: str, block: Any, block_name: str, modules: Sequence[str], scale: float = 1.0) -> Projection:
    """Linear modules of a layer's attention or MLP, side by side; ``name`` is ``layers.3.qkv``."""
    layer = name.rpartition(".")[0]
    paths = tuple(f"{layer}.{block_name}.{module}" for module in modules)
    return Projection(name, [ModulePart(getattr(block, module)) for module in modules], scale, paths)


def _mlp(name: str, mlp: Any, activation: Activation, residual_scale: float) -> MlpSpec | ExpertsSpec:
    if not hasattr(mlp, "experts"):
        gate_up = ["gate_up_proj"] if hasattr(mlp, "gate_up_proj") else ["gate_proj", "up_proj"]
        down = _projection(f"{name}.down", mlp, "mlp", ["down_proj"], residual_scale)
        return MlpSpec(_projection(f"{name}.gate_up", mlp, "mlp", gate_up), activation, down)
    stacks = (ExpertStack(mlp.experts, part).parts() for part in ("gate_up_proj", "down_proj"))
    experts = [
        MlpSpec(
            Projection(f"{name}.experts.{i}.gate_up", [gate_up]),
            activation,
            Projection(f"{name}.experts.{i}.down", [down], residual_scale),
        )
        for i, (gate_up, down) in enumerate(zip(*stacks, strict=True))
    ]
    router = mlp.gate
    renormalize = getattr(router, "norm_topk_prob", True)  # Mixtral always does
    return ExpertsSpec(read(router.weight).detach().float(), router.top_k, renormalize, experts)
