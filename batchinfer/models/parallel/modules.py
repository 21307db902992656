"""transformers' modules on one rank of tensor parallelism: hooks where the ranks have to exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from batchinfer.models.parallel.words import Words

if TYPE_CHECKING:
    from batchinfer.models.parallel.peers import Peers


def share_modules(model: Any, peers: Peers) -> None:
    """Make a decoder that holds a rank's weights give what the whole one gives."""
    words = Words(len(model.lm_head.weight), peers)

    def add(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return peers.sum(output).to(output.dtype)

    def join(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return words.join(output)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(add)
        layer.mlp.down_proj.register_forward_hook(add)
    model.lm_head.register_forward_hook(join)
    model.model.embed_tokens = SharedEmbeddingModule(model.model.embed_tokens, words, peers)


class SharedEmbeddingModule(torch.nn.Module):
    """Embeddings whose words are divided between the ranks."""

    def __init__(self, inner: torch.nn.Module, words: Words, peers: Peers) -> None:
        super().__init__()
        self._inner = inner
        self._words = words
        self._peers = peers

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings ``[..., hidden_size]`` of ids ``[...]``."""
        local, is_elsewhere = self._words.localize(token_ids)
        found: torch.Tensor = self._inner(local).masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        return self._peers.sum(found).to(found.dtype)
