"""The flags of ``run`` and ``submit``: JobSpec's fields, with JobSpec's own words and defaults."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import ValidationError

from batchinfer.chat_params import ToolParser, Truncate
from batchinfer.errors import InvalidSpecError
from batchinfer.jobs.spec import (
    Dtype,
    JobSpec,
    KVCacheDtype,
    OnNull,
    Quantization,
    RowColumn,
    SamplesLayout,
    Speculation,
)
from batchinfer.jobs.stage_file import read_stage_file
from batchinfer.sampling_params import SamplingParams
from batchinfer.tasks import Pooling, Task, TaskOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# field of JobSpec -> how click reads it; the flag is the field's name with dashes
_FLAGS: dict[str, dict[str, Any]] = {
    "model": {"metavar": "PATH_OR_ID"},
    "adapter": {"metavar": "PATH"},
    "adapter_folder": {"metavar": "PATH"},
    "output": {"flags": ["-o"], "metavar": "PATH"},
    "task": {"type": click.Choice([choice.value for choice in Task])},
    "prompt_column": {"metavar": "NAME"},
    "messages_column": {"metavar": "NAME"},
    "template": {"metavar": "JINJA"},
    "system": {"metavar": "TEXT"},
    "stages": {"metavar": "FILE"},
    "id_column": {"metavar": "NAME"},
    "on_null": {"type": click.Choice([choice.value for choice in OnNull])},
    "column_prefix": {"metavar": "TEXT"},
    "include_token_ids": {"flags": ["--token-ids"], "is_flag": True},
    "include_columns": {
        "flags": ["--include-column"],
        "multiple": True,
        "type": click.Choice([choice.value for choice in RowColumn]),
    },
    "continuation_column": {"metavar": "NAME"},
    "score_stride": {"type": int},
    "pooling": {"type": click.Choice([choice.value for choice in Pooling])},
    "normalize": {"flags": ["--normalize/--no-normalize"]},
    "dimensions": {"type": int},
    "instruction": {"metavar": "TEXT"},
    "embedding_lists": {"is_flag": True},
    "labels": {"metavar": "A,B,..."},
    "content_free_prompt": {"metavar": "TEXT"},
    "document_column": {"metavar": "NAME"},
    "max_tokens": {"type": int},
    "min_tokens": {"type": int},
    "temperature": {"type": float},
    "top_p": {"type": float},
    "top_k": {"type": int},
    "min_p": {"type": float},
    "typical_p": {"type": float},
    "repetition_penalty": {"type": float},
    "presence_penalty": {"type": float},
    "frequency_penalty": {"type": float},
    "logit_bias": {"multiple": True, "metavar": "ID=BIAS"},
    "bad_words": {"flags": ["--bad-word"], "multiple": True, "metavar": "TEXT"},
    "allowed_token_ids": {"flags": ["--allowed-token-id"], "multiple": True, "type": int},
    "seed": {"type": int},
    "stop": {"multiple": True, "metavar": "TEXT"},
    "stop_token_ids": {"flags": ["--stop-token-id"], "multiple": True, "type": int},
    "ignore_eos": {"is_flag": True},
    "include_stop_str_in_output": {"is_flag": True},
    "echo": {"is_flag": True},
    "continue_final_message": {"is_flag": True},
    "tools": {"metavar": "FILE"},
    "tool_choice": {"metavar": "CHOICE"},
    "parallel_tool_calls": {"flags": ["--parallel-tool-calls/--no-parallel-tool-calls"]},
    "tool_parser": {"type": click.Choice([choice.value for choice in ToolParser])},
    "chat_template": {"metavar": "FILE"},
    "chat_template_kwargs": {"metavar": "JSON"},
    "reasoning": {"is_flag": True},
    "max_reasoning_tokens": {"type": int},
    "truncate": {"type": click.Choice([choice.value for choice in Truncate])},
    "logprobs": {"type": int},
    "prompt_logprobs": {"type": int},
    "n": {"flags": ["--n"], "type": int},
    "best_of": {"type": int},
    "beam_width": {"type": int},
    "length_penalty": {"type": float},
    "json_schema": {"metavar": "FILE_OR_JSON"},
    "guided_regex": {"metavar": "REGEX"},
    "guided_choice": {"multiple": True, "metavar": "TEXT"},
    "guided_grammar": {"metavar": "FILE"},
    "retry_truncated": {"is_flag": True},
    "parsed": {"is_flag": True},
    "samples_layout": {"type": click.Choice([choice.value for choice in SamplesLayout])},
    "skip_special_tokens": {"flags": ["--skip-special-tokens/--no-skip-special-tokens"]},
    "max_model_len": {"type": int},
    "dtype": {"type": click.Choice([choice.value for choice in Dtype])},
    "quantization": {"type": click.Choice([choice.value for choice in Quantization])},
    "kv_cache_dtype": {"type": click.Choice([choice.value for choice in KVCacheDtype])},
    "speculation": {"type": click.Choice([choice.value for choice in Speculation])},
    "reuse_results": {"is_flag": True},
    "sentinel": {"metavar": "SHARE"},
    "sentinel_threshold": {"type": float},
    "shard_rows": {"type": int},
    "priority": {"type": int},
    "deadline": {"metavar": "TIME"},
    "budget_usd": {"flags": ["--budget"], "metavar": "USD"},
    "pool": {"metavar": "NAME"},
    "device_kind": {"metavar": "NAME"},
    "max_attempts": {"type": int},
    "name": {"metavar": "TEXT"},
    "tags": {"flags": ["--tag"], "multiple": True, "metavar": "KEY=VALUE"},
}
_HINTS = {
    "output": "default: INPUT.results/JOB_ID",
    "template": "@FILE reads it from a file",
    "system": "@FILE reads it from a file",
    "stages": "a YAML or JSON file, see docs/stages.md",
    "stop": "may be repeated",
    "include_columns": "may be repeated",
    "tools": "a JSON file, or JSON text",
    "chat_template": "a file, or the template's text",
    "stop_token_ids": "may be repeated",
    "logit_bias": "may be repeated",
    "logprobs": "0: those of the answer's tokens alone",
    "prompt_logprobs": "0: those of the prompt's tokens alone",
    "bad_words": "may be repeated",
    "allowed_token_ids": "may be repeated",
    "json_schema": "a file, or JSON that begins with a brace",
    "guided_choice": "may be repeated",
    "deadline": "6h, 90m, 2d or an ISO 8601 time with zone",
    "tags": "may be repeated",
}

_FILES = {"tools": ("[", "{"), "chat_template": ("{{", "{%")}
"""Fields that are read from a file, unless what was given has the signs of the thing itself."""


def _help(field: str) -> str:
    info = JobSpec.model_fields[field]
    sampling = SamplingParams.model_fields.get(field) or TaskOptions.model_fields.get(field)
    text = (info.description or (sampling.description if sampling else None) or "").rstrip(".")
    text = text[:1].upper() + text[1:]
    notes = [_HINTS[field]] if field in _HINTS else []
    is_plain = not isinstance(info.default, tuple | dict | bool) and info.default not in (None, "")
    if not info.is_required() and is_plain:
        notes.append(f"default: {info.default}")
    return f"{text} ({'; '.join(notes)})." if notes else f"{text}."


def _option(field: str, attributes: Mapping[str, Any]) -> Callable[[Any], Any]:
    rest = {key: value for key, value in attributes.items() if key != "flags"}
    flags = attributes.get("flags", [])
    if not any(flag.startswith("--") for flag in flags):
        flags = [*flags, "--" + field.replace("_", "-")]
    # no click default: only what was given reaches JobSpec, so that there is one place for defaults
    return click.option(*flags, field, help=_help(field), **({} if rest.get("multiple") else {"default": None}), **rest)


def spec_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``INPUTS...`` and one flag for each field of JobSpec that people set."""
    for field, attributes in reversed(_FLAGS.items()):
        command = _option(field, attributes)(command)
    return click.argument("inputs", nargs=-1, metavar="INPUTS...")(command)


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same flags without ``INPUTS...`` and the job's name, for commands that have ways of their own for these."""
    for field, attributes in reversed(_FLAGS.items()):
        if field != "name":
            command = _option(field, attributes)(command)
    return command


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout, and nothing else there.")(
        command
    )


def flag_of(field: str) -> str:
    """The flag through which people set a field of JobSpec: ``budget_usd`` is ``--budget``."""
    if field == "inputs":
        return "INPUTS"
    long = [flag for flag in _FLAGS.get(field, {}).get("flags", []) if flag.startswith("--")]
    return long[0].split("/")[0] if long else "--" + field.replace("_", "-")


def given_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Only those flags that were on the command line, as fields of JobSpec.

    Raises:
        InvalidSpecError: a tag is not ``key=value``, or a file with a text cannot be read.
    """
    given = {field: value for field, value in values.items() if value is not None and value != ()}
    _read_files(given)
    if "tags" in given:
        given["tags"] = dict(_tag(text) for text in given["tags"])
    if "logit_bias" in given:
        given["logit_bias"] = dict(_bias(text) for text in given["logit_bias"])
    if "budget_usd" in given:
        given["budget_usd"] = str(given["budget_usd"]).strip().removeprefix("$").replace(",", "")
    return given


def _read_files(given: dict[str, Any]) -> None:
    """Put what files say in the place of their names."""
    for field in ("template", "system"):
        if str(given.get(field, "")).startswith("@"):
            given[field] = _read_text(field, given[field][1:])
    for field in ("json_schema", "guided_grammar"):
        if field in given and not str(given[field]).lstrip().startswith("{"):
            given[field] = _read_text(field, given[field])
    for field, signs in _FILES.items():
        text = str(given.get(field, ""))
        if text and not any(sign in text for sign in signs):
            given[field] = _read_text(field, text.removeprefix("@"))
    if "stages" in given:
        given["stages"] = read_stage_file(str(given["stages"]))


def _read_text(field: str, path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InvalidSpecError(f"{flag_of(field)} {path} cannot be read: {reason}", param=field) from None


def _tag(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InvalidSpecError(f"--tag {text!r} is not KEY=VALUE, such as --tag team=search", param="tags")
    return key, value


def _bias(text: str) -> tuple[str, str]:
    token_id, equals, bias = text.partition("=")
    if not token_id or not equals:
        raise InvalidSpecError(
            f"--logit-bias {text!r} is not ID=BIAS, such as --logit-bias 50256=-100", param="logit_bias"
        )
    return token_id, bias


def build_spec(values: Mapping[str, Any]) -> JobSpec:
    """Make the JobSpec that the flags describe.

    Raises:
        InvalidSpecError: in one sentence, with the flag at fault.
    """
    given = given_fields(values)
    for field in ("inputs", "model"):
        if field not in given:
            example = "batchinfer run prompts.parquet --model model.gguf"
            missing = "the input" if field == "inputs" else flag_of(field)
            raise InvalidSpecError(f"{missing} is missing, as in: {example}", param=field)
    try:
        return JobSpec(**given)
    except ValidationError as error:
        raise spec_error(error) from None


def spec_error(error: ValidationError) -> InvalidSpecError:
    """One sentence for people out of pydantic's report: the first fault, with its flag."""
    fault = error.errors(include_url=False, include_context=False)[0]
    field = str(fault["loc"][0]) if fault["loc"] else None
    message = fault["msg"].removeprefix("Value error, ")
    if field is None:
        return InvalidSpecError(message)
    value = repr(fault["input"])[:100]
    named = flag_of(field) if value in message or field == "stages" else f"{flag_of(field)} {value}"
    return InvalidSpecError(f"{named}: {message}", param=field)
