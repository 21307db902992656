"""What people and programs see of prices, usage and budgets: the CLI's ``--json`` and the REST API give these."""

from datetime import datetime
from typing import Literal

from batchinfer.jobs.views import Usd, View


class ModelPriceView(View):
    """A model's list price, in dollars per million tokens, from a moment on."""

    model: str
    valid_from: datetime
    input_usd: Usd
    cached_input_usd: Usd
    output_usd: Usd


class DevicePriceView(View):
    """What an hour of a kind of device costs from a moment on."""

    device: str
    valid_from: datetime
    usd_per_hour: Usd


class PriceBookView(View):
    """The price book: every price that was ever set, the latest of each first."""

    models: list[ModelPriceView]
    devices: list[DevicePriceView]


class UsageLine(View):
    """What belongs to one group; fields that were not grouped by are null."""

    day: str | None = None
    """A UTC day."""
    tenant: str | None = None
    """Empty: device time that belongs to no job, such as an idle engine's."""
    model: str | None = None
    job: str | None = None
    tag: str | None = None
    """``name=value``, as the job had it when the money was spent. A job with two tags is in two lines."""
    num_rows: int
    """Rows that got an outcome; one that was run again counts again."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    metered_usd: Usd
    """Device time of rows."""
    overhead_usd: Usd
    """Device time that no row caused."""
    total_usd: Usd
    """Both."""
    list_usd: Usd
    saved_usd: Usd
    """What copied rows would have cost."""
    device_seconds: float


class UsageView(View):
    """A page of usage, in the order of its groups."""

    object: Literal["list"] = "list"
    group_by: list[str]
    data: list[UsageLine]
    has_more: bool
    next_after: str | None
    """Send it as ``after`` for the next page."""


class BudgetView(View):
    """What a tenant may spend in a month, and how that stands."""

    object: Literal["budget"] = "budget"
    tenant: str
    month: str | None
    """``2026-11``; null is every month that has no budget of its own."""
    limit_usd: Usd
    spent_month: str
    """The month that the figures are of."""
    spent_usd: Usd
    """Rows and overhead, booked."""
    in_flight_usd: Usd
    """Used by running attempts and not booked yet: by so much a spent budget may still be exceeded."""
    remaining_usd: Usd
    overrun_usd: Usd
    """Booked beyond the limit."""
    is_spent: bool
    held_jobs: list[str]
    """Jobs that wait for a raise, at most 100; `batchinfer resume` goes on with them."""


class BudgetList(View):
    """Budgets, by tenant and month."""

    object: Literal["list"] = "list"
    data: list[BudgetView]
    has_more: bool = False


class IntervalView(View):
    """An expected value and the bounds within which the outcome lies with the given confidence."""

    low: float
    expected: float
    high: float


class UsdIntervalView(View):
    """The same in dollars."""

    low: Usd
    expected: Usd
    high: Usd


class Compared(View):
    """One figure of a job: what was expected when it was planned, and what it became."""

    what: Literal["prompt_tokens", "completion_tokens", "device_seconds", "cost_usd"]
    predicted: IntervalView
    actual: float | None
    """None until the job has completed."""
    error: float | None
    """Actual over expected, minus one."""
    is_covered: bool | None
    """Whether the interval had it."""


class ForecastReport(View):
    """What was expected of a job, and how it came out."""

    job_id: str
    confidence: float
    length_basis: str
    """What the expected answer length rests on."""
    speed_basis: str
    """What the expected device time rests on."""
    figures: list[Compared]
