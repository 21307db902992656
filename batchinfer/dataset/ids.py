"""Duplicate ids, found in bounded memory."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from batchinfer.dataset.input_schema import is_bytes, is_string, logical_type
from batchinfer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

# 128 bits of BLAKE2b: among a billion different ids two share a digest with a chance of about 10**-21.
_RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("row", "<i8")])
_ROWS_PER_PARTITION = 1 << 18
_MAX_PARTITIONS = 256


def check_unique(batches: Iterable[tuple[int, pa.RecordBatch]], column: str, num_rows: int) -> None:
    """Check that a one-column stream of batches has no value twice and no null.

    Digests are spread over partitions by their top bits, on disk beyond 262,144 rows; a duplicate's two digests meet
    in one partition, which is sorted alone (6 MiB, and as much again a few times while it is sorted).

    Raises:
        InputError: code ``duplicate_id`` (the pair whose second row comes first), code ``null_id``, or a nested column.
    """
    num_partitions = min(_MAX_PARTITIONS, max(1, -(-num_rows // _ROWS_PER_PARTITION)))
    with tempfile.TemporaryDirectory(prefix="batchinfer-ids-") as folder:
        partitions = _Partitions(Path(folder), num_partitions)
        try:
            for first_row, batch in batches:
                partitions.add(_records(batch.column(0), column, first_row))
            pairs = [pair for records in partitions.read() if (pair := _first_duplicate(records))]
        finally:
            partitions.close()
    if pairs:
        first, second = min(pairs, key=lambda pair: pair[1])
        raise DuplicateIdError(column, first, second)


class DuplicateIdError(InputError):
    """Two rows (counted from 0) have one id."""

    code = "duplicate_id"

    def __init__(self, column: str, first_row: int, second_row: int) -> None:
        super().__init__(
            f"id column {column!r} has the same value in rows {first_row} and {second_row} (counted from 0); "
            "ids must be unique",
            param="id_column",
        )
        self.first_row, self.second_row = first_row, second_row


def _records(array: pa.Array, column: str, first_row: int) -> npt.NDArray[Any]:
    """Digest and row number of each value."""
    kind = logical_type(array.type)
    if pa.types.is_nested(kind):
        raise InputError(f"id column {column!r} is {array.type}; an id must be text or a number", param="id_column")
    if array.null_count:
        row = first_row + int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        raise InputError(
            f"id column {column!r} is null in row {row} (counted from 0)", param="id_column", code="null_id"
        )
    digests = b"".join(hashlib.blake2b(value, digest_size=16).digest() for value in _values_as_bytes(array, kind))
    records = np.empty(len(array), _RECORD)
    halves = np.frombuffer(digests, "<u8").reshape(-1, 2)
    records["high"], records["low"] = halves[:, 0], halves[:, 1]
    records["row"] = np.arange(first_row, first_row + len(array))
    return records


def _values_as_bytes(array: pa.Array, kind: pa.DataType) -> Iterator[bytes]:
    storage = array.storage if isinstance(array, pa.ExtensionArray) else array
    plain = storage.dictionary_decode() if pa.types.is_dictionary(storage.type) else storage
    if is_string(kind) or is_bytes(kind) or pa.types.is_fixed_size_binary(kind):
        values: list[bytes] = plain.cast(pa.large_binary()).to_pylist()
        yield from values
        return
    # Times are compared as the integers that they are (their text would need a time-zone table); the text of other
    # values is exact in Arrow's own cast.
    steps = [pa.int32() if kind.bit_width == 32 else pa.int64()] if pa.types.is_temporal(kind) else []
    for step in [*steps, pa.large_string()]:
        plain = plain.cast(step)
    for value in plain.to_pylist():
        yield value.encode()


class _Partitions:
    """Records spread by digest: one partition stays in memory, more go to files."""

    def __init__(self, folder: Path, count: int) -> None:
        self._memory: list[npt.NDArray[Any]] = []
        self._count = count
        self._files = [(folder / str(i)).open("w+b") for i in range(count)] if count > 1 else []

    def add(self, records: npt.NDArray[Any]) -> None:
        if not self._files:
            self._memory.append(records)
            return
        target = records["high"] % self._count
        order = np.argsort(target, kind="stable")
        bounds = np.searchsorted(target[order], np.arange(self._count + 1))
        for index, file in enumerate(self._files):
            chunk = records[order[bounds[index] : bounds[index + 1]]]
            if len(chunk):
                file.write(chunk.tobytes())

    def read(self) -> Iterator[npt.NDArray[Any]]:
        if self._memory:
            yield np.concatenate(self._memory)
        for file in self._files:
            file.flush()
            file.seek(0)
            yield np.frombuffer(file.read(), _RECORD)

    def close(self) -> None:
        for file in self._files:
            file.close()


def _first_duplicate(records: npt.NDArray[Any]) -> tuple[int, int] | None:
    """The pair of rows with one digest whose second row is least."""
    ordered = records[np.lexsort((records["row"], records["low"], records["high"]))]
    same = (ordered["high"][1:] == ordered["high"][:-1]) & (ordered["low"][1:] == ordered["low"][:-1])
    if not same.any():
        return None
    seconds = np.where(same, ordered["row"][1:], np.iinfo(np.int64).max)
    at = int(np.argmin(seconds))
    return int(ordered["row"][at]), int(ordered["row"][at + 1])
