"""Whether one more sequence can run to its end in the pool, together with those that run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequence_


@dataclass(frozen=True, slots=True)
class Demand:
    """What a sequence will need: tokens known now, tokens still expected, steps until its prompt is computed.

    ``shared_blocks`` are those of its blocks that another demand, of a sequence ending later, counts already.
    """

    num_tokens: int
    remaining: int
    delay: int
    shared_blocks: int

    @property
    def ends_in(self) -> int:
        """Steps until it gives its blocks back."""
        return self.delay + self.remaining


def peak_blocks(demands: Sequence_[Demand], block_size: int) -> int:
    """Most blocks the demands hold at any one time.

    All sequences grow by a token a step, and memory only ever falls when one ends: so the peak is just before some
    sequence's end, and ``len(demands)`` moments are all there is to look at. Sorted by what remains, that is LightLLM's
    ``max_i(rem_i * i + sum_{j<=i} used_j)``, here in whole blocks.

    A sequence whose prompt is not computed yet ends ``delay`` steps later, but is taken to grow at once: the bound is
    never too small.
    """
    tokens = np.array([d.num_tokens for d in demands])
    remaining = np.array([d.remaining for d in demands])
    ends = np.array([d.ends_in for d in demands])
    shared = np.array([d.shared_blocks for d in demands])
    moments = ends[:, None]
    # the newest token is sampled but not computed, so it needs no slot: hence the -1
    held = tokens - 1 + np.minimum(moments, remaining)
    blocks = np.where(ends >= moments, -(-held // block_size) - shared, 0)
    return int(blocks.sum(axis=1).max())
