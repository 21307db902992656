"""Bodies that the API takes besides :class:`~batchinfer.jobs.spec.JobSpec`, and those it answers with besides views."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from batchinfer.jobs.tenants import MAX_WEIGHT, MIN_WEIGHT, TENANT_ID
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


Text = Annotated[str, Field(max_length=200)]
Root = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f]+$")]
Roots = Annotated[tuple[Root, ...], Field(max_length=100)]
Weight = Annotated[float, Field(ge=MIN_WEIGHT, le=MAX_WEIGHT)]
TEN_YEARS = 10 * 366 * 86400


class KeyBody(Body):
    """A key to make."""

    tenant: Annotated[str | None, Field(pattern=f"^{TENANT_ID.pattern}$")] = None
    """Whom it acts for; None is the caller's own tenant."""
    platform: bool = False
    """A key that sees every tenant."""
    role: Literal["viewer", "submitter", "admin"] = "submitter"
    name: Text | None = None
    """A name for people."""
    scopes: Annotated[tuple[Annotated[str, Field(max_length=40)], ...], Field(max_length=32)] = ()
    """``NOUN:read``, ``NOUN:write`` or ``NOUN:*``; none: all that the role may."""
    expires_in_seconds: Annotated[int | None, Field(ge=1, le=TEN_YEARS)] = None
    """None: never."""
    rate_per_minute: Annotated[int | None, Field(ge=1, le=1_000_000)] = None
    """Most requests a minute; None: as the server says."""


class RotateBody(Body):
    """How a rotation goes."""

    overlap_seconds: Annotated[int, Field(ge=0, le=TEN_YEARS)] = 86400
    """How long the old key lives on."""


class TenantBody(Body):
    """A tenant to add."""

    id: Annotated[str, Field(pattern=f"^{TENANT_ID.pattern}$")]
    """1 to 40 of a-z, 0-9 and -."""
    name: Text | None = None
    """A name for people."""
    input_roots: Roots = ()
    """Folders or URIs below which inputs must lie; none: as the installation says."""
    output_roots: Roots = ()
    weight: Weight = 1.0
    """Its share of the workers while others have work, too: 2 gets twice as much as 1."""


class TenantChanges(Body):
    """What is given is changed."""

    name: Text | None = None
    input_roots: Roots | None = None
    output_roots: Roots | None = None
    weight: Weight | None = None
    disabled: bool | None = None
    """True: its keys are refused."""


class RetryView(View):
    """What a retry did."""

    retried_rows: int
    job: JobView


class VerifyView(View):
    """What a proof found; see ``batchinfer verify``."""

    output: str
    job_id: str
    num_files: int
    num_rows: int
    counts: dict[str, int]
    input_checked: bool
    problems: list[str]
    ok: bool
    """Whether there is no problem."""


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


COMMON_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in {
        400: "The body is not JSON.",
        401: "No API key where one is needed, or a bad one.",
        403: "The key is good, but not for this.",
        404: "No such thing, or none that the caller may see.",
        413: "The body is too large.",
        422: "A value does not fit; the message says which and why.",
        429: "The key asks too often; `Retry-After` says when to come back.",
        503: "The database does not answer; send the request again.",
    }.items()
}
"""What middleware may answer in the place of every route. A route that says more of a status wins."""


class Health(View):
    """The process answers."""

    status: Literal["ok"] = "ok"
    version: str


class Readiness(View):
    """Whether jobs can be taken; ``checks`` has a sentence for each thing that is looked at."""

    status: Literal["ready", "not_ready"]
    checks: dict[str, str]


class TriggerBody(Body):
    """What a run by hand stands for."""

    logical_date: Annotated[str, Field(max_length=40)] | None = None
    """A day in the schedule's zone or an ISO 8601 time; now if left out."""


class BackfillBody(Body):
    """A range of moments to run."""

    start: Annotated[str, Field(max_length=40)]
    """First day (in the schedule's zone) or ISO 8601 time."""
    end: Annotated[str, Field(max_length=40)]
    """Last day, included."""
    parallel: Annotated[int, Field(ge=1, le=100)] = 1
    """Runs at work at once."""
    retry: bool = False
    """Run dates again that were skipped, or failed, or did not wholly succeed."""


class WebhookBody(Body):
    """A receiver."""

    url: Annotated[str, Field(max_length=2048)]
    """An https URL on the public internet, or in the networks that the server allows."""
    events: list[Annotated[str, Field(max_length=40)]] = []
    """Those that it wants, such as `job.failed`; none: all."""
