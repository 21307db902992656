"""Which experts each token goes to, and the tokens in the order of their experts: what the grouped products read.

Plain torch, no value is read back to the host, and ties are broken by number: the same tokens give the same routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Routing:
    """Where a step's tokens go. Pair ``token * top_k + choice`` is a token and the choice-th of its experts."""

    weights: torch.Tensor
    """float32 ``[num_tokens, top_k]``: what each answer counts, best expert first."""
    order: torch.Tensor
    """int32 ``[num_tokens * top_k]``: the pairs expert by expert, in the order of tokens within one."""
    offsets: torch.Tensor
    """int32 ``[num_experts + 1]``: expert e has the places ``offsets[e] .. offsets[e + 1]`` of ``order``."""

    def tokens(self) -> torch.Tensor:
        """The token at each place of ``order``, int32."""
        return self.order // self.weights.shape[1]

    def experts(self) -> torch.Tensor:
        """The expert at each place of ``order``, int32."""
        places = torch.arange(len(self.order), dtype=torch.int32, device=self.order.device)
        return torch.searchsorted(self.offsets[1:], places, right=True, out_int32=True)


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    scores: Scores = "softmax",
    renormalize: bool = True,
    selection_bias: torch.Tensor | None = None,
    scale: float = 1.0,
) -> Routing:
    """Send each token to ``top_k`` experts by the router's ``logits [num_tokens, num_experts]``, in float32.

    Mixtral, Qwen3-MoE (``norm_topk_prob``) and gpt-oss: the softmax's largest, divided by their sum. DeepSeek-V3 and
    GLM: ``sigmoid``, chosen by score plus ``selection_bias [num_experts]``, weighed without it, times ``scale``.
    Raises ValueError where there are fewer experts than ``top_k``.
    """
    num_experts = logits.shape[1]
    if not 0 < top_k <= num_experts:
        raise ValueError(f"top_k is {top_k}; it must be between 1 and the number of experts, {num_experts}")
    score = torch.softmax(logits.float(), dim=1) if scores == "softmax" else torch.sigmoid(logits.float())
    ranked = score if selection_bias is None else score + selection_bias
    # a stable sort: torch.topk picks any of equal scores on a GPU
    experts = ranked.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = score.gather(1, experts)
    if renormalize:
        weights = weights / weights.sum(dim=1, keepdim=True).clamp_min(1e-20)
    by_expert, order = experts.reshape(-1).sort(stable=True)
    edges = torch.arange(num_experts + 1, device=logits.device)
    offsets = torch.searchsorted(by_expert, edges)
    return Routing((weights * scale).contiguous(), order.int(), offsets.int())
