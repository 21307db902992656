"""A file under construction: hashed while it is written, visible only when it is whole."""

from __future__ import annotations

import hashlib
import os
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self, cast

from batchinfer.dataset.filesystem import fsync_folder

if TYPE_CHECKING:
    from types import TracebackType

    from batchinfer.dataset.filesystem import Location

TEMPORARY_SUFFIX = ".tmp"
_COPY_BYTES = 8 << 20


class StagedFile:
    """Context manager around the writing of one file; leaves with an exception: nothing was ever visible.

    Locally the staging file lies in the destination's folder (a rename must not cross file systems) under a name that
    begins with a dot, which every Parquet reader ignores, and that a sweep recognises.
    """

    def __init__(self, destination: Location) -> None:
        self._destination = destination
        self._hash = hashlib.sha256()
        self.num_bytes = 0
        if destination.is_local:
            target = Path(destination.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            self._staging = target.with_name(f".{target.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
            self._file: BinaryIO = self._staging.open("xb")
        else:
            # An unlinked temporary file: gone by itself if this process is killed.
            self._file = cast("BinaryIO", tempfile.TemporaryFile())  # noqa: SIM115 -- closed in __exit__

    @property
    def sha256(self) -> str:
        """Hex digest of what was written so far."""
        return self._hash.hexdigest()

    # The part of a file object's interface that pyarrow's PythonFile uses for writing.
    closed = False

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes."""
        view = memoryview(data)
        self._hash.update(view)
        self.num_bytes += view.nbytes
        self._file.write(view)
        return view.nbytes

    def tell(self) -> int:
        """Bytes written so far."""
        return self.num_bytes

    def flush(self) -> None:
        """Nothing to do: the file is flushed once, at the end."""

    def close(self) -> None:
        """Nothing to do: a Parquet writer that ends does not end the file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.publish()
        else:
            self.discard()

    def publish(self) -> None:
        """Make the file visible, or leave nothing behind."""
        try:
            self._publish()
        finally:
            self.discard()

    def discard(self) -> None:
        """Leave nothing behind; nothing to do once it is published."""
        self._file.close()
        if self._destination.is_local:
            self._staging.unlink(missing_ok=True)

    def _publish(self) -> None:
        self._file.flush()
        if not self._destination.is_local:
            self._upload()
            return
        os.fsync(self._file.fileno())
        target = Path(self._destination.path)
        self._staging.replace(target)
        fsync_folder(target.parent)

    def _upload(self) -> None:
        self._file.seek(0)
        stream = self._destination.filesystem.open_output_stream(self._destination.path)
        try:
            while chunk := self._file.read(_COPY_BYTES):
                stream.write(chunk)
            stream.close()
        except BaseException:
            # Closing publishes what was sent: take it back.
            try:
                stream.close()
            finally:
                self._destination.delete()
            raise


def write_file(destination: Location, data: bytes) -> str:
    """Write a small file atomically; return its SHA-256 in hex."""
    with StagedFile(destination) as staged:
        staged.write(data)
    return staged.sha256
