"""What every kernel must compute, in plain torch and float32 or wider.

The oracle of the tests, and what runs where there is no compiler.
"""

from __future__ import annotations

import math

import torch

MIN_ABSMAX = 1e-30
"""A row whose largest magnitude is below this is a row of zeros to the quantiser: 127 / max would overflow."""


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, weight_offset: float = 0.0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Root-mean-square norm over the last dimension times ``weight + weight_offset`` (Gemma: 1), computed in ``dtype``."""
    x = x.to(dtype)
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return x * scale * (weight.to(dtype) + weight_offset)


def act_and_mul(gate_up: torch.Tensor, activation: str, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``act(gate) * up`` of ``[..., 2 * n]``, the gate in the first half; ``activation`` is silu or gelu_tanh."""
    gate, up = gate_up.to(dtype).chunk(2, dim=-1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Rotate ``x [T, num_heads, head_dim]`` by ``cos``, ``sin [T, rotary_dim / 2]``; what is beyond rotary_dim stays.

    Pairs are ``(i, i + rotary_dim / 2)`` as in Llama, or ``(2i, 2i + 1)`` when interleaved as in GPT-J.
    """
    half = cos.shape[-1]
    rotary, rest = x[..., : 2 * half].float(), x[..., 2 * half :].float()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if interleaved:
        a, b = rotary[..., 0::2], rotary[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = rotary[..., :half], rotary[..., half:]
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((rotated, rest), dim=-1)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Causal attention of one sequence's last queries over its whole context, ``[num_queries, num_heads, v_head_dim]``.

    ``query [num_queries, num_heads, head_dim]`` are the last of the ``key [context, num_kv_heads, head_dim]`` and
    ``value [context, num_kv_heads, v_head_dim]``. A query sees ``window`` tokens, itself included. ``sinks
    [num_heads]`` are logits that take a share of the softmax and give nothing.
    """
    num_queries, num_heads, _ = query.shape
    context, group = key.shape[0], num_heads // key.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, dim=1).transpose(0, 1) for x in (key, value))
    scores = query.to(dtype).transpose(0, 1) @ k.transpose(1, 2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    at = torch.arange(context - num_queries, context).unsqueeze(1) - torch.arange(context)
    hidden = at < 0 if window is None else (at < 0) | (at >= window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(dtype).view(-1, 1, 1).expand(-1, num_queries, 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :context]
    return (weights @ v).transpose(0, 1)


def hadamard(block: int) -> torch.Tensor:
    """The orthonormal Hadamard matrix ``[block, block]`` of Sylvester's construction; ``block`` is a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < block:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    scaled: torch.Tensor = matrix * (1.0 / math.sqrt(block))
    return scaled.float()


def rotate(x: torch.Tensor, block: int) -> torch.Tensor:
    """Multiply consecutive blocks of the last dimension by the Hadamard matrix; its own inverse. 0 and 1: no rotation."""
    if block <= 1:
        return x
    rotated = x.float().reshape(-1, block) @ hadamard(block)
    return rotated.reshape(x.shape)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric INT8 with a scale a row: ``x [rows, n]`` -> int8 ``[rows, n]`` and float32 scales ``[rows]``.

    A row of zeros has scale 0. A row with inf or NaN has scale NaN, so that whatever is made of it is NaN as well.
    """
    x = x.float()
    absmax = x.abs().amax(dim=-1)
    scales = torch.where(absmax < MIN_ABSMAX, 0.0, absmax / 127)
    scales = torch.where(torch.isfinite(absmax), scales, float("nan"))
    usable = (torch.isfinite(absmax) & (absmax >= MIN_ABSMAX)).unsqueeze(-1)
    inverse = (127 / absmax).unsqueeze(-1)
    return torch.where(usable, torch.round(x * inverse), 0.0).to(torch.int8), scales
