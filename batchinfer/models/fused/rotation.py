"""The Hadamard rotation that spreads a row's large channels over their block (as in QuaRot, arXiv 2404.00456)."""

from __future__ import annotations

import math

import torch

MIN_ROTATION = 16


def rotation_block(columns: int, widest: int) -> int:
    """The widest block that divides the columns, up to ``widest``; 0 (no rotation) if that is less than 16."""
    block = math.gcd(columns, widest)
    return block if block >= MIN_ROTATION else 0


def rotate(weight: torch.Tensor, block: int) -> torch.Tensor:
    """``weight [out, in]`` rotated by an orthonormal Hadamard matrix in blocks of its columns."""
    if not block:
        return weight
    matrix = torch.ones(1, 1, device=weight.device)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (weight.reshape(len(weight), -1, block) @ (matrix / math.sqrt(block))).view(weight.shape)
