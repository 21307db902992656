"""What a decoder of the Llama shape is made of, in words that do not depend on its family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer_kernels.cpu import RotaryEmbedding
    from batchinfer_kernels.cpu.operands import Activation


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How a layer attends: what it told the attention function when it was asked."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm with ``weight + offset``."""

    weight: torch.Tensor
    """float32 ``[n]``."""
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Projection:
    """Linear layers that read the same rows, side by side, times a constant.

    Their weights are the model's own tensors, so that a conversion can let go of them one layer at a time.
    """

    modules: Sequence[torch.nn.Linear]
    scale: float = 1.0

    def weight(self) -> torch.Tensor:
        """float32 ``[out, in]``; a copy."""
        return torch.cat([module.weight.detach().float() for module in self.modules]) * self.scale

    def bias(self) -> torch.Tensor | None:
        """float32 ``[out]``; None if no part has one."""
        if all(module.bias is None for module in self.modules):
            return None
        parts = [
            module.weight.new_zeros(module.out_features) if module.bias is None else module.bias.detach()
            for module in self.modules
        ]
        return torch.cat([part.float() for part in parts]) * self.scale

    @property
    def in_features(self) -> int:
        """Columns of the rows it reads."""
        return self.modules[0].in_features

    @property
    def out_features(self) -> int:
        """Columns of what it gives."""
        return sum(module.out_features for module in self.modules)

    def release(self) -> None:
        """Let go of the weights; the modules are of no use afterwards."""
        for module in self.modules:
            module.weight.data = module.weight.data.new_empty(0)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer. A norm that a family does not have is None.

    ``x += post_attention_norm(o(attention(qkv(attention_norm(x)))))``, then
    ``x += post_mlp_norm(down(act(gate) * up))`` of ``mlp_norm(x)``.
    """

    attention: LayerAttention
    rope: RotaryEmbedding
    attention_norm: Norm | None
    qkv: Projection
    q_norm: Norm | None
    """Over all heads together (OLMo 2); norms of single heads are in ``rope``."""
    k_norm: Norm | None
    o: Projection
    post_attention_norm: Norm | None
    mlp_norm: Norm | None
    gate_up: Projection
    activation: Activation
    down: Projection
    post_mlp_norm: Norm | None

    @property
    def projections(self) -> tuple[Projection, Projection, Projection, Projection]:
        """All four, in the order in which they run."""
        return self.qkv, self.o, self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A whole decoder: embeddings, layers, head."""

    embedding: torch.Tensor
    """``[vocab_size, hidden_size]``, the model's own tensor."""
    embedding_scale: float
    layers: Sequence[LayerSpec]
    final_norm: Norm
    head: Projection
    logits_scale: float
    logits_softcap: float | None
