"""The lines of an OpenAI batch file, checked before anything runs: each fault with the number of its line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchinfer.dataset.filesystem import Location
from batchinfer.dataset.jsonl_source import is_blank, open_lines, parse_line
from batchinfer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_FAULTS = 100
"""Reading stops after so many: who gets them all wrong need not hear of each."""
MODEL_SEARCH_LINES = 100
MODEL_SEARCH_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class LineFault:
    """What is wrong with a line (counted from 1; None: with the file), in OpenAI's fields."""

    code: str
    line: int | None
    message: str
    param: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


class BatchLinesError(InputError):
    """A batch file with lines that are no requests of that batch. ``faults`` names each."""

    code = "invalid_lines"

    def __init__(self, faults: list[LineFault]) -> None:
        first = faults[0]
        where = "" if first.line is None else f"line {first.line}: "
        more = f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""
        super().__init__(f"{where}{first.message}{more}", param="inputs")
        self.faults = tuple(faults)


def find_model(uri: str) -> str | None:
    """The model that the first lines name, or None: then the check of all lines says why."""
    num_bytes = 0
    for number, line in _lines(uri):
        num_bytes += len(line)
        if number > MODEL_SEARCH_LINES or num_bytes > MODEL_SEARCH_BYTES:
            break
        record = _parsed(line)
        body = record.get("body") if isinstance(record, dict) else None
        model = body.get("model") if isinstance(body, dict) else None
        if isinstance(model, str) and model:
            return model
    return None


def check_batch_lines(uri: str, *, endpoint: str, model: str) -> None:
    """Check that each line is a POST to ``endpoint`` of ``model``, with an id.

    Raises:
        BatchLinesError: with up to :data:`MAX_FAULTS` faults.
    """
    faults: list[LineFault] = []
    num_requests = 0
    for number, line in _lines(uri):
        num_requests += 1
        faults += _faults(number, line, endpoint, model)
        if len(faults) >= MAX_FAULTS:
            break
    if not num_requests:
        faults.append(LineFault("empty_file", None, "The file has no requests."))
    if faults:
        raise BatchLinesError(faults[:MAX_FAULTS])


def duplicate_id(uri: str, first_row: int, second_row: int) -> BatchLinesError:
    """The error of two rows (counted from 0) with one ``custom_id``."""
    rows = zip(range(second_row + 1), _lines(uri), strict=False)
    first, second = (number for row, (number, _) in rows if row in (first_row, second_row))
    message = f"The custom_id is that of line {first} already; each must be unique."
    return BatchLinesError([LineFault("duplicate_custom_id", second, message, "custom_id")])


def _lines(uri: str) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, by number from 1."""
    with open_lines(Location.parse(uri)) as lines:
        yield from ((number, line) for number, line in enumerate(lines, start=1) if not is_blank(line))


def _parsed(line: bytes) -> Any:
    """The line's JSON, or None."""
    try:
        return parse_line(line)
    except (ValueError, RecursionError):
        return None


def _faults(number: int, line: bytes, endpoint: str, model: str) -> Iterator[LineFault]:
    try:
        record = parse_line(line)
    except (ValueError, RecursionError) as error:
        yield LineFault("invalid_json_line", number, f"The line is not JSON: {error}.")
        return
    if not isinstance(record, dict):
        yield LineFault("invalid_json_line", number, "The line is not a JSON object.")
        return
    custom_id, method, url = record.get("custom_id"), record.get("method"), record.get("url")
    if not isinstance(custom_id, str) or not custom_id:
        yield LineFault("missing_required_parameter", number, "custom_id must be a non-empty string.", "custom_id")
    if method != "POST":
        yield LineFault("invalid_method", number, f'method must be "POST", not {_shown(method)}.', "method")
    if url != endpoint:
        yield LineFault(
            "invalid_url", number, f"url must be the batch's endpoint {endpoint}, not {_shown(url)}.", "url"
        )
    yield from _body_faults(number, record.get("body"), model)


def _body_faults(number: int, body: Any, model: str) -> Iterator[LineFault]:
    if not isinstance(body, dict):
        yield LineFault("missing_required_parameter", number, "body must be an object.", "body")
        return
    named = body.get("model")
    if not isinstance(named, str) or not named:
        yield LineFault("missing_required_parameter", number, "body.model must name a model.", "body.model")
    elif named != model:
        message = f"body.model is {_shown(named)}, but the batch's first line has {_shown(model)}: one model a batch."
        yield LineFault("mismatched_model", number, message, "body.model")


def _shown(value: Any) -> str:
    """A value of a client's, short, and as text that can be stored."""
    return json.dumps(value)[:100]
