"""Where rows lie by their keys: sorted runs on disk, searched through a memory map.

A run has up to 1,048,576 entries in three columns (upper half of the key, lower half, row), sorted by key, 24 bytes an
entry: 100 million rows are 96 runs and 2.4 GB, of which a search touches a few pages a run. Nothing in an index is
trusted: who follows an entry checks the key that the row itself carries.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Self

import numpy as np

from batchinfer.dataset.staged_file import StagedFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    import numpy.typing as npt

    from batchinfer.dataset.filesystem import Location

RUN_ROWS = 1 << 20
ENTRY_BYTES = 24
NOWHERE = -1
_COPY_BYTES = 8 << 20


def split_keys(keys: bytes) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Upper and lower halves of keys that lie one after the other."""
    pairs = np.frombuffer(keys, ">u8").astype(np.uint64).reshape(-1, 2)
    return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])


class KeyRun:
    """One sorted run."""

    def __init__(self, high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64], rows: npt.NDArray[np.int64]) -> None:
        self._high, self._low, self._rows = high, low, rows

    @classmethod
    def sort(cls, high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64], rows: npt.NDArray[np.int64]) -> Self:
        """Sort entries into a run; of several with one key the first row comes first."""
        order = np.lexsort((rows, low, high))
        return cls(high[order], low[order], rows[order])

    def find(self, high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Row of each key, :data:`NOWHERE` where there is none."""
        found = np.full(len(high), NOWHERE, np.int64)
        if not len(self._high):
            return found
        at = np.searchsorted(self._high, high)
        place = np.minimum(at, len(self._high) - 1)
        same_high = self._high[place] == high
        hit = same_high & (self._low[place] == low)
        found[hit] = self._rows[place[hit]]
        # two keys of one upper half are a curiosity, so these few are looked up one by one
        for key in np.flatnonzero(same_high & ~hit).tolist():
            end = int(np.searchsorted(self._high, high[key], side="right"))
            one = int(at[key] + np.searchsorted(self._low[at[key] : end], low[key]))
            if one < end and self._low[one] == low[key]:
                found[key] = self._rows[one]
        return found

    def tobytes(self) -> bytes:
        """The three columns."""
        return self._high.tobytes() + self._low.tobytes() + self._rows.tobytes()


class KeyIndexWriter:
    """Context manager that writes an index in bounded memory; leaves with an exception: no file."""

    def __init__(self, destination: Location) -> None:
        self._staged = StagedFile(destination)
        self._pending: list[tuple[bytes, npt.NDArray[np.int64]]] = []
        self._num_pending = 0
        self.num_rows = 0

    def add(self, keys: bytes, rows: npt.NDArray[np.int64]) -> None:
        """Add entries; ``keys`` has 16 bytes a row."""
        self._pending.append((keys, rows))
        self._num_pending += len(rows)
        self.num_rows += len(rows)
        while self._num_pending >= RUN_ROWS:
            self._flush(RUN_ROWS)

    def _flush(self, count: int) -> None:
        keys = b"".join(keys for keys, _ in self._pending)
        rows = np.concatenate([rows for _, rows in self._pending]) if self._pending else np.empty(0, np.int64)
        high, low = split_keys(keys)
        self._staged.write(KeyRun.sort(high[:count], low[:count], rows[:count]).tobytes())
        self._pending = [(keys[count * 16 :], rows[count:])] if len(rows) > count else []
        self._num_pending = max(0, len(rows) - count)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._num_pending:
            self._flush(self._num_pending)
        self._staged.__exit__(kind, error, trace)


class KeyIndex:
    """An index to search. A remote one is copied to an unlinked local file first.

    Raises:
        OSError: it is not there or cannot be read.
    """

    def __init__(self, location: Location) -> None:
        if location.is_local:
            self._bytes = np.memmap(location.path, np.uint8, "r") if location.stat().size else np.empty(0, np.uint8)
        else:
            self._bytes = _fetch(location)

    def find(self, high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Row of each key, :data:`NOWHERE` where there is none."""
        found = np.full(len(high), NOWHERE, np.int64)
        for run in self._runs():
            missing = np.flatnonzero(found == NOWHERE)
            if not len(missing):
                break
            found[missing] = run.find(high[missing], low[missing])
        return found

    def _runs(self) -> Iterator[KeyRun]:
        total = len(self._bytes) // ENTRY_BYTES
        for start in range(0, total, RUN_ROWS):
            rows = min(RUN_ROWS, total - start)
            columns = self._bytes[start * ENTRY_BYTES : (start + rows) * ENTRY_BYTES].reshape(3, rows * 8)
            yield KeyRun(columns[0].view(np.uint64), columns[1].view(np.uint64), columns[2].view(np.int64))


def _fetch(location: Location) -> npt.NDArray[np.uint8]:
    with tempfile.TemporaryFile() as file, location.open_input() as stream:
        while chunk := stream.read(_COPY_BYTES):
            file.write(chunk)
        file.flush()
        # the map keeps the unlinked file alive
        return np.memmap(file, np.uint8, "r") if file.tell() else np.empty(0, np.uint8)
