"""Reading one JSONL file in the form of an OpenAI batch: ``{custom_id, method, url, body}`` a line."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

import pyarrow as pa

from batchinfer.dataset.text import replace_surrogates
from batchinfer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from batchinfer.dataset.filesystem import Location

ROWS_PER_OFFSET = 1024
_BATCH_BYTES = 16 << 20
_BUFFER_BYTES = 1 << 20
_MAX_ERRORS = 5
_BOM = b"\xef\xbb\xbf"

BODY_ROLE = {b"batchinfer.role": b"openai_body"}
"""Field metadata by which the row reader knows a column of request bodies."""
JSONL_ID_COLUMN = "custom_id"
JSONL_SCHEMA = pa.schema(
    [
        pa.field(JSONL_ID_COLUMN, pa.large_string()),
        pa.field("method", pa.large_string()),
        pa.field("url", pa.large_string()),
        pa.field("body", pa.large_string(), metadata=BODY_ROLE),
    ]
)


@dataclass(frozen=True, slots=True)
class JsonlSummary:
    """Rows, the byte offset of every 1,024th row, and the SHA-256 of the file in hex."""

    num_rows: int
    offsets: tuple[int, ...]
    sha256: str


def inspect_jsonl(location: Location) -> JsonlSummary:
    """Read a file once, line by line, and check every line.

    Raises:
        InputError: lines that are no batch requests; the first few are named by number.
    """
    digest = hashlib.sha256()
    offsets: list[int] = []
    problems: list[str] = []
    position = num_rows = 0
    with open_lines(location) as lines:
        for number, line in enumerate(lines, start=1):
            digest.update(line)
            if not is_blank(line):
                if num_rows % ROWS_PER_OFFSET == 0:
                    offsets.append(position)
                num_rows += 1
                if problem := _problem(line):
                    problems.append(f"line {number} {problem}")
                    if len(problems) == _MAX_ERRORS:
                        break
            position += len(line)
    if problems:
        raise InputError(f"{location.uri}: {'; '.join(problems)}", code="invalid_json_line", param="inputs")
    return JsonlSummary(num_rows, tuple(offsets), digest.hexdigest())


def open_lines(location: Location) -> io.BufferedReader:
    """Open a file for reading line by line. Raises InputError."""
    try:
        # A NativeFile has the methods of a raw stream, though not its base class.
        return io.BufferedReader(cast("io.RawIOBase", location.open_input()), _BUFFER_BYTES)
    except FileNotFoundError:
        raise InputError(f"{location.uri} does not exist") from None


def is_blank(line: bytes) -> bool:
    """Whether a line holds nothing but white space (and a byte order mark)."""
    return not line.removeprefix(_BOM).strip()


def parse_line(line: bytes) -> Any:
    """The JSON of a line. Bytes that are not UTF-8 become lone surrogates, so that the row reader sees and reports them."""
    return json.loads(line.removeprefix(_BOM).decode("utf-8", "surrogateescape"))


def _problem(line: bytes) -> str | None:
    """What is wrong with a line, if anything."""
    try:
        record = parse_line(line)
    except RecursionError:
        return "is nested too deeply"
    except ValueError as error:
        return f"is not JSON ({error})"
    if not isinstance(record, dict):
        return "is not a JSON object"
    custom_id = record.get(JSONL_ID_COLUMN)
    if not isinstance(custom_id, str) or not custom_id:
        return "has no custom_id (a non-empty string)"
    if not isinstance(record.get("body"), dict):
        return "has no body (an object)"
    wrong = [key for key in ("method", "url") if not isinstance(record.get(key), str | None)]
    return f"has a {wrong[0]} that is not a string" if wrong else None


class JsonlReader:
    """One open JSONL file that :func:`inspect_jsonl` has seen. A context manager."""

    def __init__(self, location: Location, offsets: Sequence[int]) -> None:
        self._path = location.uri
        self._offsets = offsets
        self._lines = open_lines(location)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()

    def iter_batches(self, start: int, stop: int, columns: Sequence[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows ``[start, stop)`` of this file, with ``columns``."""
        self._lines.seek(self._offsets[start // ROWS_PER_OFFSET])
        schema = pa.schema([JSONL_SCHEMA.field(name) for name in columns])
        rows: list[dict[str, str | None]] = []
        num_bytes, index = 0, start - start % ROWS_PER_OFFSET
        for line in self._lines:
            if index >= stop:
                break
            if is_blank(line):
                continue
            index += 1
            if index <= start:
                continue
            rows.append(self._row(line, index - 1))
            num_bytes += len(line)
            if len(rows) == batch_rows or num_bytes >= _BATCH_BYTES:
                yield _to_batch(rows, schema)
                rows, num_bytes = [], 0
        if rows:
            yield _to_batch(rows, schema)

    def _row(self, line: bytes, index: int) -> dict[str, str | None]:
        try:
            record = parse_line(line)
            row = {name: record.get(name) for name in (JSONL_ID_COLUMN, "method", "url")}
            row = {name: value if value is None else replace_surrogates(value)[0] for name, value in row.items()}
            return {**row, "body": _dump(record["body"])}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise InputError(
                f"{self._path} changed: row {index} is no batch request ({error})", code="input_changed"
            ) from None


def _dump(body: dict[str, Any]) -> str:
    """JSON text that UTF-8 can hold: lone surrogates stay visible as escapes."""
    text = json.dumps(body, ensure_ascii=False)
    return text if text.isascii() or not replace_surrogates(text)[1] else json.dumps(body)


def _to_batch(rows: list[dict[str, str | None]], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [pa.array([row[field.name] for row in rows], field.type) for field in schema]
    if not arrays:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * len(rows), pa.struct([])))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def jsonl_weights(num_rows: int, offsets: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """Yield (rows, bytes) for each stretch between two known offsets."""
    ends = [*offsets[1:], size]
    for index, (begin, end) in enumerate(zip(offsets, ends, strict=True)):
        yield min(ROWS_PER_OFFSET, num_rows - index * ROWS_PER_OFFSET), end - begin
