"""How an engine process and its parent speak: JSON objects, each after its length, over a pipe.

JSON is written in ASCII, so that a lone surrogate in a text survives; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import struct
from typing import IO, TYPE_CHECKING, Any

from batchinfer.sampling_params import SamplingParams
from batchinfer.types import (
    Completion,
    ErrorCode,
    FinishReason,
    Request,
    RowError,
    RowStatus,
    SampleProgress,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_LENGTH = struct.Struct("<Q")


def write_message(pipe: IO[bytes], message: dict[str, Any]) -> None:
    """Write one message.

    Raises:
        OSError: the other side is gone.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    pipe.write(_LENGTH.pack(len(body)) + body)
    pipe.flush()


def read_message(read: Callable[[int], bytes]) -> dict[str, Any] | None:
    """Read one message with ``read(n)``, which returns exactly ``n`` bytes or fewer at the end; None at the end."""
    head = read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = read(length)
    if len(body) < length:
        return None
    message: dict[str, Any] = json.loads(body)
    return message


def request_to_json(request: Request) -> dict[str, Any]:
    """A request as a JSON object; what is default or unset is left out."""
    fields: dict[str, Any] = {
        "request_id": request.request_id,
        "params": request.params.model_dump(mode="json", exclude_defaults=True),
        "prompt": request.prompt,
        "messages": request.messages,
        "prompt_token_ids": request.prompt_token_ids,
        "progress": progress_to_json(request.progress) if request.progress else None,
        "answer": request.answer,
        "task": request.task,
    }
    return {key: value for key, value in fields.items() if value is not None}


def request_from_json(data: dict[str, Any]) -> Request:
    """Read what :func:`request_to_json` wrote."""
    changed: dict[str, Any] = {"params": SamplingParams.model_validate(data["params"])}
    if "progress" in data:
        changed["progress"] = progress_from_json(data["progress"])
    return Request(**data | changed)


def progress_to_json(samples: Iterable[SampleProgress]) -> list[Any]:
    """A row's progress as JSON arrays."""
    return [[sample.token_ids, sample.scores, sample.cumulative] for sample in samples]


def progress_from_json(data: list[Any]) -> tuple[SampleProgress, ...]:
    """Read what :func:`progress_to_json` wrote."""
    return tuple(SampleProgress(tuple(ids), tuple(scores), cumulative) for ids, scores, cumulative in data)


def completion_to_json(completion: Completion) -> dict[str, Any]:
    """A completion as a JSON object."""
    error, usage = completion.error, completion.usage
    return {
        "request_id": completion.request_id,
        "status": completion.status.value,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "error": {"code": error.code.value, "message": error.message} if error else None,
        "usage": [usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens],
        "device_ns": completion.device_ns,
        "clamped_max_tokens": completion.clamped_max_tokens,
        "extra": dict(completion.extra),
        "warnings": list(completion.warnings),
    }


def completion_from_json(data: dict[str, Any]) -> Completion:
    """Read what :func:`completion_to_json` wrote."""
    error, reason = data["error"], data["finish_reason"]
    return Completion(
        request_id=data["request_id"],
        status=RowStatus(data["status"]),
        text=data["text"],
        token_ids=tuple(data["token_ids"]),
        finish_reason=FinishReason(reason) if reason else None,
        error=RowError(ErrorCode(error["code"]), error["message"]) if error else None,
        usage=Usage(*data["usage"]),
        device_ns=data["device_ns"],
        clamped_max_tokens=data["clamped_max_tokens"],
        extra=data["extra"],
        warnings=tuple(data["warnings"]),
    )
