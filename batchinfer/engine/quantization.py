"""Quantises a loaded model's projections as the config asks, calibrating on the built-in text where that is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchinfer.engine.attention_groups import Span
from batchinfer.engine.kv_cache import LayerShape
from batchinfer.engine.native_attention import BLOCK_MULTIPLE, NativeAttention
from batchinfer.models.fused.calibration import MAX_TOKENS, activation_peaks
from batchinfer.models.fused.calibration_texts import TEXTS
from batchinfer.models.fused.convert import pack
from batchinfer.models.fused.int8 import w8a8, weight_only

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.models.fused.convert import MakeLinear
    from batchinfer.models.fused.spec import DecoderSpec, LayerAttention
    from batchinfer.models.load import LoadedModel
    from batchinfer_kernels.cpu import Ops


def linears(
    quantization: str, loaded: LoadedModel, spec: DecoderSpec, layers: Sequence[LayerAttention], ops: Ops
) -> MakeLinear:
    """What makes the decoder's linears under one of :data:`~batchinfer.engine.config.QUANTIZATIONS`."""
    if quantization == "int8":
        return w8a8(ops, calibrate(loaded, spec, layers, ops))
    if quantization == "int8-weight-only":
        return weight_only(ops)
    return pack(ops, loaded.dtype)


@torch.inference_mode()
def calibrate(
    loaded: LoadedModel, spec: DecoderSpec, layers: Sequence[LayerAttention], ops: Ops
) -> dict[int, torch.Tensor]:
    """Run the model on the built-in text, in its own precision and with a small cache of its own."""
    num_tokens = min(MAX_TOKENS, loaded.max_model_len)
    num_blocks = -(-num_tokens // BLOCK_MULTIPLE)
    shapes = [LayerShape(layer.num_kv_heads, layer.head_dim, layer.v_head_dim) for layer in layers]
    attention = NativeAttention(ops, shapes, num_blocks, BLOCK_MULTIPLE, loaded.dtype)

    def run(token_ids: list[int]) -> None:
        token_ids = token_ids[:num_tokens]
        span = Span(0, 0, len(token_ids), list(range(num_blocks)))
        loaded.model(
            input_ids=torch.tensor([token_ids]),
            position_ids=torch.arange(len(token_ids)).unsqueeze(0),
            use_cache=False,
            paged_context=attention.context([span], len(token_ids)),
        )

    return activation_peaks(spec, run, [loaded.tokenizer.encode(text) for text in TEXTS])
