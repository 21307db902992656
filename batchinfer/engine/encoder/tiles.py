"""Which texts are computed together: those of about the same length, in batches of one shape a length."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TILE_TOKENS = 512
"""Tokens of a batch, padding included, unless one text is longer."""
MAX_OVERTAKEN = 64
"""Batches after which a text that waits for others of its length is computed without them."""
_STEPS = ((128, 16), (512, 32), (2048, 128))
_LARGEST_STEP = 512

T = TypeVar("T")


class Tile(NamedTuple):
    """The shape of a batch. Two texts of one length are always computed in the same shape."""

    rows: int
    length: int
    is_full: bool = False
    """Whether its texts have no padding: only those that are as long as the model allows."""


def tile_of(num_tokens: int, max_positions: int) -> Tile:
    """The tile of a text.

    There is at least one place of padding a row, so that the attention mask is never without effect: transformers
    leaves such a mask out, and that would make a row's kernel depend on its neighbours.
    """
    if num_tokens >= max_positions:
        return Tile(max(1, TILE_TOKENS // num_tokens), num_tokens, is_full=True)
    step = next((step for limit, step in _STEPS if num_tokens < limit), _LARGEST_STEP)
    length = min((num_tokens // step + 1) * step, max_positions)
    return Tile(max(1, TILE_TOKENS // length), length)


class TileQueue(Generic[T]):
    """Items that wait, by tile. Full tiles come first; nothing waits for more than :data:`MAX_OVERTAKEN` batches."""

    def __init__(self) -> None:
        self._waiting: dict[Tile, deque[tuple[int, T]]] = {}
        self._num_batches = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[T]:
        return (item for queue in self._waiting.values() for _, item in queue)

    def put(self, tile: Tile, item: T) -> None:
        """Add one."""
        self._waiting.setdefault(tile, deque()).append((self._num_batches, item))

    def take(self) -> tuple[Tile, list[T]]:
        """The next batch: the oldest if it has waited too long, else that with the largest share of its tile filled."""
        oldest = min(self._waiting, key=lambda tile: self._waiting[tile][0][0])
        tile = oldest
        if self._num_batches - self._waiting[oldest][0][0] < MAX_OVERTAKEN:
            tile = max(self._waiting, key=lambda t: min(1.0, len(self._waiting[t]) / t.rows))
        queue = self._waiting[tile]
        batch = [queue.popleft()[1] for _ in range(min(tile.rows, len(queue)))]
        if not queue:
            del self._waiting[tile]
        self._num_batches += 1
        return tile, batch

    def discard(self, is_unwanted: Callable[[T], bool]) -> None:
        """Forget items."""
        for tile in list(self._waiting):
            kept = deque(entry for entry in self._waiting[tile] if not is_unwanted(entry[1]))
            if kept:
                self._waiting[tile] = kept
            else:
                del self._waiting[tile]
