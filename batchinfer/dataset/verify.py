"""Proof, from the manifest and the files alone, that every input row has exactly one outcome."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from batchinfer.dataset.filesystem import Location
from batchinfer.dataset.layout import is_single_file, manifest_location
from batchinfer.dataset.manifest import read_manifest
from batchinfer.dataset.schema import STOPPED_AT
from batchinfer.dataset.stage_columns import stops_table
from batchinfer.dataset.verify_file import check_file
from batchinfer.dataset.verify_input import compare_with_input
from batchinfer.types import RowStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchinfer.dataset.manifest import Manifest


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was found. ``problems`` is empty if and only if the output is whole; each is one sentence."""

    output: str
    job_id: str
    num_files: int
    num_rows: int
    counts: dict[str, int]
    input_checked: bool
    """Whether the input was still there, unchanged, and its columns were compared row by row."""
    problems: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(output: str, *, check_input: bool = True) -> VerifyReport:
    """Verify an output folder or ``.parquet`` file, streaming in bounded memory.

    Checked are: the row ranges of the manifest tile the input; every file is there with its size, hash and rows, each
    row index once and in order; statuses are known and add up; no other file would be read along with them; and, where
    the input is still as it was, that each row's own columns are those of the input.

    Raises:
        NotFoundError: there is no manifest.
        InputError: the manifest is damaged.
    """
    manifest = read_manifest(output)
    location = Location.parse(output)
    folder = manifest_location(location).parent
    problems = list(_ranges(manifest))
    if not is_single_file(location.uri):
        problems += _strangers(folder, manifest)
    counts: Counter[str] = Counter({status.value: 0 for status in RowStatus})
    stops: Counter[tuple[str, str]] = Counter()
    has_stages = STOPPED_AT in manifest.job
    whole_files = []
    for entry in manifest.files:
        found = check_file(folder.child(entry.name), entry, manifest.prefix, has_stages=has_stages)
        problems += found.problems
        counts.update(found.counts)
        stops.update(found.stops)
        if found.has_all_rows:
            whole_files.append((entry, folder.child(entry.name)))
    if counts != Counter(manifest.counts):  # an older manifest does not have every status
        problems.append(f"the files have {_words(counts)}, but the manifest says {_words(manifest.counts)}")
    if has_stages and stops_table(stops) != manifest.job[STOPPED_AT]:
        problems.append(f"rows ended at stages {stops_table(stops)}, but the manifest says {manifest.job[STOPPED_AT]}")
    input_checked = False
    if check_input:
        input_checked, more = compare_with_input(manifest, whole_files)
        problems += more
    return VerifyReport(
        output=location.uri,
        job_id=manifest.job_id,
        num_files=len(manifest.files),
        num_rows=manifest.num_rows,
        counts=dict(counts),
        input_checked=input_checked,
        problems=tuple(problems),
    )


def _ranges(manifest: Manifest) -> Iterator[str]:
    """The files' ranges must follow each other from row 0 to the last."""
    files = sorted(manifest.files, key=lambda file: file.row_start)
    ends = [0, *(file.row_end for file in files)]
    starts = [*(file.row_start for file in files), manifest.num_rows]
    for end, start in zip(ends, starts, strict=True):
        if start > end:
            yield f"no file of the manifest has the rows {end} to {start - 1}"
        elif start < end:
            yield f"two files of the manifest have the rows {start} to {end - 1}"
    for left, right in pairwise(sorted(file.name for file in files)):
        if left == right:
            yield f"the manifest lists {left} twice"


def _strangers(folder: Location, manifest: Manifest) -> Iterator[str]:
    """Files that readers of the folder would read along with ours."""
    known = {file.name for file in manifest.files}
    for where, _ in folder.walk():
        tail = where.path[len(folder.path.rstrip("/")) + 1 :]
        hidden = any(part.startswith(("_", ".")) for part in tail.split("/"))
        if not hidden and tail not in known:
            yield f"{tail} is not in the manifest: who reads the folder reads it too"


def _words(counts: Counter[str] | dict[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items()) if count) or "no rows"
