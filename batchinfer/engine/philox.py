"""Counter-based random numbers: a draw is a pure function of (seed, position).

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. No state is
carried from draw to draw, so a row's numbers do not depend on the batch, the worker or what ran before.
"""

from __future__ import annotations

import torch

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox4x32(counters: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Encrypt counters ``[n, 4]`` under keys ``[n, 2]`` into random words ``[n, 4]``.

    All are int64 tensors that hold unsigned 32-bit words. A product of two words may wrap around int64, but its 64 bits
    are right, and both halves are taken from the bits.
    """
    c0, c1, c2, c3 = counters.unbind(dim=1)
    k0, k1 = keys.unbind(dim=1)
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=1)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One number of [0, 1) with 53 random bits for each pair of ``seeds [n]`` and ``positions [n]`` (int64), as float64."""
    zeros = torch.zeros_like(seeds)
    keys = torch.stack((seeds & _MASK, (seeds >> 32) & _MASK), dim=1)
    counters = torch.stack((positions & _MASK, (positions >> 32) & _MASK, zeros, zeros), dim=1)
    words = philox4x32(counters, keys)
    bits = ((words[:, 0] << 21) ^ (words[:, 1] >> 11)) & ((1 << 53) - 1)
    return bits.double() * 2.0**-53
