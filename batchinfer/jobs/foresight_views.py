"""What people and programs see of a job before it runs."""

from typing import Literal

from batchinfer.jobs.money_views import IntervalView, UsdIntervalView
from batchinfer.jobs.views import Usd, View


class EstimateView(View):
    """What a job would be: rows, tokens, time and cost. Intervals hold the outcome with probability ``confidence``.

    Null: nothing is known. Time and cost need a past job of the model on this kind of device, or a probe.
    """

    object: Literal["estimate"] = "estimate"
    model: str
    num_rows: int
    sampled_rows: int
    is_whole: bool
    """Every row was looked at, so that prompt tokens are exact."""
    runnable_rows: float
    """Rows that will run."""
    errors: dict[str, int]
    """Rows of the sample that cannot run, by code."""
    confidence: float
    prompt_tokens: IntervalView
    completion_tokens: IntervalView
    length_basis: str
    """What the answers' length rests on."""
    device_seconds: IntervalView | None
    seconds: IntervalView | None
    """From the first row to the last, on ``num_workers``."""
    cost_usd: UsdIntervalView | None
    """Metered."""
    list_usd: UsdIntervalView | None
    speed_basis: str
    """What time and cost rest on."""
    num_workers: int
    device: str | None
    usd_per_hour: Usd
    warnings: list[str]


class PrefixGroup(View):
    """Rows that begin alike."""

    num_tokens: int
    num_rows: int
    first_row: int
    saved_tokens: int
    """Prompt tokens that are computed once for all of them."""


class Bucket(View):
    """Rows by the length of their prompts in tokens, both ends included."""

    low: int
    high: int
    num_rows: int


class ShardPlanView(View):
    """How the input would be cut."""

    num_shards: int
    rows_min: int
    rows_max: int
    tokens_max: int
    """Estimated, prompts and longest answers."""


class Makespan(View):
    """How long the job would take on a kind of device, and what it would cost."""

    device: str
    num_workers: int
    seconds: IntervalView
    cost_usd: UsdIntervalView | None
    """Null: the device has no price."""
    basis: str
    """What the figures rest on: past jobs, or the device's data sheet (``roofline, not measured``)."""


class Advice(View):
    """Something that would make the job cheaper, with what it would save."""

    kind: Literal["instruction_first", "reuse_results", "sort_rows", "cap_answers"]
    text: str
    saved_share: float
    """Of all tokens that the job computes, 0 to 1; for ``cap_answers`` of the most that it can compute."""
    saved_tokens: int


class ExplainView(View):
    """An input seen as the engine sees it."""

    object: Literal["explanation"] = "explanation"
    model: str
    num_rows: int
    looked_at: int
    """Rows that were tokenised; figures below are of these."""
    errors: dict[str, int]
    prompt_tokens: int
    prompt_tokens_mean: float
    prompt_tokens_max: int
    histogram: list[Bucket]
    unique_rows: int
    unique_is_exact: bool
    shared_tokens: int
    shared_share: float
    """Prompt tokens that an endless cache would not compute again, 0 to 1."""
    shared_is_exact: bool
    """False: too many different prefixes to hold, and what is shared is at least so much."""
    expected_hit_rate: float
    """Prompt tokens that the KV cache of ``kv_blocks`` blocks will have, 0 to 1."""
    kv_blocks: int
    window_rows: int
    groups: list[PrefixGroup]
    """The prefixes that save most."""
    shards: ShardPlanView
    estimate: EstimateView
    makespans: list[Makespan]
    advice: list[Advice]
