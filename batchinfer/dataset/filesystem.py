"""Local paths and object-store URIs behind one :class:`Location`."""

from __future__ import annotations

from dataclasses import dataclass

from pyarrow import fs as pafs


def open_filesystem(uri: str) -> tuple[pafs.FileSystem, str]:
    """Return the file system of a local path or URI (``s3://bucket/key``, ``gs://``, ``file://``) and the path inside it.

    Raises:
        InputError: the scheme is not known.
    """
    raise NotImplementedError


def is_local(uri: str) -> bool:
    """Whether ``uri`` is a path of this machine (no scheme, or ``file://``)."""
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Location:
    """One file or folder: ``uri`` as people write it, plus the file system and the path inside it."""

    uri: str
    filesystem: pafs.FileSystem
    path: str

    @classmethod
    def parse(cls, uri: str) -> Location:
        """Open the file system of ``uri``."""
        raise NotImplementedError
