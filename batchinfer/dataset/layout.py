"""Where the files of a job's output lie, and how they become visible.

Order of steps, for every shard: parts are written under ``_parts/`` (hidden), ``merge_shard`` writes one hidden file
named after the attempt, the *ledger* commits it (fenced), and only then ``publish_shard`` makes it visible. So a
fenced-out writer can never touch a visible file, locally or on S3; who crashes between commit and publish is helped by
the finalizer, which publishes again (idempotent).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


class OutputLayout:
    """Paths of one job's output: a folder, or one file if ``output`` ends in ``.parquet``.

    Folder: ``shard-00012.parquet`` visible, ``_parts/`` hidden, ``_manifest.json`` and ``_SUCCESS`` at the end.
    Single file ``x.parquet``: the same inside a hidden working folder beside it, then the file and ``_x.manifest.json``.
    """

    def __init__(self, output: str, job_id: str) -> None:
        raise NotImplementedError

    @property
    def is_single_file(self) -> bool:
        """Whether the output ends as one file."""
        raise NotImplementedError

    @property
    def manifest_path(self) -> str:
        """Path or URI of the manifest."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Create the folders and claim them for this job; idempotent.

        Raises:
            ConflictError: code ``output_exists``: the place has files of something else.
        """
        raise NotImplementedError

    def part_path(self, shard_index: int, attempt_id: int, sequence: int) -> str:
        """Hidden path of a part."""
        raise NotImplementedError

    def merged_path(self, shard_index: int, attempt_id: int) -> str:
        """Hidden path of a merged shard before it is committed: this is what the ledger stores as ``result_path``."""
        raise NotImplementedError

    def shard_path(self, shard_index: int) -> str:
        """Visible path of a published shard."""
        raise NotImplementedError

    def publish_shard(self, merged_path: str) -> str:
        """Make a *committed* merged file visible; idempotent; returns the visible path."""
        raise NotImplementedError

    def publish_all(self, merged_paths: Iterable[str]) -> list[str]:
        """Publish what a crash left unpublished (finalizer); returns the visible paths.

        Raises:
            BatchInferError: a committed file is gone from both places.
        """
        raise NotImplementedError

    def sweep_garbage(self, known: Collection[str] = ()) -> int:
        """Delete hidden files that are not in ``known`` (only when no attempt is running); returns how many."""
        raise NotImplementedError
