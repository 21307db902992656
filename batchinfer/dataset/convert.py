"""OpenAI batch files and Parquet, either from the other, without loss: values as they are written, line by line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batchinfer.dataset.json_members import in_one_line, members, object_of
from batchinfer.dataset.jsonl_source import BODY_ROLE, JSONL_SCHEMA, is_blank, open_lines
from batchinfer.dataset.openai_results import LineContext, WrittenFile, write_lines
from batchinfer.dataset.parquet_source import ParquetReader
from batchinfer.dataset.prompt import PromptConfig, RowReader
from batchinfer.dataset.row_groups import RowGroupWriter
from batchinfer.dataset.schema import own_metadata
from batchinfer.dataset.staged_file import StagedFile
from batchinfer.errors import InputError
from batchinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchinfer.dataset.filesystem import Location

_BATCH_ROWS = 512
_BATCH_BYTES = 16 << 20
EXTRA = "extra"
REQUESTS_SCHEMA = JSONL_SCHEMA.append(pa.field(EXTRA, pa.large_string()))
"""Request lines as rows: ``body`` is JSON text as written, ``extra`` an object of all members that no column can hold."""
_STRINGS = ("custom_id", "method", "url")
_RESULT = frozenset({"row_index", "status", "output", "finish_reason", "error", "usage"})


def requests_to_parquet(source: Location, target: Location, progress: Callable[[int], None]) -> int:
    """Write a file of request lines as Parquet; the number of rows. A job reads the result like the lines.

    Raises:
        InputError: a line is no JSON object in UTF-8; the message has its number.
    """
    with RowGroupWriter(target, REQUESTS_SCHEMA) as writer, open_lines(source) as lines:
        rows: list[dict[str, str | None]] = []
        num_bytes = 0
        for number, line in enumerate(lines, start=1):
            if is_blank(line):
                continue
            rows.append(_row(line, f"{source.uri}, line {number}"))
            num_bytes += len(line)
            if len(rows) == _BATCH_ROWS or num_bytes >= _BATCH_BYTES:
                writer.write(pa.RecordBatch.from_pylist(rows, schema=REQUESTS_SCHEMA))
                progress(writer.num_rows)
                rows, num_bytes = [], 0
        if rows:
            writer.write(pa.RecordBatch.from_pylist(rows, schema=REQUESTS_SCHEMA))
    return writer.num_rows


def _row(line: bytes, where: str) -> dict[str, str | None]:
    try:
        parts = members(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 (byte {error.start})", param="inputs") from None
    except ValueError as error:
        raise InputError(f"{where}: {error}", param="inputs") from None
    row: dict[str, str | None] = {name: _string(parts, name) for name in _STRINGS}
    row["body"] = parts.pop("body") if parts.get("body", "").startswith("{") else None
    row[EXTRA] = object_of(parts) if parts else None
    return row


def _string(parts: dict[str, str], name: str) -> str | None:
    """Take a member out if it is text that a column can hold; anything else stays."""
    if not parts.get(name, "").startswith('"'):
        return None
    value: str = json.loads(parts[name])
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    del parts[name]
    return value


def is_requests(schema: pa.Schema) -> bool:
    """Whether a Parquet file has request lines (written by :func:`requests_to_parquet`)."""
    return any((field.metadata or {}).items() >= BODY_ROLE.items() for field in schema) and EXTRA in schema.names


def is_results(schema: pa.Schema) -> bool:
    """Whether a Parquet file has a job's results."""
    return set(schema.names) >= _RESULT


def parquet_to_requests(
    source: Location, target: Location, progress: Callable[[int], None], *, model: str | None, id_column: str | None
) -> int:
    """Write Parquet as request lines; the number of rows. Rows of prompts or messages need a ``model``.

    Raises:
        InputError: a column has no place in a request, a row cannot become one, or the file cannot be read.
    """
    with ParquetReader(source) as reader, StagedFile(target) as staged:
        lines = _lines(reader) if is_requests(reader.schema) else _made_lines(reader, model, id_column)
        count = 0
        for line in lines:
            staged.write(line.encode() + b"\n")
            count += 1
            if count % _BATCH_ROWS == 0:
                progress(count)
    return count


def _lines(reader: ParquetReader) -> Iterator[str]:
    """Request lines as they were, but for white space and the order of their outermost members."""
    unknown = [name for name in reader.schema.names if name not in REQUESTS_SCHEMA.names]
    if unknown:
        raise InputError(f"column {unknown[0]!r} has no place in a request line; leave it out first", param="inputs")
    for batch in reader.iter_batches(0, reader.num_rows, REQUESTS_SCHEMA.names, _BATCH_ROWS):
        for row in batch.to_pylist():
            parts = {name: json.dumps(row[name], ensure_ascii=False) for name in _STRINGS if row[name] is not None}
            if row["body"] is not None:
                parts["body"] = in_one_line(row["body"])
            if row[EXTRA] is not None:
                parts |= members(in_one_line(row[EXTRA]))
            yield object_of(parts)


def _made_lines(reader: ParquetReader, model: str | None, id_column: str | None) -> Iterator[str]:
    """Requests of rows as a job would run them; a column that says nothing of that is refused, not dropped."""
    if model is None:
        raise InputError("a request names a model: add --model NAME", param="model")
    names = reader.schema.names
    id_name = id_column or next((name for name in ("custom_id", "id") if name in names), None)
    if id_name is not None and id_name not in names:
        raise InputError(f"there is no column {id_name!r}; there are: {', '.join(names)}", param="id_column")
    rows = RowReader(PromptConfig(), reader.schema)
    unknown = [name for name in names if name not in rows.columns and name != id_name]
    if unknown:
        raise InputError(f"column {unknown[0]!r} has no place in a request; leave it out first", param="inputs")
    base = SamplingParams().model_dump(mode="json")
    first = 0
    for batch in reader.iter_batches(0, reader.num_rows, names, _BATCH_ROWS):
        ids = batch.column(id_name).to_pylist() if id_name is not None else None
        for row in rows.read(batch.select(rows.columns), first):
            custom_id = f"row-{row.row_index}" if ids is None else ids[row.row_index - first]
            if row.request is None or custom_id is None:
                reason = "no id" if row.error is None else row.error.message
                raise InputError(f"row {row.row_index} cannot be a request: {reason}", param="inputs")
            request = row.request
            given = request.params.model_dump(mode="json")
            params = {name: value for name, value in given.items() if value != base[name]}
            is_chat = request.messages is not None
            prompt = {"messages": request.messages} if is_chat else {"prompt": request.prompt}
            url = "/v1/chat/completions" if is_chat else "/v1/completions"
            body = {"model": model, **prompt, **_openai_names(params, is_chat=is_chat)}
            line = {"custom_id": str(custom_id), "method": "POST", "url": url, "body": body}
            yield json.dumps(line, ensure_ascii=False)
        first += batch.num_rows


def _openai_names(params: dict[str, Any], *, is_chat: bool) -> dict[str, Any]:
    """Chats say with two parameters how many log-probabilities they want."""
    if is_chat and params.get("logprobs") is not None:
        return params | {"logprobs": True, "top_logprobs": params["logprobs"]}
    return params


def results_to_lines(source: Location, output: str, errors: str, *, endpoint: str, model: str | None) -> tuple[
    WrittenFile | None, WrittenFile | None
]:  # fmt: skip
    """Write a job's results as the output and the error file of a batch.

    Raises:
        InputError: the file cannot be read, or has no vectors for an ``endpoint`` of vectors.
    """
    with ParquetReader(source) as reader:
        if endpoint == "/v1/embeddings" and "embeddings" not in reader.schema.names:
            raise InputError(
                "the results have no column 'embeddings'; jobs of --task embed with --embedding-lists do",
                param="inputs",
            )
        about = own_metadata(reader.schema)
        name = model
        for batch in reader.iter_batches(0, min(reader.num_rows, 1), ["model"], 1):
            name = name or batch.column("model")[0].as_py()
    key = about.get("job_id", source.name).removeprefix("job_")
    return write_lines([source.uri], LineContext(key, endpoint, name or "", 0), output=output, errors=errors)
