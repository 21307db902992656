"""JobSpec: everything a job was asked to do. Stored with the job, so a resume never uses today's defaults."""

from __future__ import annotations

import hashlib
import json
import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from batchinfer.chat_params import ToolParser, Truncate, read_field
from batchinfer.errors import InvalidSpecError
from batchinfer.guided import schema_text, single_schema
from batchinfer.jobs.needs import POOL_NAME
from batchinfer.sampling_params import MAX_TOKENS, SamplingParams
from batchinfer.stages import Stage, check_params, read_stages
from batchinfer.tasks import Pooling, Task, TaskOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

_DURATION = re.compile(r"(\d+)\s*([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_SAMPLING_FIELDS = tuple(SamplingParams.model_fields)
_TASK_FIELDS = tuple(TaskOptions.model_fields)
_TASK_COLUMNS: dict[Task, tuple[str, ...]] = {
    Task.GENERATE: (),
    Task.SCORE: ("choice_scores", "best_choice", "logprob", "perplexity"),
    Task.EMBED: ("embedding",),
    Task.CLASSIFY: ("label", "scores"),
    Task.RERANK: ("score", "ranking"),
}


_OWN_PROMPTS = "each stage has its own prompt"
_NOT_WITH_STAGES = {
    **dict.fromkeys(("prompt_column", "messages_column", "template", "system"), _OWN_PROMPTS),
    **dict.fromkeys(("include_columns", "parsed"), "a stage's parameters say which columns it has"),
    "samples_layout": "samples are in the column of their stage",
    "reuse_results": "answers of earlier jobs are found by one prompt a row",
    "sentinel": "it compares one answer a row",
}
"""Fields that a job with stages leaves alone, and why."""


class OnNull(StrEnum):
    """What a null in a field that the prompt needs does to its row."""

    ERROR = "error"
    SKIP = "skip"
    EMPTY = "empty"


class SamplesLayout(StrEnum):
    """How several samples of a row are written: in a list column; also one row a sample, in a file of their own."""

    LIST = "list"
    LONG = "long"


class RowColumn(StrEnum):
    """Result columns that rows fill by parameters of their own."""

    LOGPROBS = "logprobs"
    CUMULATIVE_LOGPROB = "cumulative_logprob"
    PROMPT_LOGPROBS = "prompt_logprobs"
    REASONING = "reasoning"
    REASONING_TOKENS = "reasoning_tokens"
    TOOL_CALLS = "tool_calls"
    SAMPLES = "samples"


class Dtype(StrEnum):
    """Precision of weights and activations; ``auto`` is the model's own on a GPU and float32 on a CPU."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Quantization(StrEnum):
    """Quantisation: none; weights and activations in INT8; weights alone."""

    NONE = "none"
    INT8 = "int8"
    INT8_WEIGHT_ONLY = "int8-weight-only"


class KVCacheDtype(StrEnum):
    """Precision of keys and values: that of attention, or INT8 with a scale a token and head."""

    AUTO = "auto"
    INT8 = "int8"


class Speculation(StrEnum):
    """Whether next tokens are guessed and computed ahead, while that is measured to pay; answers are the same."""

    NONE = "none"
    NGRAM = "ngram"


def parse_deadline(value: str, now: datetime) -> datetime:
    """Read ``6h``, ``90m``, ``2d`` (from ``now``) or an ISO 8601 time with zone; return an aware UTC time.

    Raises:
        ValueError: neither form fits, or the time has no zone.
    """
    try:
        if match := _DURATION.fullmatch(value.strip().lower()):
            return (now + timedelta(**{_UNITS[match[2]]: int(match[1])})).astimezone(UTC)
        return _parse_moment(value).astimezone(UTC)
    except OverflowError:
        raise ValueError(f"deadline {value!r} is not within the years 1 to 9999") from None


def _parse_moment(value: str) -> datetime:
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise ValueError(f"deadline {value!r} is neither a duration such as 6h nor an ISO 8601 time") from None
    if moment.tzinfo is None:
        raise ValueError(f"deadline {value!r} has no time zone; add Z or an offset")
    return moment


class JobSpec(BaseModel):
    """A job as submitted. Field names equal the CLI's flags and the REST body's.

    ``inputs`` are Parquet or JSONL files, folders or globs, local paths or URIs such as ``s3://bucket/prefix``.
    ``output`` is a folder, or one file if it ends in ``.parquet``; None chooses ``<input>.results/<job id>``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    inputs: Annotated[tuple[str, ...], Field(min_length=1)]
    """Files, folders or globs to read."""
    model: Annotated[str, Field(min_length=1)]
    """A GGUF file, a safetensors folder or a hub id."""
    output: str | None = None
    """Where results go."""
    name: Annotated[str | None, Field(max_length=200)] = None
    """A name for people."""
    tags: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] = {}
    """Labels, key to value."""

    task: Task = Task.GENERATE
    """What is done with each row."""
    continuation_column: str | None = None
    """score: column with a continuation or a list of choices; by default ``continuation``, then ``choices``."""
    document_column: str | None = None
    """rerank: column with a document or a list of them; by default ``document``, then ``documents``."""
    labels: tuple[str, ...] = ()
    content_free_prompt: str | None = None
    score_stride: int | None = None
    pooling: Pooling = Pooling.AUTO
    normalize: bool = True
    dimensions: int | None = None
    instruction: str | None = None
    embedding_lists: bool = False
    """embed: a row has a list of texts (by default in ``texts``, then ``prompt``), and ``embeddings`` a list of vectors."""

    prompt_column: str | None = None
    """Column with the prompt text."""
    messages_column: str | None = None
    """Column with chat messages: list<struct<role, content>> or JSON text."""
    template: str | None = None
    """Jinja2 template over the row's columns; its text is the prompt (or the user message, with ``system``)."""
    system: str | None = None
    """System message put before each row's messages; makes a plain prompt a chat."""
    stages: tuple[Stage, ...] = ()
    """Prompts and filters that each row goes through, one after the other, in place of one prompt."""
    id_column: str | None = None
    """Column whose values must be unique."""
    on_null: OnNull = OnNull.ERROR
    """What a null in a needed field does to its row."""
    column_prefix: Annotated[str, Field(max_length=64)] = ""
    """Put before the names of the result columns, where the input has columns of the same names."""
    include_token_ids: bool = False
    """Add the ``token_ids`` column."""
    include_columns: tuple[RowColumn, ...] = ()
    """Result columns to add for rows that ask for more than the job does."""
    limit: Annotated[int | None, Field(ge=1, lt=2**63)] = None
    """Only the first rows of the input."""

    max_tokens: int = SamplingParams.model_fields["max_tokens"].default
    min_tokens: int = SamplingParams.model_fields["min_tokens"].default
    temperature: float = SamplingParams.model_fields["temperature"].default
    top_p: float = SamplingParams.model_fields["top_p"].default
    top_k: int = SamplingParams.model_fields["top_k"].default
    min_p: float = SamplingParams.model_fields["min_p"].default
    typical_p: float = SamplingParams.model_fields["typical_p"].default
    repetition_penalty: float = SamplingParams.model_fields["repetition_penalty"].default
    presence_penalty: float = SamplingParams.model_fields["presence_penalty"].default
    frequency_penalty: float = SamplingParams.model_fields["frequency_penalty"].default
    logit_bias: dict[int, float] = {}
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    continue_final_message: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the model may call, in OpenAI's form."""
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    tool_parser: ToolParser = ToolParser.AUTO
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    reasoning: bool = False
    max_reasoning_tokens: int | None = None
    truncate: Truncate | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    beam_width: int = 1
    length_penalty: float = 1.0
    json_schema: str | None = None
    guided_regex: str | None = None
    guided_choice: tuple[str, ...] = ()
    guided_grammar: str | None = None
    retry_truncated: bool = False
    adapter: Annotated[str | None, Field(min_length=1)] = None
    adapter_folder: Annotated[str | None, Field(min_length=1)] = None
    """Folder in which adapters that rows call by name lie."""
    parsed: bool = False
    """Add the ``parsed`` column, also where only rows bring schemas; with ``json_schema`` it is there anyway."""
    samples_layout: SamplesLayout = SamplesLayout.LIST
    """``long`` also writes ``OUTPUT.samples.parquet``, with one row a sample."""

    max_model_len: Annotated[int | None, Field(ge=2, le=MAX_TOKENS)] = None
    """Longest prompt plus answer in tokens; None is the model's own limit."""
    dtype: Dtype = Dtype.AUTO
    """Precision of weights and activations."""
    quantization: Quantization = Quantization.NONE
    """Weight quantisation."""
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO
    """Precision of the KV cache; ``int8`` needs about half of the memory, on the CPU."""
    speculation: Speculation = Speculation.NONE
    """``ngram`` guesses tokens from what the row has said before, while few rows run and it pays; answers stay the same."""

    reuse_results: bool = False
    """Compute new and changed rows only, and copy the others' answers from earlier jobs of the same spec and model."""

    sentinel: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the rows, such as ``0.5%`` or ``0.005``, that is held against the reference precision, float32."""
    sentinel_threshold: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.05
    """Mean divergence from the reference, in nats a token, above which the job says so loudly."""

    shard_rows: Annotated[int | None, Field(ge=1, le=1_000_000)] = None
    """Most rows a shard; None cuts shards of about equal estimated tokens."""
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Higher runs earlier."""
    deadline: datetime | None = None
    """Rows not started by then end as ``expired``."""
    budget_usd: Annotated[Decimal | None, Field(gt=0, max_digits=18, decimal_places=9)] = None
    """Stop before the next dispatch once this much metered cost is reached."""
    pool: Annotated[str | None, Field(pattern=f"^{POOL_NAME}$")] = None
    """Pool of workers that runs it; None is the pool ``default``."""
    device_kind: Annotated[str | None, Field(pattern=f"^{POOL_NAME}$")] = None
    """Kind of hardware that it needs, such as ``cuda`` or ``h200``; None is any."""
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    """Attempts of a shard before the row that ends them is looked for."""

    @field_validator("inputs", mode="before")
    @classmethod
    def _one_input_may_be_a_string(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _one_name_for_a_schema(cls, data: object) -> object:
        """``response_format`` is another name of ``json_schema``."""
        return single_schema(data)

    @field_validator("stages", mode="before")
    @classmethod
    def _stages_are_named_in_faults(cls, value: object) -> object:
        return read_stages(value)

    @field_validator("json_schema", mode="before")
    @classmethod
    def _schema_is_json(cls, value: object) -> object:
        return schema_text(value)

    @field_validator("labels", mode="before")
    @classmethod
    def _labels_may_be_one_string(cls, value: object) -> object:
        return tuple(label.strip() for label in value.split(",")) if isinstance(value, str) else value

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _one_word_may_be_a_string(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("sentinel", mode="before")
    @classmethod
    def _sentinel_may_be_in_percent(cls, value: object) -> object:
        if isinstance(value, str) and value.strip().endswith("%"):
            try:
                return float(value.strip()[:-1]) / 100
            except ValueError:
                raise ValueError(f"{value!r} is no share: give one such as 0.5% or 0.005") from None
        return value

    @field_validator("tools", "tool_choice", "chat_template_kwargs", mode="before")
    @classmethod
    def _read_as_a_row_has_it(cls, value: object, info: ValidationInfo) -> object:
        return read_field(info.field_name, value)

    @field_validator("deadline", mode="before")
    @classmethod
    def _deadline_may_be_a_duration(cls, value: object) -> object:
        return parse_deadline(value, datetime.now(UTC)) if isinstance(value, str) else value

    @field_validator("deadline")
    @classmethod
    def _deadline_is_aware(cls, value: datetime | None) -> datetime | None:
        if value is not None and value.tzinfo is None:
            raise ValueError("the deadline has no time zone")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [n for n in ("prompt_column", "messages_column", "template") if getattr(self, n) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: a row has one source for its prompt")
        params = self.sampling_params()
        if self.sentinel and self.adapter is not None:
            raise ValueError("sentinel goes without adapter: the reference is the model alone")
        if self.samples_layout is SamplesLayout.LONG and not params.has_samples:
            raise ValueError("samples_layout long needs several samples a row: raise n")
        self._check_task()
        if self.stages:
            self._check_stages(params)
        return self

    def _check_stages(self, params: SamplingParams) -> None:
        """What has no meaning beside stages, or is not done with them, is refused."""
        if not self.task_options().generates:
            raise ValueError(f"stages generate text; task {self.task.value} has none: leave task or stages out")
        given = [n for n in _NOT_WITH_STAGES if getattr(self, n) != type(self).model_fields[n].default]
        if given:
            raise ValueError(f"{given[0]} goes without stages: {_NOT_WITH_STAGES[given[0]]}")
        check_params(self.stages, params)

    def _check_task(self) -> None:
        """What a task cannot have is refused here, not in each row."""
        options = self.task_options()
        fields = [n for n in _SAMPLING_FIELDS if n != "adapter"]  # which changes the model, whatever is asked of it
        given = [n for n in fields if getattr(self, n) != SamplingParams.model_fields[n].default]
        if not options.generates and given:
            raise ValueError(f"task {self.task.value} generates nothing, so {given[0]} has no meaning; leave it out")
        for name, task in (("continuation_column", Task.SCORE), ("document_column", Task.RERANK)):
            if getattr(self, name) is not None and self.task is not task:
                raise ValueError(f"{name} is for task {task.value}, not for {self.task.value}")
        if self.sentinel and not options.generates:
            raise ValueError(f"sentinel compares generated answers, and task {self.task.value} has none")
        if self.embedding_lists and self.task is not Task.EMBED:
            raise ValueError(f"embedding_lists is for task embed, not for {self.task.value}")
        if self.embedding_lists and (self.messages_column or self.template or self.system):
            raise ValueError("embedding_lists reads a column of texts: no messages_column, template or system")
        if self.task is Task.RERANK and (self.messages_column or self.system):
            raise ValueError("task rerank reads a query and documents: messages_column and system have no meaning")
        if self.task is Task.EMBED and self.instruction and (self.messages_column or self.system):
            raise ValueError("instruction is put before plain texts; a chat has its system message for that")

    def task_options(self) -> TaskOptions:
        """What the job does with its rows."""
        return TaskOptions(**{name: getattr(self, name) for name in _TASK_FIELDS})

    def stage_params(self, stage: Stage) -> SamplingParams:
        """Parameters of a stage's rows, without a seed."""
        return stage.params(self.sampling_params())

    def stage_columns(self, stage: Stage) -> tuple[str, ...]:
        """Names of the optional columns (``dataset.schema.OPTIONAL_COLUMNS``) that a stage's answers have."""
        if not stage.generates:
            return ()
        wanted = {"token_ids": self.include_token_ids, **_asked_columns(self.stage_params(stage))}
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)

    @property
    def max_answer_tokens(self) -> int:
        """Most tokens that a row's answers have, of all stages together; one sample each."""
        if not self.task_options().generates:
            return 1
        if not self.stages:
            return self.max_tokens
        return sum(self.stage_params(stage).max_tokens for stage in self.stages if stage.generates)

    def sampling_params(self) -> SamplingParams:
        """The job's defaults for each row; per-row columns override them.

        Without a column for tool calls they stay in the text.
        """
        fields = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        if not self.tools and RowColumn.TOOL_CALLS not in self.include_columns:
            fields["tool_parser"] = ToolParser.NONE
        return SamplingParams(**fields)

    def result_columns(self) -> tuple[str, ...]:
        """Names of the optional result columns that this job writes (``dataset.schema.OPTIONAL_COLUMNS``)."""
        if self.stages:
            return ("stopped_at",)
        asked = _asked_columns(self.sampling_params())
        wanted = {
            "token_ids": self.include_token_ids,
            **asked,
            "row_key": self.reuse_results,
            "reused_from": self.reuse_results,
            "parsed": self.parsed or asked["parsed"],
        }
        of_task = ("embeddings",) if self.embedding_lists else _TASK_COLUMNS[self.task]
        return (*(name for name, is_wanted in wanted.items() if is_wanted or name in self.include_columns), *of_task)

    def fingerprint(self) -> str:
        """SHA-256 over the canonical JSON of the spec, in hex: equal specs have equal fingerprints."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _asked_columns(params: SamplingParams) -> dict[str, bool]:
    """Optional columns that parameters ask for by themselves."""
    return {
        "logprobs": params.logprobs is not None,
        "cumulative_logprob": params.has_scores,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "reasoning": params.splits_reasoning,
        "reasoning_tokens": params.splits_reasoning,
        "tool_calls": bool(params.tools),
        "samples": params.has_samples,
        "parsed": params.json_schema is not None,
    }


def parse_tag(text: str | None) -> tuple[str, str] | None:
    """Read ``key=value``, as lists are filtered by it.

    Raises:
        InvalidSpecError: there is no ``=``.
    """
    if text is None:
        return None
    key, separator, value = text.partition("=")
    if not key or not separator:
        raise InvalidSpecError(f"tag {text[:100]!r} is not KEY=VALUE, such as team=search", param="tag")
    return key, value


def parse_spec(fields: Mapping[str, Any]) -> JobSpec:
    """Make a spec.

    Raises:
        InvalidSpecError: in one sentence, with the field at fault.
    """
    try:
        return JobSpec.model_validate(dict(fields))
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        param = ".".join(map(str, fault["loc"])) or None
        message = str(fault["msg"]).removeprefix("Value error, ")
        raise InvalidSpecError(f"{param}: {message}" if param else message, param=param) from None
