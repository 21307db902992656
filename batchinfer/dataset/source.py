"""The input of a job: Parquet or JSONL files seen as one sequence of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file. ``first_row`` is the global index of its first row; ``digest`` is hex over its content's ends."""

    path: str
    format: str
    num_rows: int
    first_row: int
    size: int
    mtime_ns: int
    digest: str


class InputSource:
    """Rows of all input files in order: each input in the order given, the files of a folder or glob sorted by path.

    A row's index is global, 0-based, int64. Memory stays bounded whatever the files' size.
    """

    files: tuple[InputFile, ...]
    schema: pa.Schema
    """Canonical schema over all files: text is ``large_string``, everything else as in the files."""
    num_rows: int
    warnings: tuple[str, ...]
    """One sentence each, for people: huge row groups, columns missing in some files, ..."""

    @classmethod
    def open(cls, inputs: Sequence[str], limit: int | None = None) -> InputSource:
        """Find the files, check every one and unify their schemas (what the planner does).

        Raises:
            InputError: nothing found; files that cannot be read (all are named); duplicate column names; types that
                do not fit together; malformed JSONL lines (with line numbers).
        """
        raise NotImplementedError

    @classmethod
    def reopen(cls, fingerprint: Mapping[str, Any]) -> InputSource:
        """Open the input of an earlier :meth:`fingerprint` without looking at every file again (what workers do).

        Each file is checked against the fingerprint when it is first read; new files in a folder are not seen.

        Raises:
            InputError: code ``input_changed`` (also while iterating).
        """
        raise NotImplementedError

    def fingerprint(self) -> dict[str, Any]:
        """Identity of the input, JSON-able; enough for :meth:`reopen`."""
        raise NotImplementedError

    def verify_unchanged(self, fingerprint: Mapping[str, Any]) -> None:
        """Check this input against an earlier fingerprint.

        Raises:
            InputError: code ``input_changed``, naming the file.
        """
        raise NotImplementedError

    def iter_batches(
        self,
        row_start: int = 0,
        row_end: int | None = None,
        columns: Sequence[str] | None = None,
        batch_rows: int = 1024,
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield ``(index of the batch's first row, batch)`` over the half-open range; at most ``batch_rows`` rows each.

        ``columns`` projects and orders; None is all. Batches have exactly the types of :attr:`schema`.
        """
        raise NotImplementedError

    def token_weights(self, columns: Sequence[str] | None = None) -> Iterator[tuple[int, int, int]]:
        """Yield ``(row_start, row_end, approximate bytes of the columns)`` per row group, in order, covering all rows."""
        raise NotImplementedError

    def check_ids(self, column: str) -> None:
        """Check that a column's values are unique and not null, in bounded memory.

        Raises:
            InputError: no such column; code ``duplicate_id`` with both row numbers; code ``null_id`` with the row.
        """
        raise NotImplementedError
