"""One input file: how it is recognised again, and which reader reads it."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from batchinfer.dataset.filesystem import Location
from batchinfer.dataset.jsonl_source import JsonlReader, inspect_jsonl, jsonl_weights
from batchinfer.dataset.parquet_source import ParquetReader, inspect_parquet
from batchinfer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa

    from batchinfer.dataset.listing import FoundFile

# Up to this size a Parquet file is hashed whole; beyond, its head and its tail (with the footer) are, and its
# modification time counts too.
_WHOLE_BYTES = 4 << 20
_HEAD_BYTES = 64 << 10
_TAIL_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file. ``first_row`` is the global index of its first row.

    ``digest`` is SHA-256 in hex: of the whole content for JSONL and small Parquet files, else of head and tail.
    ``offsets`` is JSONL's index: the byte offset of every 1,024th row.
    """

    path: str
    format: str
    num_rows: int
    first_row: int
    size: int
    mtime_ns: int
    digest: str
    offsets: tuple[int, ...] = ()

    @property
    def end_row(self) -> int:
        """Global index after its last row."""
        return self.first_row + self.num_rows

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self) | {"offsets": list(self.offsets)}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> InputFile:
        """From :meth:`to_json`."""
        return cls(**{**entry, "offsets": tuple(entry["offsets"])})

    def check_unchanged(self) -> None:
        """Compare the file as it is now.

        A new modification time alone is no change where the whole content was hashed (a copy, a ``touch``).

        Raises:
            InputError: code ``input_changed``.
        """
        location = Location.parse(self.path)
        try:
            now = location.stat()
        except OSError:
            raise _changed(self.path, "it is gone") from None
        if now.size != self.size:
            raise _changed(self.path, f"it had {self.size:,} bytes and now has {now.size:,}")
        touched = now.mtime_ns != self.mtime_ns
        if self.format == "parquet":
            if touched and self.size > _WHOLE_BYTES:
                raise _changed(self.path, "it was written again")
            same = parquet_digest(location, self.size) == self.digest
        else:
            same = not touched or _sha256(location, 0, self.size).hexdigest() == self.digest
        if not same:
            raise _changed(self.path, "its content differs")

    def weights(self, columns: Sequence[str] | None) -> Iterator[tuple[int, int]]:
        """Yield (rows, approximate bytes of the columns) of each stretch of rows."""
        if self.format == "jsonl":
            yield from jsonl_weights(self.num_rows, self.offsets, self.size)
            return
        with ParquetReader(Location.parse(self.path)) as reader:
            yield from reader.weights(columns)


def _changed(path: str, how: str) -> InputError:
    return InputError(
        f"input {path} changed since the job was planned: {how}; submit it as a new job", code="input_changed"
    )


def open_reader(file: InputFile) -> ParquetReader | JsonlReader:
    """Open the reader of its format."""
    location = Location.parse(file.path)
    return JsonlReader(location, file.offsets) if file.format == "jsonl" else ParquetReader(location)


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was learnt of a file at planning: either ``problem`` or everything else is set; JSONL has no ``schema``."""

    path: str
    problem: InputError | None
    schema: pa.Schema | None = None
    warnings: tuple[str, ...] = ()
    entry: InputFile | None = None

    def file(self, first_row: int) -> InputFile:
        """The file's entry, placed at its global row."""
        if self.entry is None:
            raise ValueError(f"{self.path} was not readable")
        return InputFile.from_json(self.entry.to_json() | {"first_row": first_row})


def inspect_file(found: FoundFile) -> Inspection:
    """Look at one file; a bad one is reported, so that all bad ones can be named together."""
    path = found.location.uri
    try:
        return _inspect(found)
    except InputError as error:
        return Inspection(path, error)
    except OSError as error:
        return Inspection(path, InputError(f"{path} cannot be read: {error}"))


def _inspect(found: FoundFile) -> Inspection:
    location, stat = found.location, found.stat
    path = location.uri
    if found.format == "jsonl":
        lines = inspect_jsonl(location)
        entry = InputFile(path, "jsonl", lines.num_rows, 0, stat.size, stat.mtime_ns, lines.sha256, lines.offsets)
        return Inspection(path, None, entry=entry)
    if stat.size == 0:
        raise InputError(f"{path} is empty (0 bytes): no Parquet file; write it again or remove it")
    summary = inspect_parquet(location)
    digest = parquet_digest(location, stat.size)
    entry = InputFile(path, "parquet", summary.num_rows, 0, stat.size, stat.mtime_ns, digest)
    return Inspection(path, None, summary.schema, tuple(summary.warnings), entry)


def parquet_digest(location: Location, size: int) -> str:
    """Digest of a Parquet file: whole if small, else head and tail."""
    if size <= _WHOLE_BYTES:
        return _sha256(location, 0, size).hexdigest()
    digest = _sha256(location, 0, _HEAD_BYTES)
    digest.update(_sha256(location, size - _TAIL_BYTES, _TAIL_BYTES).digest())
    return digest.hexdigest()


def _sha256(location: Location, start: int, num_bytes: int) -> hashlib._Hash:
    digest = hashlib.sha256()
    with location.open_input() as stream:
        stream.seek(start)
        while num_bytes > 0 and (chunk := stream.read(min(num_bytes, _CHUNK_BYTES))):
            digest.update(chunk)
            num_bytes -= len(chunk)
    return digest
