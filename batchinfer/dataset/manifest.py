"""The manifest: what a finished output consists of."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from batchinfer.dataset.filesystem import Location
from batchinfer.dataset.layout import manifest_location
from batchinfer.dataset.staged_file import write_file
from batchinfer.errors import InputError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping

MANIFEST_VERSION = 1


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One visible file: name relative to the manifest's folder, half-open global row range, size and SHA-256 in hex."""

    name: str
    row_start: int
    row_end: int
    num_bytes: int
    sha256: str

    @property
    def num_rows(self) -> int:
        """Rows that it must have."""
        return self.row_end - self.row_start


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of ``_manifest.json``. ``job`` is free: spec, tokens, cost, versions."""

    job_id: str
    num_rows: int
    files: tuple[ManifestFile, ...]
    counts: dict[str, int]
    """Rows by status, counted from the files; every status has an entry."""
    prefix: str = ""
    input_fingerprint: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    version: int = MANIFEST_VERSION

    def to_json(self) -> str:
        """As JSON text, files one after the other."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """From :meth:`to_json`.

        Raises:
            ValueError: no manifest.
        """
        try:
            entry: Mapping[str, Any] = json.loads(text)
            files = tuple(ManifestFile(**file) for file in entry["files"])
            return cls(**{**entry, "files": files})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a manifest: {error}") from None


def write_manifest(location: Location, manifest: Manifest) -> None:
    """Write it atomically."""
    write_file(location, manifest.to_json().encode())


def read_manifest(output: str) -> Manifest:
    """Read the manifest of an output folder or ``.parquet`` file.

    Raises:
        NotFoundError: there is none: the job has not finished, or this is no output of batchinfer.
        InputError: it is damaged, or of a later version.
    """
    location = manifest_location(Location.parse(output))
    try:
        manifest = Manifest.from_json(location.read_bytes())
    except FileNotFoundError:
        raise NotFoundError(f"{output} has no manifest ({location.uri}): the job has not finished") from None
    except ValueError as error:
        raise InputError(f"the manifest {location.uri} is damaged: {error}") from None
    if manifest.version != MANIFEST_VERSION:
        raise InputError(f"the manifest {location.uri} has version {manifest.version}, not {MANIFEST_VERSION}")
    return manifest
