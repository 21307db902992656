"""Stages of a job: each row is asked several things, one after the other, and may be left out on the way."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from batchinfer.chat_params import ToolParser
from batchinfer.guided import GUIDES
from batchinfer.sampling_params import SamplingParams

MAX_STAGES = 16
MAX_TEXT = 64 * 1024
"""Characters of one template."""
MAX_MESSAGES = 64
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}", re.ASCII)
_RESERVED = frozenset({
    "row", "loop", "self", "super", "varargs", "kwargs", "caller", "true", "false", "none", "and", "or", "not", "in", "is", "if",
    "else", "for", "range", "dict", "namespace",
})  # fmt: skip
"""Words that mean something else in templates."""
NOT_OF_A_STAGE = frozenset({"adapter"})
"""Sampling parameters that a stage cannot have of its own."""
_GUIDES = (*GUIDES, "response_format")


class StageMessage(BaseModel):
    """One message of a stage's conversation; ``content`` is a template."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[str, Field(max_length=MAX_TEXT)]


class Stage(BaseModel):
    """One step of a row: a text that the model generates, or a filter that decides whether the row goes on.

    Exactly one of ``prompt``, ``messages`` and ``filter`` is set. Templates and filters may use the input's columns and
    the stages before by name: ``{{ draft.output }}``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    """Name of the stage and of its result column: a letter, then letters, digits and ``_``."""
    prompt: Annotated[str | None, Field(max_length=MAX_TEXT)] = None
    """Jinja2 template of the prompt, which is completed as it is; with ``system`` it is the user's message."""
    messages: Annotated[tuple[StageMessage, ...] | None, Field(max_length=MAX_MESSAGES)] = None
    """Chat messages whose contents are templates."""
    system: Annotated[str | None, Field(max_length=MAX_TEXT)] = None
    """System message, a template; makes a plain prompt a chat."""
    filter: Annotated[str | None, Field(max_length=MAX_TEXT)] = None
    """Jinja2 expression; a row for which it is false ends here, as ``filtered``."""
    sampling: dict[str, Any] = {}
    """Sampling parameters that differ from the job's; ``seed`` is the stage's as a job's is the job's."""

    @field_validator("name")
    @classmethod
    def _name_is_a_word(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError(f"{value[:100]!r} is no name: take a letter, then up to 63 letters, digits and _")
        if value.casefold() in _RESERVED:
            raise ValueError(f"{value!r} means something else in templates: choose another name")
        return value

    @model_validator(mode="before")
    @classmethod
    def _guides_may_stand_alone(cls, data: object) -> object:
        """``json_schema``, ``guided_choice`` and the like may stand beside the prompt: they are sampling parameters."""
        if not isinstance(data, dict):
            return data
        given = {name: data[name] for name in _GUIDES if name in data}
        sampling = data.get("sampling") or {}
        if not given or not isinstance(sampling, dict):
            return data
        if both := sorted(given.keys() & sampling.keys()):
            raise ValueError(f"{both[0]} stands in the stage and in its sampling: leave one out")
        return {name: value for name, value in data.items() if name not in given} | {"sampling": {**sampling, **given}}

    @field_validator("sampling", mode="before")
    @classmethod
    def _nothing_is_no_sampling(cls, value: object) -> object:
        return {} if value is None else value

    @field_validator("sampling")
    @classmethod
    def _sampling_is_known(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name in NOT_OF_A_STAGE:
                raise ValueError(f"a stage has no {name} of its own: give it to the job, whose stages all use it")
            if name not in SamplingParams.model_fields and name != "response_format":
                raise ValueError(f"there is no sampling parameter {name[:100]!r}")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in ("prompt", "messages", "filter") if getattr(self, name) is not None]
        if len(given) != 1:
            what = "has " + " and ".join(given) if given else "has none of them"
            raise ValueError(f"a stage is a prompt, messages or a filter, and this one {what}")
        if self.filter is not None and (self.sampling or self.system is not None):
            raise ValueError("a filter asks no model: leave sampling and system out, or give the stage a prompt")
        text = self.prompt if self.filter is None else self.filter
        if text is not None and not text.strip():
            raise ValueError(f"the {given[0]} is empty")
        if self.filter is not None and self.filter.lstrip().startswith(("{{", "{%")):
            raise ValueError("a filter is an expression, such as draft.output | length > 20: leave the braces out")
        if self.messages == ():
            raise ValueError("messages is empty: give at least one {role, content}")
        if self.messages and self.system is not None and self.messages[0].role in ("system", "developer"):
            raise ValueError("the messages begin with a system message already: leave system out")
        return self

    @property
    def generates(self) -> bool:
        """Whether the model is asked."""
        return self.filter is None

    def params(self, job: SamplingParams) -> SamplingParams:
        """Parameters of its rows: the job's, and over them the stage's. A seed is not among them, see :meth:`seed`.

        Raises:
            ValueError: they do not fit together; pydantic's ``ValidationError`` names the field at fault.
        """
        base = job.model_dump()
        if self.sampling.get("tools"):  # a job without tools does not look for calls
            base["tool_parser"] = ToolParser.AUTO
        if any(name in self.sampling for name in _GUIDES):  # the stage's own replaces the job's, of whichever kind
            base = {name: value for name, value in base.items() if name not in GUIDES}
        return SamplingParams(**{**base, **self.sampling, "seed": None})

    def seed(self, job_seed: int | None) -> int | None:
        """What the seeds of its rows are made of, in ``[0, 2**63)``.

        The stage's own if it has one; else one of the job's seed and the stage's name, so that two stages with the same
        prompt do not draw the same answer.
        """
        own = self.sampling.get("seed")
        if own is not None:
            return int(own)
        digest = hashlib.blake2b(f"{job_seed or 0}:{self.name}".encode(), digest_size=8, person=b"stage").digest()
        return int.from_bytes(digest, "big") >> 1


def read_stages(value: object) -> tuple[Stage, ...]:
    """Stages out of plain data: a list of tables, or a table whose only key is ``stages``.

    Raises:
        ValueError: in one sentence, with the stage at fault.
    """
    if isinstance(value, dict):
        if set(value) != {"stages"}:
            raise ValueError(
                f"a pipeline has the one key stages, but this has {', '.join(map(str, value)) or 'none'}"[:300]
            )
        value = value["stages"]
    if not isinstance(value, list | tuple):
        raise ValueError("stages is not a list: each stage is an item with a name and a prompt, messages or filter")  # noqa: TRY004 -- pydantic reports ValueErrors
    if len(value) > MAX_STAGES:
        raise ValueError(f"there are {len(value)} stages; at most {MAX_STAGES}")
    stages = tuple(_read_stage(item, number) for number, item in enumerate(value, 1))
    seen: set[str] = set()
    for stage in stages:
        if stage.name.casefold() in seen:
            raise ValueError(f"stage {stage.name!r}: there is a stage of that name already; give each its own")
        seen.add(stage.name.casefold())
    if stages and not any(stage.generates for stage in stages):
        raise ValueError("no stage has a prompt or messages: a job of filters alone generates nothing")
    return stages


def _read_stage(item: object, number: int) -> Stage:
    if isinstance(item, Stage):
        return item
    if not isinstance(item, dict):
        raise ValueError(f"stage {number} is not a table with a name and a prompt, messages or filter")  # noqa: TRY004 -- as above
    name = item.get("name")
    where = f"stage {name[:100]!r}" if isinstance(name, str) else f"stage {number}"
    if not isinstance(name, str):
        raise ValueError(f"{where} has no name: give it one, such as name: draft")  # noqa: TRY004 -- as above
    try:
        return Stage.model_validate(item)
    except ValidationError as error:
        raise ValueError(f"{where}: {_sentence(error)}") from None


def _sentence(error: ValidationError) -> str:
    """The first fault, for people."""
    fault = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, fault["loc"]))
    if fault["type"] == "extra_forbidden":
        known = ", ".join([*Stage.model_fields, *_GUIDES]) if "." not in place else "role, content"
        return f"there is no key {place[:100]!r}; there are {known}"
    message = str(fault["msg"]).removeprefix("Value error, ")
    return f"{place}: {message}" if place else message


def check_params(stages: tuple[Stage, ...], job: SamplingParams) -> None:
    """Refuse stages whose sampling parameters are wrong. Raises ValueError, with the stage at fault."""
    for stage in stages:
        if not stage.generates:
            continue
        try:
            stage.params(job)
            SamplingParams(seed=stage.sampling.get("seed"))
        except ValidationError as error:
            raise ValueError(f"stage {stage.name!r}: sampling: {_sentence(error)}") from None
