"""Which rows of a shard are still to run, one byte a row."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator


class RemainingRows:
    """Rows of ``[row_start, row_end)`` that are still to run, by global index."""

    def __init__(self, row_start: int, row_end: int, only: Iterable[int] | None = None) -> None:
        self._start = row_start
        self._flags = bytearray(row_end - row_start) if only is not None else bytearray(b"\1") * (row_end - row_start)
        for row in only or ():
            self._flags[row - row_start] = 1

    def __len__(self) -> int:
        return self._flags.count(1)

    def __contains__(self, row: object) -> bool:
        at = row - self._start if isinstance(row, int) else -1
        return 0 <= at < len(self._flags) and self._flags[at] == 1

    def __iter__(self) -> Iterator[int]:
        at = self._flags.find(1)
        while at >= 0:
            yield self._start + at
            at = self._flags.find(1, at + 1)

    def discard(self, rows: Iterable[int]) -> None:
        """Take rows out; rows that are not in it are ignored."""
        for row in rows:
            if row in self:
                self._flags[row - self._start] = 0

    def keep_first(self, count: int) -> None:
        """Take all but the first ``count`` rows out."""
        for row in islice(iter(self), count, None):
            self._flags[row - self._start] = 0

    @property
    def bounds(self) -> tuple[int, int]:
        """Smallest half-open range that covers the rows; empty if there are none."""
        first = self._flags.find(1)
        if first < 0:
            return self._start, self._start
        return self._start + first, self._start + self._flags.rfind(1) + 1

    @property
    def skip(self) -> Container[int]:
        """The complement within :attr:`bounds`, for a reader that wants to know which rows to leave out."""
        start, end = self.bounds
        return () if len(self) == end - start else SkippedRows(self)


class SkippedRows:
    """All rows that are not to run."""

    def __init__(self, remaining: RemainingRows) -> None:
        self._remaining = remaining

    def __contains__(self, row: object) -> bool:
        return row not in self._remaining
