"""Bodies that the API takes besides :class:`~batchinfer.jobs.spec.JobSpec`, and those it answers with besides views."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from batchinfer.jobs.views import JobView, View


class Body(BaseModel):
    """Base of request bodies: a misspelt field is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ResumeBody(Body):
    """Options of a resume."""

    budget_usd: Annotated[Decimal | None, Field(gt=0, max_digits=18, decimal_places=9)] = None
    """A new budget for the whole job, above what it has spent."""


class RetryBody(Body):
    """Options of a retry."""

    statuses: Annotated[tuple[Literal["errored", "expired", "cancelled"], ...], Field(min_length=1)] = (
        "errored",
        "expired",
        "cancelled",
    )
    """Rows that ended so run again."""


class RetryView(View):
    """What a retry did."""

    retried_rows: int
    job: JobView


class ErrorDetail(View):
    """One error."""

    message: str
    type: str
    """``invalid_request_error`` or ``server_error``."""
    param: str | None
    """The field at fault, if one is."""
    code: str
    """Stable, for programs."""


class ErrorBody(View):
    """Every answer with a status from 400 up."""

    error: ErrorDetail


class Health(View):
    """The process answers."""

    status: Literal["ok"] = "ok"
    version: str


class Readiness(View):
    """Whether jobs can be taken; ``checks`` has a sentence for each thing that is looked at."""

    status: Literal["ready", "not_ready"]
    checks: dict[str, str]
