"""A model by its sizes, read from its config: how many weights it has, and what a token costs. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from batchinfer.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of equal layers: attention with grouped heads, and a gated MLP of three matrices, or experts of such."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    """Of the dense MLP; of one expert where there are experts."""
    vocab_size: int
    num_experts: int = 0
    experts_per_token: int = 0
    shared_mlp_size: int = 0
    """Of the MLP that every token runs through beside its experts."""
    is_tied: bool = False
    """The head's matrix is the embedding's."""
    max_length: int | None = None
    """Longest sequence in tokens."""

    @classmethod
    def from_config(cls, fields: Mapping[str, Any]) -> Self:
        """From the fields of a transformers ``config.json``; those of a multimodal model's text part.

        Raises:
            ModelError: a size is missing; the message names it.
        """
        fields = fields.get("text_config") or fields

        def first(*names: str, default: int | None = None) -> int:
            for name in names:
                if fields.get(name):
                    return int(fields[name])
            if default is None:
                raise ModelError(
                    f"the model's config has no {names[0]}, so its speed cannot be computed; leave --device out",
                    param="model",
                )
            return default

        hidden, heads = first("hidden_size", "n_embd"), first("num_attention_heads", "n_head")
        experts = first("num_local_experts", "num_experts", "n_routed_experts", default=0)
        dense = first("intermediate_size", "n_inner", default=4 * hidden)
        mlp = first("moe_intermediate_size", default=dense) if experts else dense
        shared = first("shared_expert_intermediate_size", default=mlp * first("n_shared_experts", default=0))
        return cls(
            num_layers=first("num_hidden_layers", "n_layer"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=first("num_key_value_heads", default=heads),
            head_dim=first("head_dim", default=hidden // heads),
            mlp_size=mlp,
            vocab_size=first("vocab_size"),
            num_experts=experts,
            experts_per_token=first("num_experts_per_tok", default=2) if experts else 0,
            shared_mlp_size=shared if experts else 0,
            is_tied=bool(fields.get("tie_word_embeddings", False)),
            max_length=first("max_position_embeddings", "n_positions", default=0) or None,
        )

    @property
    def attention_weights(self) -> int:
        """Weights of a layer's query, key, value and output matrices: ``hidden * head_dim * (2 heads + 2 KV heads)``."""
        return self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)

    @property
    def expert_weights(self) -> int:
        """Weights of one expert, or of the dense MLP: ``3 * hidden * mlp``."""
        return 3 * self.hidden_size * self.mlp_size

    @property
    def common_weights(self) -> int:
        """Weights of a layer that every token needs beside its experts."""
        if not self.num_experts:
            return self.attention_weights + self.expert_weights
        beside = 3 * self.hidden_size * self.shared_mlp_size + self.hidden_size * self.num_experts
        return self.attention_weights + beside

    @property
    def head_weights(self) -> int:
        """Weights of the product with the vocabulary: ``hidden * vocab``."""
        return self.hidden_size * self.vocab_size

    @property
    def layer_weights_per_token(self) -> int:
        """Weights of all layers that one token is multiplied with."""
        return self.num_layers * (self.common_weights + self.experts_per_token * self.expert_weights)

    def layer_weights_read(self, num_tokens: float) -> float:
        """Weights of all layers that a step of so many tokens reads.

        Of ``E`` experts, ``E * (1 - (1 - k / E) ** tokens)`` are expected to be chosen by at least one token, if each
        chooses ``k`` evenly.
        """
        experts = 0.0
        if self.num_experts:
            missed = (1 - self.experts_per_token / self.num_experts) ** num_tokens
            experts = self.num_experts * (1 - missed) * self.expert_weights
        return self.num_layers * (self.common_weights + experts)

    @property
    def layer_weights(self) -> int:
        """All weights of the layers."""
        return self.num_layers * (self.common_weights + self.num_experts * self.expert_weights)

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values of a token in all layers: ``2 * layers * KV heads * head_dim``."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def attention_operations(self) -> int:
        """Operations of one query token and one token of its context: ``4 * layers * heads * head_dim``."""
        return 4 * self.num_layers * self.num_heads * self.head_dim
