"""What a schedule was asked to do."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from batchinfer.errors import InvalidSpecError
from batchinfer.jobs.cron import Calendar
from batchinfer.jobs.schedule_template import check_template, render
from batchinfer.jobs.spec import JobSpec

MAX_ACTIVE = 100
_DURATION = re.compile(r"(\d{1,9})\s*([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_TEMPLATES = ("output", "name")


class CatchUp(StrEnum):
    """What happens to moments that passed while no worker was there, or the schedule was paused."""

    NONE = "none"
    LATEST = "latest"
    ALL = "all"


class Overlap(StrEnum):
    """What a run does while as many runs as allowed are still at work."""

    SKIP = "skip"
    QUEUE = "queue"
    CANCEL_PREVIOUS = "cancel_previous"


class MissingInput(StrEnum):
    """What a run does whose input is not there."""

    FAIL = "fail"
    SKIP = "skip"
    WAIT = "wait"


def parse_duration(text: str, param: str) -> int:
    """Read ``90s``, ``10m``, ``2h``, ``1d`` (or a number of seconds) as seconds.

    Raises:
        ValueError: it is none.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None and not text.strip().isdigit():
        raise ValueError(f"{param} {text!r} is no duration such as 90s, 10m, 2h or 1d")
    seconds = int(match[1]) * _SECONDS[match[2]] if match else int(text)
    if seconds > timedelta(days=366).total_seconds():
        raise ValueError(f"{param} {text!r} is longer than a year")
    return seconds


class ScheduleSpec(BaseModel):
    """A schedule as asked for. Field names equal the CLI's flags and the REST body's."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: Annotated[str, Field(pattern=r"^[\w][\w.-]{0,99}$")]
    """A name of letters, digits, ``_``, ``-`` and ``.``, unique."""
    cron: str
    """Five fields of cron (minute hour day month weekday), or ``@daily`` and its like."""
    tz: str = "UTC"
    """Time zone of the cron expression."""
    job: dict[str, Any]
    """The job to submit, a JobSpec; ``inputs``, ``output``, ``name`` and the values of ``tags`` may have variables, and
    ``deadline`` is a duration."""
    catch_up: CatchUp = CatchUp.LATEST
    """What to do about moments that passed while no worker was there: none, the latest, or all of them."""
    overlap: Overlap = Overlap.SKIP
    """What a run does while earlier ones are at work: skip, queue, or cancel_previous."""
    max_active: Annotated[int, Field(ge=1, le=MAX_ACTIVE)] = 1
    """Runs that may be at work at once."""
    jitter: str = "0s"
    """Runs start up to this long after their moment, so that many schedules do not start at once."""
    missing_input: str = "fail"
    """What a run does whose input is not there: fail, skip, or wait:DURATION."""

    @field_validator("jitter")
    @classmethod
    def _jitter_is_a_duration(cls, value: str) -> str:
        parse_duration(value, "jitter")
        return value

    @field_validator("missing_input")
    @classmethod
    def _missing_input_is_known(cls, value: str) -> str:
        policy, colon, duration = value.partition(":")
        if policy not in list(MissingInput) or bool(colon) != (policy == MissingInput.WAIT):
            raise ValueError(f"missing_input {value!r} is none of fail, skip and wait:DURATION (such as wait:2h)")
        if colon:
            parse_duration(duration, "missing_input")
        return value

    @model_validator(mode="after")
    def _deadline_is_relative(self) -> Self:
        deadline = self.job.get("deadline")
        if deadline is not None and not (isinstance(deadline, str) and _DURATION.fullmatch(deadline.strip().lower())):
            raise ValueError(f"deadline {deadline!r} must be a duration such as 6h: it counts from each run's start")
        return self

    @property
    def jitter_seconds(self) -> int:
        """Most jitter."""
        return parse_duration(self.jitter, "jitter")

    @property
    def missing(self) -> tuple[MissingInput, int]:
        """The policy, and how many seconds to wait."""
        policy, _, duration = self.missing_input.partition(":")
        return MissingInput(policy), parse_duration(duration, "missing_input") if duration else 0

    def calendar(self) -> Calendar:
        """When it is due. Raises InvalidSpecError."""
        return Calendar.parse(self.cron, self.tz)


def check_templates(job: dict[str, Any]) -> None:
    """Check every template of a job. Raises InvalidSpecError."""
    for text in _inputs(job):
        check_template(text, "inputs")
    for field in _TEMPLATES:
        if isinstance(job.get(field), str):
            check_template(job[field], field)
    for text in (job.get("tags") or {}).values():
        check_template(str(text), "tags")


def _inputs(job: dict[str, Any]) -> list[str]:
    inputs = job.get("inputs") or []
    return [inputs] if isinstance(inputs, str) else [str(text) for text in inputs]


def render_job(job: dict[str, Any], values: dict[str, Any]) -> JobSpec:
    """The spec of one run's job.

    Raises:
        InvalidSpecError: a template or a field is wrong.
    """
    filled = dict(job)
    filled["inputs"] = [render(text, values, "inputs") for text in _inputs(job)]
    for field in _TEMPLATES:
        if isinstance(job.get(field), str):
            filled[field] = render(job[field], values, field)
    filled["tags"] = {key: render(str(text), values, "tags") for key, text in (job.get("tags") or {}).items()}
    return parse_job(filled)


def parse_job(fields: dict[str, Any]) -> JobSpec:
    """A JobSpec out of JSON. Raises InvalidSpecError with the first fault."""
    try:
        return JobSpec(**fields)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        param = str(fault["loc"][0]) if fault["loc"] else None
        where = f"{param}: " if param else ""
        raise InvalidSpecError(where + fault["msg"].removeprefix("Value error, "), param=param) from None


def frozen_job(job: dict[str, Any], sample: JobSpec) -> dict[str, Any]:
    """The job as it is stored: today's defaults written out, templates and the deadline as they were given."""
    kept = {field: job[field] for field in ("inputs", "tags", *_TEMPLATES, "deadline") if field in job}
    if isinstance(kept.get("inputs"), str):
        kept["inputs"] = [kept["inputs"]]
    return sample.model_dump(mode="json") | {"deadline": None, "output": None} | kept


def utc_now() -> datetime:
    """Now, aware."""
    return datetime.now(UTC)
