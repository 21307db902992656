"""Measures how large a model's activations get, channel by channel, on a little text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchinfer.models.fused.spec import DecoderSpec

MAX_TOKENS = 128
"""Of one text."""


def activation_peaks(
    spec: DecoderSpec, run: Callable[[list[int]], None], texts: Sequence[list[int]]
) -> dict[int, torch.Tensor]:
    """Largest magnitude of each input channel of each projection, float32 ``[in]``, by ``id`` of its first module.

    ``run`` computes the model on one text's token ids, all of its logits included.
    """
    peaks: dict[int, torch.Tensor] = {}

    def observe(module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        rows = arguments[0].detach().flatten(0, -2).abs().amax(dim=0).float()
        before = peaks.get(id(module))
        peaks[id(module)] = rows if before is None else torch.maximum(before, rows)

    projections = [*(p for layer in spec.layers for p in layer.projections), spec.head]
    hooks = [projection.modules[0].register_forward_pre_hook(observe) for projection in projections]
    try:
        for token_ids in texts:
            run(token_ids[:MAX_TOKENS])
    finally:
        for hook in hooks:
            hook.remove()
    return peaks
