"""Result rows as lines of an OpenAI batch's output and error files.

Spec: https://platform.openai.com/docs/api-reference/batch/request-output
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchinfer.dataset.filesystem import Location
from batchinfer.dataset.openai_embeddings import embedding_objects
from batchinfer.dataset.openai_logprobs import chat_logprobs, text_logprobs
from batchinfer.dataset.parquet_source import ParquetReader
from batchinfer.dataset.prompt_builders import body_column
from batchinfer.dataset.schema import OPTIONAL_COLUMNS
from batchinfer.dataset.staged_file import StagedFile
from batchinfer.types import RowStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_BATCH_ROWS = 512
_BATCH_EMBEDDINGS = 32
"""Rows at a time that may have two thousand vectors each."""
_COLUMNS = ("custom_id", "row_index", "status", "output", "finish_reason", "error", "usage")
_EMBEDDINGS = "embeddings"
_BODY = "body"
_GOOD = frozenset({RowStatus.SUCCEEDED, RowStatus.DEDUPLICATED})
_STATUS_CODES = {"invalid_request_error": 400}
_NOT_RUN = {
    RowStatus.EXPIRED: ("batch_expired", "This request could not be executed before the completion window expired."),
    RowStatus.CANCELLED: ("batch_cancelled", "This request was not executed, since the batch was cancelled."),
    RowStatus.SKIPPED: ("request_skipped", "This request was left out."),
    RowStatus.FILTERED: ("request_filtered", "A filter left this request out."),
}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LineContext:
    """What all lines of a batch share.

    ``key`` makes ids unique; ``model`` is the name in the requests; ``created`` is in Unix seconds.
    """

    key: str
    endpoint: str
    model: str
    created: int


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file of lines."""

    location: str
    num_bytes: int
    sha256: str


def _usage(row: Row) -> Row:
    usage = row["usage"] or {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}
    prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    counts = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": usage["cached_tokens"]},
    }
    answers = row.get("samples") or [row]
    if all(answer.get("reasoning_tokens") is None for answer in answers):
        return counts
    reasoning = sum(answer.get("reasoning_tokens") or 0 for answer in answers)
    return counts | {"completion_tokens_details": {"reasoning_tokens": reasoning}}


def _document(row: Row, context: LineContext, kind: tuple[str, str], choice: Callable[[Row], Row]) -> Row:
    """A response's body; ``kind`` is what its id begins with and its ``object``. A choice is a sample."""
    prefix, name = kind
    answers = row.get("samples") or [row]
    return {
        "id": f"{prefix}-{context.key}-{row['row_index']}",
        "object": name,
        "created": context.created,
        "model": context.model,
        "choices": [
            {"index": index, **choice(answer), "finish_reason": answer["finish_reason"]}
            for index, answer in enumerate(answers)
        ],
        "usage": _usage(row),
        "system_fingerprint": None,
    }


def _chat_completion(row: Row, context: LineContext) -> Row:
    return _document(row, context, ("chatcmpl", "chat.completion"), _chat_choice)


def _chat_choice(answer: Row) -> Row:
    message: Row = {"role": "assistant", "content": answer["output"], "refusal": None}
    if answer.get("reasoning") is not None:
        message["reasoning_content"] = answer["reasoning"]
    if calls := answer.get("tool_calls"):
        message |= {"content": answer["output"] or None, "tool_calls": calls}
    return {"message": message, "logprobs": chat_logprobs(answer.get("logprobs"))}


def _text_completion(row: Row, context: LineContext) -> Row:
    return _document(row, context, ("cmpl", "text_completion"), _text_choice)


def _text_choice(answer: Row) -> Row:
    return {"text": answer["output"], "logprobs": text_logprobs(answer.get("logprobs"))}


def _embeddings(row: Row, context: LineContext) -> Row:
    tokens = row["usage"]["prompt_tokens"] if row["usage"] else 0
    return {
        "object": "list",
        "data": embedding_objects(row[_EMBEDDINGS], row.get(_BODY)),
        "model": context.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


ENDPOINTS: Mapping[str, Callable[[Row, LineContext], Row]] = {
    "/v1/chat/completions": _chat_completion,
    "/v1/completions": _text_completion,
    "/v1/embeddings": _embeddings,
}
"""What a succeeded row becomes, by the endpoint that its request named."""


def is_success(row: Row) -> bool:
    """Whether the row's line belongs into the output file; the others are in the error file."""
    return row["status"] in _GOOD


def result_line(row: Row, context: LineContext) -> Row:
    """One line: exactly one of ``response`` and ``error`` is set, as with OpenAI."""
    request_id = f"req_{context.key}_{row['row_index']}"
    line: Row = {"id": f"batch_{request_id}", "custom_id": row["custom_id"], "response": None, "error": None}
    if row["status"] in _NOT_RUN:
        code, message = _NOT_RUN[RowStatus(row["status"])]
        return line | {"error": {"code": code, "message": message}}
    if is_success(row):
        body, status = ENDPOINTS[context.endpoint](row, context), 200
    else:
        body, status = _error_body(row), _STATUS_CODES.get(row["error"]["type"], 500)
    return line | {"response": {"status_code": status, "request_id": request_id, "body": body}}


def _error_body(row: Row) -> Row:
    error = row["error"]
    return {"error": {"message": error["message"], "type": error["type"], "param": None, "code": error["code"]}}


def write_lines(
    files: Iterable[str], context: LineContext, *, output: str, errors: str
) -> tuple[WrittenFile | None, WrittenFile | None]:
    """Write the output and the error file out of Parquet result files, in order; None for one without lines.

    Memory stays at one batch of rows. A file that has no lines is not written.
    """
    with ExitStack() as stack:
        staged: dict[bool, StagedFile] = {}
        places = {True: output, False: errors}
        for row in _rows(files):
            is_good = is_success(row)
            if is_good not in staged:
                staged[is_good] = stack.enter_context(StagedFile(Location.parse(places[is_good])))
            line = json.dumps(result_line(row, context), ensure_ascii=False, separators=(",", ":"))
            staged[is_good].write(line.encode() + b"\n")
    written = {is_good: WrittenFile(places[is_good], file.num_bytes, file.sha256) for is_good, file in staged.items()}
    return written.get(True), written.get(False)


def _rows(files: Iterable[str]) -> Iterator[Row]:
    for file in files:
        with ParquetReader(Location.parse(file)) as reader:
            names = reader.schema.names
            columns = [name for name in (*_COLUMNS, *OPTIONAL_COLUMNS) if name in names]
            if _EMBEDDINGS not in names:
                for batch in reader.iter_batches(0, reader.num_rows, columns, _BATCH_ROWS):
                    yield from map(_with_id, batch.to_pylist())
                continue
            body = body_column(reader.schema)
            columns += [] if body is None else [body]
            for batch in reader.iter_batches(0, reader.num_rows, columns, _BATCH_EMBEDDINGS):
                vectors = batch.column(
                    _EMBEDDINGS
                )  # stay as they are: as Python's floats they are eight times as large
                for row, found in zip(batch.drop_columns([_EMBEDDINGS]).to_pylist(), vectors, strict=True):
                    yield _with_id(row) | {_EMBEDDINGS: found, _BODY: None if body is None else row[body]}


def _with_id(row: Row) -> Row:
    return {"custom_id": f"row-{row['row_index']}"} | row
