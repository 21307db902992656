"""What a decoder of the Llama shape is made of, in words that do not depend on its family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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


class Part(Protocol):
    """A weight matrix of the model, and its bias."""

    @property
    def in_features(self) -> int:
        """Columns of the rows it reads."""

    @property
    def out_features(self) -> int:
        """Columns of what it gives."""

    def weight(self) -> torch.Tensor:
        """``[out, in]``, the model's own tensor or one read for this call."""

    def bias(self) -> torch.Tensor | None:
        """``[out]``."""

    def release(self) -> None:
        """Let go of the weight; the model cannot run afterwards."""


@dataclass(frozen=True, slots=True)
class Projection:
    """Linear layers that read the same rows, side by side, times a constant.

    Their weights are the model's own tensors, so that a conversion can let go of them one layer at a time.
    """

    name: str
    """Unique in its model: ``layers.3.qkv``."""
    parts: Sequence[Part]
    scale: float = 1.0
    modules: tuple[str, ...] = ()
    """The parts' modules, as adapters name them: ``layers.3.self_attn.q_proj``. Empty where no adapter reaches."""

    def weight(self) -> torch.Tensor:
        """float32 ``[out, in]``; a copy."""
        weights = [part.weight().detach().float() for part in self.parts]
        joined = torch.cat(weights) if len(weights) > 1 else weights[0].clone()
        return joined if self.scale == 1.0 else joined.mul_(self.scale)

    def slices(self, rows: int) -> Iterator[torch.Tensor]:
        """As :meth:`weight`, so many rows at a time: only the model's own tensor is ever there as a whole."""
        for part in self.parts:
            weight = part.weight().detach()
            for start in range(0, len(weight), rows):
                piece = weight[start : start + rows].float()
                yield piece if self.scale == 1.0 else piece * self.scale

    def bias(self) -> torch.Tensor | None:
        """float32 ``[out]``; None if no part has one."""
        biases = [part.bias() for part in self.parts]
        if all(bias is None for bias in biases):
            return None
        device = next(bias.device for bias in biases if bias is not None)
        filled = [
            torch.zeros(part.out_features, device=device) if bias is None else bias.detach().float()
            for part, bias in zip(self.parts, biases, strict=True)
        ]
        return torch.cat(filled) * self.scale

    @property
    def in_features(self) -> int:
        """Columns of the rows it reads."""
        return self.parts[0].in_features

    @property
    def out_features(self) -> int:
        """Columns of what it gives."""
        return sum(part.out_features for part in self.parts)

    def release(self) -> None:
        """Let go of the weights; the modules are of no use afterwards."""
        for part in self.parts:
            part.release()


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """``down(act(gate) * up)``."""

    gate_up: Projection
    activation: Activation
    down: Projection

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Both, in the order in which they run."""
        return self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts: each row goes to the ``top_k`` that the router likes best, and their answers are weighed."""

    router: torch.Tensor
    """float32 ``[num_experts, hidden_size]``; never quantised, since it decides."""
    top_k: int
    renormalize: bool
    """Whether the weights of the chosen experts are made to sum to 1."""
    experts: Sequence[MlpSpec]

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Those of all experts, in their order."""
        return tuple(projection for expert in self.experts for projection in expert.projections)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer. A norm that a family does not have is None.

    ``x += post_attention_norm(o(attention(qkv(attention_norm(x)))))``, then
    ``x += post_mlp_norm(mlp(mlp_norm(x)))``.
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
    mlp: MlpSpec | ExpertsSpec
    post_mlp_norm: Norm | None

    @property
    def projections(self) -> tuple[Projection, ...]:
        """All of them, in the order in which they run."""
        return self.qkv, self.o, *self.mlp.projections


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

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The first residual of tokens (int64 ``[T]``), float32 ``[T, hidden_size]``."""
        rows = self.embedding.index_select(0, token_ids).float()
        return rows if self.embedding_scale == 1.0 else rows.mul_(self.embedding_scale)

    @property
    def projections(self) -> dict[str, Projection]:
        """All of them by name, in the order in which they run."""
        found = [*(projection for layer in self.layers for projection in layer.projections), self.head]
        return {projection.name: projection for projection in found}
