"""Logits of every token of a given text: what fidelity is measured on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchinfer.engine.attention import ATTENTION_NAME, register_attention
from batchinfer.engine.attention_backend import choose_attention
from batchinfer.engine.attention_groups import Span
from batchinfer.engine.forward_pass import choose_forward
from batchinfer.engine.kv_cache import LayerShape
from batchinfer.engine.model_runner import cache_dtype, kv_dtype
from batchinfer.engine.probe import probe_layers
from batchinfer.errors import InvalidSpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.engine.config import EngineConfig
    from batchinfer.models.load import LoadedModel


class Scorer:
    """A model as an engine of this config runs it, without the engine; takes the model's weights apart.

    Raises:
        ModelError: as :class:`~batchinfer.engine.model_runner.ModelRunner`.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, max_tokens: int) -> None:
        register_attention()
        loaded.model.set_attn_implementation(ATTENTION_NAME)
        self._device = loaded.device
        self._blocks = list(range(-(-max_tokens // config.block_size)))
        self._max_tokens = max_tokens
        layers = probe_layers(loaded.model, loaded.device, loaded.name)
        self._attention = choose_attention(
            [LayerShape(layer.num_kv_heads, layer.head_dim, layer.v_head_dim) for layer in layers],
            len(self._blocks),
            config.block_size,
            cache_dtype(loaded, config),
            loaded.device,
            needs_compiler=config.quantization == "none",
            kv_dtype=kv_dtype(config),
        )
        self._forward = choose_forward(loaded, layers, self._attention, config.quantization, owns_model=True)

    @torch.inference_mode()
    def chunk(self, token_ids: Sequence[int], start: int, stop: int, wanted: range) -> torch.Tensor:
        """float32 ``[len(wanted), vocab_size]`` of some places in ``[start, stop)``; the chunks before were computed.

        Raises:
            InvalidSpecError: more tokens than the scorer was made for.
        """
        if stop > self._max_tokens:
            raise InvalidSpecError(f"{stop} tokens cannot be scored; give 1 to {self._max_tokens}", param="token_ids")
        tokens = torch.tensor(token_ids[start:stop], dtype=torch.int64, device=self._device)
        positions = torch.arange(start, stop, device=self._device)
        places = torch.arange(wanted.start - start, max(wanted.start, wanted.stop) - start, device=self._device)
        context = self._attention.context([Span(0, start, stop - start, self._blocks)], stop - start)
        return self._forward(tokens, positions, places, context, range(len(places))).logits.float()

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """float32 ``[len(token_ids), vocab_size]``: row ``i`` is what follows the first ``i + 1`` tokens.

        Raises:
            InvalidSpecError: more tokens than the scorer was made for, or none.
        """
        count = len(token_ids)
        if not 0 < count <= self._max_tokens:
            raise InvalidSpecError(f"{count} tokens cannot be scored; give 1 to {self._max_tokens}", param="token_ids")
        rows = torch.arange(count, device=self._device)
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=self._device)
        context = self._attention.context([Span(0, 0, count, self._blocks)], count)
        return self._forward(tokens, rows, rows, context, range(count)).logits.float()
