"""Leases that the ledger gives, and what their holders hand in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchinfer.jobs.records import JobRecord, RowCounts, ShardRecord
from batchinfer.types import RowStatus, Usage

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from batchinfer.jobs.status import Action, LeaseMode

NO_ROWS = RowCounts()
NO_USAGE = Usage()


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """A row range to run: ``[row_start, row_end)``. ``est_tokens`` is the planner's guess of all its tokens."""

    index: int
    row_start: int
    row_end: int
    est_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SentinelFound:
    """What a sentinel found in a shard: the data of a :class:`~batchinfer.jobs.drift.Drift`, and what went wrong."""

    drift: Mapping[str, Any]
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on a shard, until it expires or is taken away. ``attempt_id`` is the fencing token.

    - ``mode`` run: run the remaining rows. With ``probe_rows`` set, run only the first that many of them (in row
      order), alone in the engine, then ``commit_shard`` if nothing remains, else ``release``. When ``probe_rows`` is
      1, call ``announce_probe`` with the row before the engine gets it: if the attempt dies, that row is to blame.
    - ``poisoned_rows`` that remain are written as ``worker_lost`` error rows, never run (in either mode).
    - ``mode`` close: write the remaining rows with ``close_status`` and commit. In a retry (``generation`` > 0)
      nothing is written for them: they keep the outcome they had.
    - ``generation`` > 0: only rows of ``base_path`` whose status is in ``retry_statuses`` run again; parts carry the
      old outcomes in ``replaced``, and the shard's file is the base overlaid by this generation's parts.
    """

    attempt_id: int
    attempt_number: int
    """1 for the shard's first lease; goes into the rows' ``attempt`` column."""
    worker_id: str
    job: JobRecord
    shard: ShardRecord
    mode: LeaseMode
    close_status: RowStatus | None
    probe_rows: int | None
    poisoned_rows: tuple[int, ...]
    generation: int
    retry_statuses: tuple[RowStatus, ...]
    base_path: str | None
    nanos_per_hour: int
    """The worker's price; use one ``DeviceMeter`` of it an attempt, so that parts and lost work sum exactly."""
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """What to do, and until when the lease holds."""

    action: Action
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class PlanLease:
    """The right to plan a job."""

    job: JobRecord
    token: str
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class FinalizeLease:
    """The right to finalize a job."""

    job: JobRecord
    token: str
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class RowErrorSample:
    """One row that did not succeed, kept in the database for ``batchinfer errors``."""

    row_index: int
    code: str
    message: str
    status: RowStatus = RowStatus.ERRORED


@dataclass(frozen=True, slots=True)
class PartCommit:
    """A checkpointed part file and what its rows add. ``replaced`` has the rows' old outcomes in a retry."""

    path: str
    num_rows: int
    counts: RowCounts
    replaced: RowCounts = NO_ROWS
    usage: Usage = NO_USAGE
    metered_nanos: int = 0
    list_nanos: int = 0
    device_ns: int = 0
    num_bytes: int = 0
    sha256: str = ""
    row_errors: tuple[RowErrorSample, ...] = ()
    saved_nanos: int = 0
    saved_list_nanos: int = 0


@dataclass(frozen=True, slots=True)
class ShardResult:
    """A shard's published file."""

    path: str
    num_rows: int
    num_bytes: int = 0
    sha256: str = ""
