"""Local paths and object-store URIs behind one :class:`Location`.

A file becomes visible whole or not at all: locally by fsync and rename, on an object store because an object does not
exist until its upload ends. To keep the second promise when *this* process fails in mid-write, uploads are staged in a
local temporary file first (Arrow's S3 stream publishes what it has when it is dropped).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyarrow import fs as pafs

from batchinfer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_S3_ATTEMPTS = 10


def scheme_of(uri: str) -> str | None:
    """The URI's scheme in lower case, or None for a plain path (``file://`` counts as one)."""
    match = _SCHEME.match(uri)
    scheme = match[1].lower() if match else None
    return None if scheme == "file" else scheme


def is_local(uri: str) -> bool:
    """Whether ``uri`` is a path of this machine (no scheme, or ``file://``)."""
    return scheme_of(uri) is None


def open_filesystem(uri: str) -> tuple[pafs.FileSystem, str]:
    """Return the file system of a local path or URI (``s3://bucket/key``, ``gs://``, ``file://``) and the path inside it.

    S3 follows the usual ``AWS_*`` variables, ``AWS_ENDPOINT_URL_S3`` among them.

    Raises:
        InputError: the scheme is not known.
    """
    scheme = scheme_of(uri)
    if scheme is None:
        return pafs.LocalFileSystem(), str(Path(_SCHEME.sub("", uri, count=1)).expanduser().absolute())
    if scheme == "s3":
        path = _SCHEME.sub("", uri, count=1).strip("/")
        return _s3_filesystem(path.partition("/")[0]), path
    try:
        filesystem, path = pafs.FileSystem.from_uri(uri)
    except (ValueError, OSError, NotImplementedError) as error:
        raise InputError(f"cannot open {uri!r}: {error}") from None
    return filesystem, path


def _s3_filesystem(bucket: str) -> pafs.S3FileSystem:
    """S3 as the environment describes it. The bucket's region is asked for only where nothing names one."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    options: dict[str, object] = {"retry_strategy": pafs.AwsStandardS3RetryStrategy(max_attempts=_S3_ATTEMPTS)}
    if endpoint:
        scheme, _, host = endpoint.rpartition("://")
        options |= {"endpoint_override": host.rstrip("/"), "scheme": scheme or "https"}
    if region is None and not endpoint:
        try:
            region = pafs.resolve_s3_region(bucket)
        except OSError as error:
            raise InputError(f"cannot find the region of bucket {bucket!r}: {error}; set AWS_REGION") from None
    return pafs.S3FileSystem(region=region or "us-east-1", **options)


@dataclass(frozen=True, slots=True)
class FileStat:
    """Size in bytes and modification time in nanoseconds since the epoch."""

    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Location:
    """One file or folder: ``uri`` as people write it, plus the file system and the path inside it."""

    uri: str
    filesystem: pafs.FileSystem
    path: str

    @classmethod
    def parse(cls, uri: str) -> Location:
        """Open the file system of ``uri``. A local path becomes absolute."""
        filesystem, path = open_filesystem(uri)
        return cls(path if is_local(uri) else uri, filesystem, path)

    @property
    def is_local(self) -> bool:
        """Whether it lies on this machine."""
        return isinstance(self.filesystem, pafs.LocalFileSystem)

    @property
    def name(self) -> str:
        """Last component."""
        return self.path.rstrip("/").rpartition("/")[2]

    def child(self, *names: str) -> Location:
        """A file or folder below this one."""
        tail = "/".join(names)
        return Location(f"{self.uri.rstrip('/')}/{tail}", self.filesystem, f"{self.path.rstrip('/')}/{tail}")

    @property
    def parent(self) -> Location:
        """The folder it lies in."""
        return Location(
            self.uri.rstrip("/").rpartition("/")[0], self.filesystem, self.path.rstrip("/").rpartition("/")[0]
        )

    def kind(self) -> str | None:
        """``file``, ``folder``, or None if there is nothing."""
        kind = self.filesystem.get_file_info(self.path).type
        return {pafs.FileType.File: "file", pafs.FileType.Directory: "folder"}.get(kind)

    def stat(self) -> FileStat:
        """Size and time.

        Raises:
            FileNotFoundError: it is no file.
        """
        info = self.filesystem.get_file_info(self.path)
        if not info.is_file:
            raise FileNotFoundError(self.uri)
        return FileStat(info.size, info.mtime_ns or 0)

    def open_input(self) -> pa.NativeFile:
        """Open for random access."""
        return self.filesystem.open_input_file(self.path)

    def read_bytes(self) -> bytes:
        """Read a small file whole."""
        with self.open_input() as stream:
            data: bytes = stream.read()
        return data

    def walk(self) -> Iterator[tuple[Location, FileStat]]:
        """All files below this folder, at any depth, in no particular order; nothing if the folder does not exist."""
        selector = pafs.FileSelector(self.path, recursive=True, allow_not_found=True)
        for info in self.filesystem.get_file_info(selector):
            if info.is_file:
                tail = info.path[len(self.path.rstrip("/")) :].lstrip("/")
                yield self.child(tail), FileStat(info.size, info.mtime_ns or 0)

    def make_folder(self) -> None:
        """Create the folder where folders exist; object stores need none (and may forbid the marker object)."""
        if self.is_local:
            Path(self.path).mkdir(parents=True, exist_ok=True)

    def delete(self) -> None:
        """Delete the file if it is there."""
        try:
            self.filesystem.delete_file(self.path)
        except FileNotFoundError:
            return

    def move_to(self, target: Location) -> None:
        """Replace ``target`` by this file in one step: a rename, or a server-side copy and then a delete.

        Raises:
            FileNotFoundError: this file is not there (any more).
        """
        if not self.is_local:
            self.stat()
            self.filesystem.copy_file(self.path, target.path)
            self.delete()
            return
        Path(self.path).replace(target.path)
        fsync_folder(Path(target.path).parent)


def fsync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
