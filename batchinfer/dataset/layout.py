"""Where the files of a job's output lie, and how they become visible.

Order of steps, for every shard: parts are written under ``_parts/`` (hidden), ``merge_shard`` writes one hidden file
named after the attempt, the *ledger* commits it (fenced), and only then ``publish_shard`` makes it visible. So a
fenced-out writer can never touch a visible file, locally or on S3; who crashes between commit and publish is helped by
the finalizer, which publishes again (idempotent).
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from batchinfer.dataset.filesystem import Location
from batchinfer.dataset.listing import JOB_MARKER
from batchinfer.dataset.staged_file import TEMPORARY_SUFFIX, write_file
from batchinfer.errors import BatchInferError, ConflictError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

PARTS_FOLDER = "_parts"
MANIFEST_NAME = "_manifest.json"
SUCCESS_NAME = "_SUCCESS"
HIDDEN_SUFFIX = ".part"
"""Not ``.parquet``: some readers, DuckDB among them, go into folders whose names begin with ``_``."""
_MERGED = re.compile(r"shard-(\d+)/merged-[^/]*\.part$")


def manifest_location(output: Location) -> Location:
    """The manifest of an output folder, or of an output file: beside it, hidden from readers of that folder."""
    if is_single_file(output.uri):
        return output.parent.child(f"_{output.name.removesuffix('.parquet')}.manifest.json")
    return output.child(MANIFEST_NAME)


def is_single_file(output: str) -> bool:
    """Whether an output path means one file."""
    return output.endswith(".parquet")


@dataclass(frozen=True, slots=True)
class BaseFile:
    """An earlier result to build on (retry): the shard's published file, or the job's single output file.

    ``first_row`` is the global row index of the file's first row (0 for a single output file).
    """

    path: str
    first_row: int


class OutputLayout:
    """Paths of one job's output: a folder, or one file if ``output`` ends in ``.parquet``.

    Folder: ``shard-00012.parquet`` visible, ``_parts/`` hidden, ``_manifest.json`` and ``_SUCCESS`` at the end.
    Single file ``x.parquet``: the same inside a hidden working folder beside it, then the file and ``_x.manifest.json``.
    """

    def __init__(self, output: str, job_id: str) -> None:
        self.job_id = job_id
        self.output = Location.parse(output)
        self.is_single_file = is_single_file(output)
        """Whether the output ends as one file."""
        hidden = f".{self.output.name}.{job_id}"
        self.folder = self.output.parent.child(hidden) if self.is_single_file else self.output
        """Where shards and parts lie."""
        self.manifest = manifest_location(self.output)
        self.success = self.folder.child(SUCCESS_NAME)
        self._parts = self.folder.child(PARTS_FOLDER)

    @property
    def manifest_path(self) -> str:
        """Path or URI of the manifest."""
        return self.manifest.uri

    @property
    def key_index(self) -> Location:
        """Index of the finished rows' keys: hidden, beside the manifest."""
        name = f"_{self.output.name.removesuffix('.parquet')}.keys.bin" if self.is_single_file else "_keys.bin"
        return self.manifest.parent.child(name)

    def prepare(self) -> None:
        """Create the folders and claim them for this job; idempotent.

        Raises:
            ConflictError: code ``output_exists``: the place has files of something else.
        """
        marker = self.folder.child(JOB_MARKER)
        if self.is_single_file:
            self._claim_file(marker)
        elif self._owner(marker) != self.job_id:
            owner = self._owner(marker)
            taken = next(iter(self.folder.walk()), None)
            if owner is not None or taken is not None:
                whose = f"job {owner}" if owner else f"files such as {taken[0].name}" if taken else "something"
                raise ConflictError(
                    f"output {self.output.uri} already holds {whose}; choose another --output or remove it",
                    param="output",
                    code="output_exists",
                )
        self._parts.make_folder()
        write_file(marker, json.dumps({"job_id": self.job_id}).encode())

    def _claim_file(self, marker: Location) -> None:
        """A single file that exists before this job has begun is somebody else's."""
        if self.output.kind() is not None and self._owner(marker) is None and self._manifest_owner() != self.job_id:
            raise ConflictError(
                f"output {self.output.uri} already exists; choose another --output or remove it",
                param="output",
                code="output_exists",
            )

    def _owner(self, marker: Location) -> str | None:
        try:
            entry: dict[str, str] = json.loads(marker.read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return entry.get("job_id")

    def _manifest_owner(self) -> str | None:
        return self._owner(self.manifest)

    def _shard_folder(self, shard_index: int) -> Location:
        return self._parts.child(f"shard-{shard_index:05d}")

    def part_path(self, shard_index: int, attempt_id: int, sequence: int) -> str:
        """Hidden path of a part."""
        return self._shard_folder(shard_index).child(f"part-{attempt_id}-{sequence:05d}{HIDDEN_SUFFIX}").uri

    def progress_path(self, shard_index: int, attempt_id: int, sequence: int) -> str:
        """Hidden path of the tokens of an attempt's unfinished rows."""
        return self._shard_folder(shard_index).child(f"progress-{attempt_id}-{sequence:05d}{HIDDEN_SUFFIX}").uri

    def merged_path(self, shard_index: int, attempt_id: int) -> str:
        """Hidden path of a merged shard before it is committed: this is what the ledger stores as ``result_path``."""
        return self._shard_folder(shard_index).child(f"merged-{attempt_id}{HIDDEN_SUFFIX}").uri

    def shard_path(self, shard_index: int) -> str:
        """Path of a published shard."""
        return self._shard(shard_index).uri

    def _shard(self, shard_index: int) -> Location:
        return self.folder.child(f"shard-{shard_index:05d}.parquet")

    def base(self, shard_index: int, row_start: int) -> BaseFile:
        """The results that a retry of a shard builds on: its visible file, or the finished single file of all shards."""
        shard = self._shard(shard_index)
        if self.is_single_file and shard.kind() is None:
            return BaseFile(self.output.uri, 0)
        return BaseFile(shard.uri, row_start)

    def publish_shard(self, merged_path: str) -> str:
        """Make a *committed* merged file visible; idempotent; returns the visible path.

        Raises:
            BatchInferError: the file is in neither place.
            ValueError: no path of :meth:`merged_path`.
        """
        match = _MERGED.search(merged_path)
        if match is None:
            raise ValueError(f"{merged_path} is no merged shard")
        visible = self._shard(int(match[1]))
        try:
            Location.parse(merged_path).move_to(visible)
        except FileNotFoundError:
            if visible.kind() != "file":
                raise BatchInferError(
                    f"committed shard {merged_path} is gone, and {visible.uri} is not there"
                ) from None
        return visible.uri

    def retract(self) -> None:
        """Take back the marks of a finished job, before a retry changes its files."""
        self.success.delete()

    def leftovers(self) -> list[Location]:
        """Files that a finished output does not need: parts, what cut-off writes left, a single file's working folder."""
        return [where for where, _ in self.folder.walk() if self.is_single_file or self._is_hidden(where)]

    def sweep_garbage(self, known: Collection[str] = (), garbage: Iterable[Location] | None = None) -> int:
        """Delete leftovers (by default those of now) that are not in ``known``, and folders that are empty then.

        Only when no attempt is running. A list taken earlier makes it safe even for a sweeper that was asleep: what a
        later retry wrote is not on it. Returns how many files were deleted.
        """
        doomed = [where for where in (self.leftovers() if garbage is None else garbage) if where.uri not in known]
        for where in doomed:
            where.delete()
        hidden = self.folder if self.is_single_file else self._parts
        if self.folder.is_local:
            _remove_empty_folders(Path(hidden.path))
        elif doomed and next(hidden.walk(), None) is None:
            # Arrow leaves an object in place of each folder that a deletion empties.
            hidden.filesystem.delete_dir(hidden.path)
        return len(doomed)

    def _is_hidden(self, where: Location) -> bool:
        """Under ``_parts/``, or left over from a write that was cut off."""
        is_temporary = where.name.startswith(".") and where.name.endswith(TEMPORARY_SUFFIX)
        return is_temporary or where.path.startswith(self._parts.path + "/")


def _remove_empty_folders(top: Path) -> None:
    for folder, _, _ in os.walk(top, topdown=False):
        # Not empty, or gone already: then it is not ours to remove.
        with suppress(OSError):
            Path(folder).rmdir()
