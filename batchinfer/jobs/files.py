"""Files that clients upload and fetch: bytes in a folder or an object store, the rest in the ledger."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from batchinfer.errors import InputError, InvalidSpecError, TooLargeError
from batchinfer.jobs.ids import new_id
from batchinfer.jobs.ledger_files import FileRecord, attach_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection

    from batchinfer.jobs.caller import Caller
    from batchinfer.jobs.ledger import Ledger
    from batchinfer.jobs.spec import JobSpec

BATCH = "batch"
INPUT = "input"
BATCH_OUTPUT = "batch_output"
UPLOAD_PURPOSES = (BATCH, INPUT)
MAX_LINE_BYTES = 16 * 2**20
"""Longest line of a batch file: lines are read whole."""
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 86400
_FILE_ID = re.compile(r"file-[\w-]{1,35}", re.ASCII)
_SUFFIX = re.compile(r"\.(parquet|parq|pq|jsonl|ndjson)$", re.IGNORECASE)
_CHUNK_BYTES = 1 << 20


def is_file_id(text: str) -> bool:
    """Whether ``text`` can be the id of a stored file."""
    return _FILE_ID.fullmatch(text) is not None


class FileStore:
    """Stored files of all tenants under one ``root``: a local folder or a URI such as ``s3://bucket/prefix``.

    The root must be where workers can read it as well.
    """

    def __init__(self, ledger: Ledger, root: str, *, max_bytes: int) -> None:
        self._ledger = ledger
        self.root = root.rstrip("/")
        self.max_bytes = max_bytes

    def receive(self, filename: str) -> Upload:
        """Begin to take a file in."""
        name = filename.replace("\\", "/").rpartition("/")[2][:200] or "file"
        file_id = new_id("file-")
        suffix = _SUFFIX.search(name)
        location = f"{self.root}/uploads/{file_id}{suffix[0].lower() if suffix else ''}"
        return Upload(self, file_id, name, location, self.max_bytes)

    def add(self, file: FileRecord, *, expires_after_s: int | None) -> FileRecord:
        """Let an uploaded file be known."""
        return self._ledger.add_file(file, expires_after_s=expires_after_s)

    def get(self, caller: Caller, file_id: str) -> FileRecord:
        """Raises NotFoundError."""
        return self._ledger.get_file(caller, file_id)

    def list(
        self, caller: Caller, *, purpose: str | None = None, sha256: str | None = None, limit: int = 20,
        after: str | None = None, is_ascending: bool = False,
    ) -> tuple[list[FileRecord], bool]:  # fmt: skip
        """A page, and whether there are more. Raises NotFoundError if ``after`` is no file."""
        if after is not None:
            self._ledger.get_file(caller, after)
        found = self._ledger.list_files(
            caller, purpose=purpose, sha256=sha256, limit=limit + 1, after=after, is_ascending=is_ascending
        )
        return found[:limit], len(found) > limit

    def read(self, caller: Caller, file_id: str) -> tuple[FileRecord, Iterator[bytes]]:
        """A file and its bytes, in chunks of 1 MiB. Raises NotFoundError, InputError."""
        file = self._ledger.get_file(caller, file_id)
        return file, read_chunks(file.location)

    def delete(self, caller: Caller, file_id: str) -> None:
        """Delete a file. Raises NotFoundError, ConflictError (``file_in_use``)."""
        remove_bytes(self._ledger.delete_file(caller, file_id).location)

    def use_inputs(
        self, caller: Caller, spec: JobSpec, job_id: str
    ) -> tuple[JobSpec, Callable[[Connection, str], None]]:
        """Put the places of stored files where a spec's inputs name their ids, and the output under the root.

        Also gives what is to be written with the job (see :meth:`Ledger.submit`).

        Raises:
            NotFoundError: no such file.
        """
        ids = [path for path in spec.inputs if is_file_id(path)]
        places = {file_id: self._ledger.get_file(caller, file_id).location for file_id in ids}
        if not ids:
            return spec, partial(attach_files, file_ids=ids)
        changed = {
            "inputs": tuple(places.get(path, path) for path in spec.inputs),
            "output": spec.output or self.results_of(job_id),
        }
        return spec.model_copy(update=changed), partial(attach_files, file_ids=ids)

    def results_of(self, job_id: str) -> str:
        """Where the results of a job go whose input was uploaded."""
        return f"{self.root}/results/{job_id}"


class Upload:
    """A file that arrives. Nothing is visible before :meth:`finish`; :meth:`abandon` leaves nothing behind.

    Memory stays at one chunk: bytes go to a staging file, on an object store to a local temporary one.
    """

    def __init__(self, store: FileStore, file_id: str, filename: str, location: str, max_bytes: int) -> None:
        from batchinfer.dataset.filesystem import Location  # noqa: PLC0415 -- pyarrow loads when a file arrives
        from batchinfer.dataset.staged_file import StagedFile  # noqa: PLC0415 -- pyarrow loads when a file arrives

        self._store, self._id, self._filename = store, file_id, filename
        self._location, self._max_bytes = location, max_bytes
        self._staged = StagedFile(Location.parse(location))
        self._line_bytes = self._longest_line = 0

    def write(self, data: bytes) -> None:
        """Append a chunk. Raises TooLargeError."""
        if self._staged.num_bytes + len(data) > self._max_bytes:
            raise TooLargeError(
                f"the file is larger than {self._max_bytes} bytes; split it, or raise BATCHINFER_MAX_FILE_BYTES",
                param="file",
                code="file_too_large",
            )
        self._staged.write(data)
        for start in range(0, len(data), _CHUNK_BYTES):
            self._measure_lines(data[start : start + _CHUNK_BYTES])

    def _measure_lines(self, data: bytes) -> None:
        first, last = data.find(b"\n"), data.rfind(b"\n")
        if first < 0:
            self._line_bytes += len(data)
        else:
            # lines that lie within one chunk are shorter than the limit by themselves
            self._longest_line = max(self._longest_line, self._line_bytes + first)
            self._line_bytes = len(data) - last - 1
        self._longest_line = max(self._longest_line, self._line_bytes)

    def finish(self, tenant_id: str, purpose: str, *, expires_after_s: int | None = None) -> FileRecord:
        """Publish the file.

        Raises:
            InvalidSpecError: the purpose or the expiry is not one that is taken, or the file is empty.
            TooLargeError: a line of a batch file is longer than :data:`MAX_LINE_BYTES`.
        """
        if purpose not in UPLOAD_PURPOSES:
            raise InvalidSpecError(
                f"purpose {purpose[:40]!r} is not taken: 'batch' is for request lines, 'input' for prompts",
                param="purpose",
            )
        if expires_after_s is not None and not MIN_EXPIRY_S <= expires_after_s <= MAX_EXPIRY_S:
            raise InvalidSpecError(
                f"expires_after.seconds is {MIN_EXPIRY_S} to {MAX_EXPIRY_S}, got {expires_after_s}",
                param="expires_after",
            )
        if not self._staged.num_bytes:
            raise InvalidSpecError("the file is empty", param="file", code="empty_file")
        if purpose == BATCH and self._longest_line > MAX_LINE_BYTES:
            raise TooLargeError(f"a line is longer than {MAX_LINE_BYTES} bytes", param="file", code="line_too_long")
        self._staged.publish()
        file = FileRecord(
            self._id, tenant_id, self._filename, purpose, self._staged.num_bytes, self._staged.sha256, self._location
        )
        return self._store.add(file, expires_after_s=expires_after_s)

    def abandon(self) -> None:
        """Leave nothing behind."""
        self._staged.discard()


def read_chunks(location: str) -> Iterator[bytes]:
    """The bytes of a file; it is opened before the first chunk is asked for.

    Raises:
        InputError: it cannot be read from this machine.
    """
    from batchinfer.dataset.filesystem import Location  # noqa: PLC0415 -- pyarrow loads when a file is read

    try:
        stream = Location.parse(location).open_input()
    except OSError as error:
        raise InputError(f"the file cannot be read from this machine: {error}") from None

    def chunks() -> Iterator[bytes]:
        with stream:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk

    return chunks()


def remove_bytes(location: str) -> None:
    """Delete what lies at a place, if it is there. Raises OSError."""
    from batchinfer.dataset.filesystem import Location  # noqa: PLC0415 -- pyarrow loads when a file is removed

    Location.parse(location).delete()
