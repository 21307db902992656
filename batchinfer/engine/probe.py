"""Finds out how a model attends, by asking its layers: true of any architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from batchinfer.errors import ModelError
from batchinfer.models.fused.spec import LayerAttention
from batchinfer.models.skeleton import build_attention_skeleton, is_deferred

if TYPE_CHECKING:
    from batchinfer.engine.attention import AttentionOptions

NUM_ROWS = 4


class ProbeContext:
    """Notes what each layer asks for, and answers with zeros."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerAttention] = {}
        self.num_calls = 0

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Note a layer; see :class:`~batchinfer.engine.attention.PagedContext`."""
        self.layers[layer] = LayerAttention(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=key.shape[2],
            v_head_dim=value.shape[2],
            scaling=options.scaling,
            sliding_window=options.sliding_window,
            softcap=options.softcap,
        )
        self.num_calls += 1
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


@torch.inference_mode()
def probe_layers(model: Any, device: torch.device, name: str) -> list[LayerAttention]:
    """How each layer attends.

    Raises:
        ModelError: a layer is no causal attention (recurrent, convolutional, chunked, bidirectional).
    """
    config = model.config.get_text_config()
    odd = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    probe = ProbeContext()
    mask = None
    if is_deferred(model):
        model, device = build_attention_skeleton(model), torch.device("meta")
        # without one, transformers would look at positions, which have no values here
        mask = torch.ones(1, NUM_ROWS, dtype=torch.bool, device=device)
    token_ids = torch.zeros(1, NUM_ROWS, dtype=torch.int64, device=device)
    positions = torch.arange(NUM_ROWS, device=device).unsqueeze(0)
    try:
        model(
            input_ids=token_ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=False,
            logits_to_keep=1,
            paged_context=probe,
        )
    except (TypeError, NotImplementedError) as error:
        raise ModelError(f"model {name} has attention this engine cannot run: {error}") from error
    wanted = list(range(config.num_hidden_layers))
    if odd or sorted(probe.layers) != wanted or probe.num_calls != len(wanted):
        kinds = f": {', '.join(sorted(odd))}" if odd else ""
        raise ModelError(f"model {name} ({config.model_type}) has layers that are not causal attention{kinds}")
    return [probe.layers[layer] for layer in wanted]
