"""Whether one more sequence can run to its end in the pool, together with those that run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as Sequence_

    from numpy.typing import NDArray

    from batchinfer.engine.block_pool import BlockPool
    from batchinfer.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Demand:
    """What a sequence will need: tokens known now, tokens still expected, steps until its prompt is computed.

    ``shared_blocks`` are those of its blocks that are counted elsewhere.
    """

    num_tokens: int
    remaining: int
    delay: int
    shared_blocks: int


def peak_blocks(demands: Sequence_[Demand], block_size: int) -> int:
    """Most blocks the demands hold at any one time; see :func:`peak_of`."""
    return peak_of(
        np.array([d.num_tokens for d in demands]) - 1,
        np.array([d.remaining + d.delay for d in demands]),
        np.array([d.shared_blocks for d in demands]),
        block_size,
    )


def peak_of(held: NDArray[np.int64], ends: NDArray[np.int64], shared: NDArray[np.int64], block_size: int) -> int:
    """Most blocks held at any one time by sequences that hold ``held`` tokens and grow by one a step until they end.

    Memory only ever falls when one ends: so the peak is just before some sequence's end, and ``n`` moments are all
    there is to look at. Sorted by what remains, that is LightLLM's ``max_i(rem_i * i + sum_{j<=i} used_j)``, here in
    whole blocks. How many blocks a sequence has begun at a moment depends on its length only through the quotient,
    which adds up, and the rest, of which there are ``block_size``: hence O(n * block_size) and not O(n * n).

    A sequence whose prompt is still to be computed ends some steps later, but is taken to grow at once and until
    then: the bound is never too small.
    """
    order = np.argsort(-ends, kind="stable")
    moments = ends[order]
    whole, rest = np.divmod(held[order], block_size)
    rests = np.arange(block_size)
    alive = np.cumsum(rest[:, None] == rests, axis=0)
    begun = -(-(rests + moments[:, None]) // block_size)
    blocks = np.cumsum(whole - shared[order]) + np.einsum("ij,ij->i", alive, begun)
    return int(blocks.max())


class Forecast:
    """The blocks that running sequences will hold, by the estimate, and whether a candidate fits beside them.

    Blocks with several holders are counted once and for as long as anyone runs.
    """

    def __init__(
        self, pool: BlockPool, running: Iterable[Sequence], estimate: Callable[[Sequence], int], budget: int
    ) -> None:
        """``budget`` is the most tokens of a step."""
        self._pool = pool
        self._estimate = estimate
        self._budget = budget
        self._prefill = 0
        rows = [self._row(sequence) for sequence in running]
        self._count = len(rows)
        self._rows = np.zeros((len(rows) + 16, 4), dtype=np.int64)
        if rows:
            self._rows[: len(rows)] = rows

    def admit(self, candidate: Sequence) -> bool:
        """Whether the candidate fits; from then on it is one of the running ones. It holds the prefix it found."""
        if self._count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        before = self._prefill
        self._rows[self._count] = self._row(candidate)
        rows = self._rows[: self._count + 1]
        size = self._pool.block_size
        a_step = max(1, self._budget - len(rows) - size + 1)
        delay = -(-self._prefill // a_step)
        peak = peak_of(rows[:, 0] - 1, rows[:, 1] + rows[:, 3] * delay, rows[:, 2], size)
        fits = peak + self._pool.num_shared <= self._pool.num_blocks
        if fits:
            self._count += 1
        else:
            self._prefill = before
        return fits

    def _row(self, sequence: Sequence) -> tuple[int, int, int, bool]:
        """Tokens, tokens to come, leading blocks that others hold too, whether the prompt is still to be computed."""
        uncomputed = sequence.num_uncomputed_tokens
        is_prefill = uncomputed > 1
        self._prefill += uncomputed if is_prefill else 0
        shared = self._pool.num_shared_of(sequence.block_table)
        return sequence.num_tokens, self._estimate(sequence), shared, is_prefill
