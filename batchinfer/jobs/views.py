"""What people and programs see of a job. The CLI's ``--json`` and the REST API give exactly these documents.

Amounts are decimal text in dollars (``"0.000012345"``), so that no reader rounds them; times are ISO 8601 in UTC.
"""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, PlainSerializer

Usd = Annotated[Decimal, PlainSerializer(lambda usd: f"{usd:f}", return_type=str)]
"""Dollars with nine digits after the point, as text in JSON."""


class View(BaseModel):
    """Base of all views: immutable, described by its fields' docstrings."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class RowCounts(View):
    """Rows by outcome. They never go down, except that ``retry`` moves rows back to ``remaining``."""

    total: int | None
    """All rows; unknown until the input is read."""
    remaining: int | None
    """Rows without an outcome."""
    succeeded: int
    errored: int
    expired: int
    cancelled: int
    skipped: int
    deduplicated: int
    filtered: int = 0
    """Left out by a filter of the job's stages."""


class TokenUsage(View):
    """Tokens of all rows so far."""

    prompt_tokens: int
    cached_tokens: int
    """Part of ``prompt_tokens`` that was found in the KV cache."""
    completion_tokens: int


class Progress(View):
    """How fast the job goes; None where nothing is known yet or the job does not run."""

    fraction: float | None
    """Rows with an outcome over all rows, 0 to 1."""
    rows_per_second: float | None
    tokens_per_second: float | None
    """Generated tokens a second, over all workers."""
    eta_seconds: float | None
    """Time to the end at this speed."""
    deadline_probability: float | None = None
    """That the last row ends before the deadline, 0 to 1; None without a deadline, or where no speed is known yet."""


class CostSoFar(View):
    """What the job has cost so far."""

    metered_usd: Usd
    """Device time of its rows."""
    overhead_usd: Usd
    """Device time that no row caused: loading, idling, work lost with a worker."""
    list_usd: Usd | None
    """At list price; None without a price for the model."""
    budget_usd: Usd | None


class Reuse(View):
    """What a job with ``reuse_results`` did not have to compute."""

    rows: int
    """Rows whose answers are copies; the status ``deduplicated``."""
    hit_rate: float | None
    """Their share of the rows that have an answer, 0 to 1; None without one."""
    saved_usd: Usd
    """What computing the rows that were copied cost, metered."""
    saved_list_usd: Usd | None
    """What they would have cost at list price; None without a price for the model."""


class JobFault(View):
    """Why a job as a whole failed."""

    code: str
    message: str


class EngineUse(View):
    """How one engine was used while it worked on a job; what it did for other jobs meanwhile is included.

    Shares are between 0 and 1. Written whenever a shard leaves the engine.
    """

    id: str
    """Of the engine's process; a restarted engine is another."""
    kernels: str
    layers: str
    recipe: str
    """How the model is quantised; empty if it is not."""
    steps: int
    tokens_per_second: float
    """Generated tokens a second of the engine's steps."""
    mean_batch_size: float
    """Rows computed a step."""
    occupancy: float
    """The same as a share of the most that may run at once."""
    reuse: float | None
    """Cached prompt tokens over those that a cache without end would have given; None if no prompts begin alike."""
    padding: float
    """Share of the computed rows that were padding."""
    roofline_share: float | None = None
    """Share of what the device's measured ceilings of computing and memory allow; None if they are not known."""
    batched_tokens_limit: int | None = None
    """Most tokens computed in one step: as configured, or as measured when the model was first loaded here."""
    guessed_tokens: int = 0
    """Tokens guessed and computed ahead (speculation)."""
    accepted_tokens: int = 0
    """Of these, the right ones."""
    preemptions: int
    """Rows put back and computed again since the KV cache was full."""
    misestimates: int
    """Answers longer than was estimated."""
    out_of_memory: int = 0
    """Steps that ran out of memory, and were computed again in smaller ones."""
    time_split: dict[str, float]
    """Shares of a step: gemm, attention, elementwise, head, sampling, schedule, python."""


class DriftView(View):
    """What the sentinel found: how far answers are from what float32 would have expected at the same places."""

    rows_compared: int
    tokens_compared: int
    kl_mean: float
    """Kullback-Leibler divergence, nats a token."""
    kl_p99: float
    kl_max: float
    agreement: float
    """Share of tokens whose likeliest successor is the same."""
    perplexity: float
    """Of the answers, to the precision that the job runs in."""
    reference_perplexity: float
    differences: list[dict[str, Any]]
    """Where the likeliest token differs most: row, position in the answer, both tokens, divergence."""
    threshold: float
    is_above: bool
    """Whether ``kl_mean`` is above the threshold."""


class JobView(View):
    """One job: what it is, how far it is, what it has cost."""

    id: str
    object: Literal["job"] = "job"
    tenant: str
    """Whose job it is."""
    name: str | None
    tags: dict[str, str]
    model: str
    state: str
    outcome: str | None
    """``succeeded``, ``partial`` or ``none``, once the job has ended."""
    error: JobFault | None
    inputs: list[str]
    output: str
    """Folder or file where results go."""
    rows: RowCounts
    usage: TokenUsage
    progress: Progress
    cost: CostSoFar
    reuse: Reuse | None
    """None unless the job has ``reuse_results``."""
    drift: DriftView | None = None
    """What the sentinel found so far; None without one."""
    warnings: list[str]
    engines: list[EngineUse] = []
    """Engines that worked on the job, the latest last."""
    waits_for: str | None = None
    """Why a job that could run does not, in a sentence; None while it runs or has ended. Said of one job, not in lists."""
    pool: str = "default"
    device_kind: str | None = None
    priority: int
    deadline: datetime | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


class JobList(View):
    """A page of jobs, newest first, in the shape of OpenAI's lists."""

    object: Literal["list"] = "list"
    data: list[JobView]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ErrorSample(View):
    """One row that did not succeed."""

    row_index: int
    status: str
    code: str
    type: str
    message: str
    retryable: bool


class ErrorKind(View):
    """The rows with one error code."""

    code: str
    meaning: str
    advice: str
    retryable: bool
    num_samples: int
    """How many rows are kept as samples; the output has them all."""


class ErrorPage(View):
    """Rows that did not succeed. At most a bounded number of samples is kept; the result files have every row."""

    object: Literal["list"] = "list"
    job_id: str
    failed_rows: int
    """All rows that errored, expired or were cancelled, sampled or not."""
    kinds: list[ErrorKind]
    data: list[ErrorSample]
    has_more: bool


class ResultFile(View):
    """One Parquet file of results."""

    path: str
    num_rows: int
    num_bytes: int
    sha256: str


class ResultsView(View):
    """Where a job's results are. Until the job has ended this is what can be read so far."""

    job_id: str
    state: str
    output: str
    is_complete: bool
    manifest: str | None
    files: list[ResultFile]


class PreviewRow(View):
    """One result row, for a first look."""

    row_index: int
    status: str
    prompt: str | None
    """The prompt, or the last message; None where a template made it."""
    output: str | None
    finish_reason: str | None
    error_code: str | None
    error_message: str | None
    usage: TokenUsage
    cost_usd: Usd | None


class RowPage(View):
    """A page of result rows, in input order."""

    object: Literal["list"] = "list"
    job_id: str
    data: list[PreviewRow]
    has_more: bool
    next_after: int | None
    """Send it as ``after`` for the next page. A page may be empty and have a next one: rows of a rare status are looked
    for in a bounded number of rows at a time."""


class EventView(View):
    """Something that happened to a job."""

    id: int
    """Counts up; send the last one as ``after`` to get what came since."""
    object: Literal["job.event"] = "job.event"
    job_id: str
    at: datetime
    kind: str
    """A stable word, such as ``submitted``, ``state`` or ``retry``."""
    data: dict[str, Any]


class EventList(View):
    """A page of events, oldest first."""

    object: Literal["list"] = "list"
    data: list[EventView]
    has_more: bool


class WorkerView(View):
    """A worker that registered and did not say goodbye."""

    id: str
    object: Literal["worker"] = "worker"
    hostname: str
    pid: int
    device: str
    version: str
    models: list[str]
    """Loaded ones."""
    pools: list[str] = ["default"]
    """It runs jobs that ask for one of them; ``default`` are those that ask for none."""
    device_kinds: list[str] = []
    """Names of its hardware that jobs may ask for."""
    only_models: list[str] | None = None
    """None: it runs any model."""
    usd_per_hour: Usd
    is_alive: bool
    """It gave a sign of life within the last two minutes."""
    is_healthy: bool = True
    """False: its device failed, and it takes no shards until the device answers a probe or the worker is restarted."""
    fault: str | None = None
    """What is wrong with its device."""
    started_at: datetime
    last_seen_at: datetime
    stats: dict[str, Any]
    """What its engine says of itself."""


class WorkerList(View):
    """All workers, newest first."""

    object: Literal["list"] = "list"
    data: list[WorkerView]
    has_more: bool


class QueueLane(View):
    """What waits and runs of one model in one pool, on one kind of hardware."""

    model: str
    pool: str
    device_kind: str | None
    """None: any hardware."""
    waiting_shards: int
    waiting_rows: int
    waiting_tokens: int
    """As the planner estimated them, prompts and answers."""
    running_shards: int
    running_rows: int
    """Rows of leased shards that have no outcome yet."""
    running_tokens: int
    device_seconds: float
    """Estimated device time of what waits and runs, on one device."""
    is_measured: bool
    """Whether the model has run lately; else ``device_seconds`` is a guess, from what other models took."""
    workers: int
    """Living workers that may serve it."""
    workers_wanted: int
    """Workers that would do it within ``target_seconds``: at least 1 while there is work, at most one a shard."""


class QueueView(View):
    """The backlog by model, pool and kind of hardware, for whoever scales workers."""

    object: Literal["queue"] = "queue"
    target_seconds: float
    data: list[QueueLane]
    waiting_rows: int
    device_seconds: float
    workers_wanted: int
    """Sums over ``data``."""


class KeyView(View):
    """An API key without its secret."""

    id: str
    object: Literal["key"] = "key"
    tenant: str | None
    """Whom it acts for; None is the whole platform."""
    name: str | None
    role: str
    scopes: list[str]
    """Nouns and verbs that it is narrowed down to; none: all that the role may."""
    rate_per_minute: int | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    """To the minute."""
    replaced_by: str | None
    """The key that came out of its rotation."""


class NewKeyView(KeyView):
    """A key that was just made: the only time that it is shown."""

    key: str
    """Send it as ``Authorization: Bearer``; it is kept nowhere."""


class KeyList(View):
    """A page of keys, by id."""

    object: Literal["list"] = "list"
    data: list[KeyView]
    first_id: str | None
    last_id: str | None
    has_more: bool


class TenantView(View):
    """A tenant."""

    id: str
    object: Literal["tenant"] = "tenant"
    name: str | None
    input_roots: list[str]
    """Inputs must lie below one of these; none: as the installation says."""
    output_roots: list[str]
    weight: float
    """Its share of the workers while others have work, too."""
    created_at: datetime | None
    """None: the default tenant, which nobody has made."""
    disabled_at: datetime | None


class TenantList(View):
    """A page of tenants, by id."""

    object: Literal["list"] = "list"
    data: list[TenantView]
    first_id: str | None
    last_id: str | None
    has_more: bool


class CostView(View):
    """The cost of a job: ``rows_usd`` plus the overheads are ``metered_total_usd`` to the nano-dollar."""

    job_id: str
    rows_usd: Usd
    overhead_usd: dict[str, Usd]
    """By kind: ``load``, ``idle``, ``lost``."""
    metered_total_usd: Usd
    list_usd: Usd | None
    budget_usd: Usd | None
    in_flight_usd: Usd
    """Used by running attempts and not booked yet: by so much a spent budget may still be exceeded."""
    overrun_usd: Usd | None
    """Booked beyond the budget; None without one."""
    device_seconds: float
    """Device time of the rows and the overhead."""
    usage: TokenUsage
    usd_per_million_tokens: Usd | None
    """Metered total over prompt and completion tokens."""
