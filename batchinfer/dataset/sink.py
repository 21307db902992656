"""Parts: the checkpoints of a running shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from batchinfer.dataset.layout import OutputLayout
    from batchinfer.dataset.schema import ResultRow, ResultSchema


@dataclass(frozen=True, slots=True)
class PartFile:
    """A written file: path or URI, rows, bytes and the SHA-256 of its content in hex."""

    path: str
    num_rows: int
    num_bytes: int
    sha256: str


class PartWriter:
    """Writes the parts of one attempt at one shard. Each part is complete, or not visible at all."""

    def __init__(self, layout: OutputLayout, schema: ResultSchema, shard_index: int, attempt_id: int) -> None:
        raise NotImplementedError

    def write(self, rows: Sequence[ResultRow]) -> PartFile:
        """Write one part (fsync, rename), rows sorted by index.

        Raises:
            ValueError: no rows, or one row index twice.
        """
        raise NotImplementedError


def read_part(path: str) -> pa.Table:
    """Read a part whole."""
    raise NotImplementedError


def iter_done_rows(paths: Iterable[str]) -> npt.NDArray[np.int64]:
    """Sorted row indexes that the parts hold (reads only that column)."""
    raise NotImplementedError
