"""Values that cross layers: rows' outcomes, requests to the engine and their completions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from batchinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping


class RowStatus(StrEnum):
    """How a row ended. Terminal: only an explicit ``retry`` changes it."""

    SUCCEEDED = "succeeded"
    ERRORED = "errored"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"
    DEDUPLICATED = "deduplicated"
    FILTERED = "filtered"


class FinishReason(StrEnum):
    """Why generation stopped."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


class ErrorCode(StrEnum):
    """Stable codes of error rows; :data:`ERROR_CODES` explains each."""

    EMPTY_PROMPT = "empty_prompt"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    TEMPLATE_ERROR = "template_error"
    NULL_FIELD = "null_field"
    INVALID_PARAMS = "invalid_params"
    INVALID_MESSAGES = "invalid_messages"
    INVALID_ENCODING = "invalid_encoding"
    INVALID_SCHEMA = "invalid_schema"
    TRUNCATED_JSON = "truncated_json"
    NO_CONTINUATION = "no_continuation"
    ADAPTER_NOT_FOUND = "adapter_not_found"
    INVALID_ADAPTER = "invalid_adapter"
    OUT_OF_MEMORY = "out_of_memory"
    ENGINE_ERROR = "engine_error"
    WORKER_LOST = "worker_lost"
    JOB_CANCELLED = "job_cancelled"
    DEADLINE_EXCEEDED = "deadline_exceeded"


@dataclass(frozen=True, slots=True)
class ErrorCodeInfo:
    """What an error code means: its OpenAI-style type, whether a retry may help, and what to do."""

    type: str
    retryable: bool
    meaning: str
    advice: str


ERROR_CODES: dict[ErrorCode, ErrorCodeInfo] = {
    ErrorCode.EMPTY_PROMPT: ErrorCodeInfo(
        "invalid_request_error", False, "The prompt is empty or only white space.", "Fill the prompt or drop the row."
    ),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: ErrorCodeInfo(
        "invalid_request_error",
        False,
        "The prompt leaves no room for an answer within the model's context or the KV cache.",
        "Shorten the prompt or raise --max-model-len.",
    ),
    ErrorCode.TEMPLATE_ERROR: ErrorCodeInfo(
        "invalid_request_error",
        False,
        "The template or the model's chat template failed on this row.",
        "Mend the template or the row; the message quotes the failure.",
    ),
    ErrorCode.NULL_FIELD: ErrorCodeInfo(
        "invalid_request_error",
        False,
        "A field that the prompt needs is null.",
        "Fill the field, or choose --on-null skip or empty.",
    ),
    ErrorCode.INVALID_PARAMS: ErrorCodeInfo(
        "invalid_request_error",
        False,
        "A per-row sampling parameter is out of range or of the wrong type.",
        "Correct the column that the message names.",
    ),
    ErrorCode.INVALID_MESSAGES: ErrorCodeInfo(
        "invalid_request_error",
        False,
        "The messages are not a non-empty list of {role, content}, or the model's template refuses them.",
        "Correct the message whose index is named.",
    ),
    ErrorCode.INVALID_ENCODING: ErrorCodeInfo(
        "invalid_request_error", False, "The text is not valid UTF-8.", "Re-encode the column as UTF-8 text."
    ),
    ErrorCode.INVALID_SCHEMA: ErrorCodeInfo(
        "invalid_request_error",
        False,
        "The JSON schema, expression or grammar of the answer is invalid, impossible or not supported.",
        "Correct it; the message quotes the grammar library.",
    ),
    ErrorCode.TRUNCATED_JSON: ErrorCodeInfo(
        "invalid_request_error",
        False,
        "The answer was cut off before its JSON was complete.",
        "Raise max_tokens, give --retry-truncated, or bound strings and lists in the schema.",
    ),
    ErrorCode.NO_CONTINUATION: ErrorCodeInfo(
        "invalid_request_error",
        False,
        "The row has nothing to score or to rank: no continuation, choice or document, or an empty one.",
        "Fill the column that the message names.",
    ),
    ErrorCode.ADAPTER_NOT_FOUND: ErrorCodeInfo(
        "invalid_request_error",
        False,
        "The row's LoRA adapter is not there, or the tenant may not use it.",
        "Correct the path, or the name below --adapter-folder; then `batchinfer retry JOB`.",
    ),
    ErrorCode.INVALID_ADAPTER: ErrorCodeInfo(
        "invalid_request_error",
        False,
        "The row's LoRA adapter does not fit the model, or uses what is not supported.",
        "The message says what: use an adapter of this model, or merge it with peft.",
    ),
    ErrorCode.OUT_OF_MEMORY: ErrorCodeInfo(
        "server_error",
        True,
        "The device ran out of memory on this row alone, though it computed one token at a time.",
        "Shorten the row, or run `batchinfer retry JOB` on a worker with a smaller KV cache or a larger device.",
    ),
    ErrorCode.ENGINE_ERROR: ErrorCodeInfo(
        "server_error", True, "The engine failed on this row.", "Run `batchinfer retry JOB`; the message has the cause."
    ),
    ErrorCode.WORKER_LOST: ErrorCodeInfo(
        "server_error",
        True,
        "The engine process ended each time this row ran, even alone.",
        "Look at the row: it kills the engine. `batchinfer retry JOB` runs it again.",
    ),
    ErrorCode.JOB_CANCELLED: ErrorCodeInfo(
        "cancelled",
        True,
        "The job was cancelled before this row ran.",
        "Run `batchinfer retry JOB` to run what is left.",
    ),
    ErrorCode.DEADLINE_EXCEEDED: ErrorCodeInfo(
        "expired", True, "The job's deadline passed before this row ran.", "Submit again with a later --deadline."
    ),
}


@dataclass(frozen=True, slots=True)
class RowError:
    """The ``error`` struct of an error row."""

    code: ErrorCode
    message: str

    @property
    def type(self) -> str:
        """OpenAI-style error type."""
        return ERROR_CODES[self.code].type

    @property
    def retryable(self) -> bool:
        """Whether running the row again may help."""
        return ERROR_CODES[self.code].retryable


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one row. ``cached_tokens`` is the part of ``prompt_tokens`` found in the KV cache."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
        )


Message = dict[str, Any]
"""One chat message: at least ``role`` and ``content``."""


@dataclass(frozen=True, slots=True)
class SampleProgress:
    """How far one answer of a row has come: its tokens, and their log-probabilities where the row asks for them.

    ``scores`` has ``(token_id, logprob, rank, top)`` for each token; ``cumulative`` is their sum, where only it is kept.
    """

    token_ids: tuple[int, ...] = ()
    scores: tuple[Any, ...] = ()
    cumulative: float | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One row for the engine. Exactly one of ``prompt``, ``messages`` and ``prompt_token_ids`` is set.

    ``request_id`` is unique among the engine's unfinished requests. A ``prompt`` is plain text, completed as it is;
    ``messages`` go through the model's chat template. ``progress`` is what an earlier engine, with the same settings,
    came to: one a sample; the answers go on from there.
    """

    request_id: str
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: str | None = None
    messages: list[Message] | None = None
    prompt_token_ids: list[int] | None = None
    progress: tuple[SampleProgress, ...] = ()
    answer: str | None = None
    """A text that is there already, for engines that judge answers instead of giving them."""
    task: dict[str, Any] | None = None
    """What is done with the row if no text is generated: JSON data, by ``tasks.TaskOptions.request``."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of a :class:`Request`.

    ``device_ns`` is the row's share, in integer nanoseconds, of the engine steps it took part in: over all rows the
    shares sum exactly to the time the steps took. ``clamped_max_tokens`` is set where the context left less room than
    was asked for. ``error`` is set if and only if ``status`` is not ``succeeded``.
    """

    request_id: str
    status: RowStatus
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: RowError | None = None
    usage: Usage = field(default_factory=Usage)
    device_ns: int = 0
    clamped_max_tokens: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Values of optional result columns, by the names of ``dataset.schema.OPTIONAL_COLUMNS``; JSON data only, since
    they cross a pipe."""
    warnings: tuple[str, ...] = ()
    """What the engine did to the row that its owner should know; joined to the row's other warnings."""
