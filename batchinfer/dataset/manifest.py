"""The manifest: what a finished output consists of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchinfer.dataset.layout import OutputLayout


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One visible file: name relative to the manifest's folder, half-open global row range, size and SHA-256."""

    name: str
    row_start: int
    row_end: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of ``_manifest.json``. ``job`` is free: spec, counts, tokens, cost, versions."""

    job_id: str
    num_rows: int
    files: tuple[ManifestFile, ...]
    counts: dict[str, int]
    """Rows by status, counted from the files."""
    prefix: str = ""
    input_fingerprint: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    version: int = 1


def finalize_output(
    layout: OutputLayout,
    shards: Sequence[ShardResultFile],
    *,
    num_rows: int,
    prefix: str = "",
    input_fingerprint: Mapping[str, Any] | None = None,
    job: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Manifest:
    """Finish an output whose shards are all committed; idempotent.

    Publishes what is not published yet, writes the single file if asked for, counts statuses, sweeps garbage, writes the
    manifest and ``_SUCCESS`` (in this order).

    Raises:
        BatchInferError: a committed file is gone or does not have its rows.
    """
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ShardResultFile:
    """A committed shard as the ledger knows it: index, row range and the committed ``result_path``, bytes and hash."""

    index: int
    row_start: int
    row_end: int
    path: str
    num_bytes: int
    sha256: str


def read_manifest(output: str) -> Manifest:
    """Read the manifest of an output folder or ``.parquet`` file.

    Raises:
        NotFoundError: there is none: the job has not finished, or this is no output of batchinfer.
    """
    raise NotImplementedError
