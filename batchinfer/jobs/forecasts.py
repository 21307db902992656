"""Forecasts of jobs: what was expected when a job was planned, how it came out, and what that says of the next one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select, update

from batchinfer.db.tables import Attempt, ForecastRow, LedgerEntry, Worker
from batchinfer.jobs.deadlines import chance_in_time
from batchinfer.jobs.ledger_base import LedgerBase, insert_once
from batchinfer.jobs.predict import Observation
from batchinfer.jobs.prices import device_kinds
from batchinfer.jobs.reuse import NO_PART_OF_ANSWERS
from batchinfer.jobs.status import JobState

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from sqlalchemy import Connection, Row

    from batchinfer.jobs.records import JobRecord
    from batchinfer.jobs.spec import JobSpec
    from batchinfer.jobs.speed import Speed

MAX_PAST = 50
"""Past jobs that are learnt from, the latest."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job came out. Tokens are of the rows that ran; device time in seconds."""

    job_id: str
    num_rows: int
    """Rows that ran: no copies, no skipped ones."""
    est_prompt_tokens: int
    """What the planner took the prompts for, by their bytes."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    device_seconds: float
    """Of rows."""
    overhead_seconds: float
    wall_seconds: float
    cost_nanos: int
    device: str


@dataclass(frozen=True, slots=True)
class Past:
    """What earlier jobs say. ``alike`` are jobs of the same spec; ``model`` are jobs of the same model."""

    alike: tuple[Outcome, ...]
    model: tuple[Outcome, ...]

    def completion_tokens(self) -> list[Observation]:
        """Answer tokens a row, in jobs of the same spec."""
        return [
            Observation(one.completion_tokens / one.num_rows, one.num_rows)
            for one in self.alike
            if one.completion_tokens
        ]

    def prompt_ratio(self) -> list[Observation]:
        """Prompt tokens over the planner's guess: of the same spec, else of the model."""
        past = [one for one in self.alike or self.model if one.est_prompt_tokens]
        return [Observation(one.prompt_tokens / one.est_prompt_tokens, one.num_rows) for one in past]

    def seconds_per_token(self, device: str | None = None) -> list[Observation]:
        """Device seconds a token, prompt and answer: of the same spec, else of the model; on one kind of device."""
        kinds = None if device is None else set(device_kinds(device))
        for group in (self.alike, self.model):
            on = [one for one in group if kinds is None or kinds & set(device_kinds(one.device))]
            found = [
                Observation(one.device_seconds / (one.prompt_tokens + one.completion_tokens), one.num_rows)
                for one in on
                if one.device_seconds > 0
            ]
            if found:
                return found
        return []

    def devices(self) -> list[str]:
        """Kinds of devices that these jobs ran on, by name."""
        return sorted({one.device for one in (*self.alike, *self.model) if one.device_seconds > 0})

    def cached_share(self) -> float:
        """Share of prompt tokens that came from the prefix cache, in jobs of the same spec."""
        prompts = sum(one.prompt_tokens for one in self.alike)
        return sum(one.cached_tokens for one in self.alike) / prompts if prompts else 0.0

    def overhead_seconds(self) -> float:
        """What loading took on top, the median."""
        known = sorted(one.overhead_seconds for one in self.alike or self.model)
        return known[len(known) // 2] if known else 0.0


class Forecasts(LedgerBase):
    """Note what is expected of a job; what became of it is noted with the transaction that ends the job."""

    def note_forecast(self, job: JobRecord, predicted: Mapping[str, Any]) -> bool:
        """Keep what is expected of a job; the first forecast stays."""
        values = {
            "job_id": job.id, "tenant_id": job.tenant_id, "scope": likeness(job.spec), "model": job.model,
            "predicted": dict(predicted),
        }  # fmt: skip
        return self._write(lambda connection, _now: insert_once(connection, ForecastRow, values))

    def forecast_of(self, job_id: str) -> tuple[Mapping[str, Any], Outcome | None] | None:
        """What was expected of a job, and how it came out once it has."""
        return self._read(lambda connection, _: _forecast(connection, job_id))

    def deadline_chance(
        self, job: JobRecord, speed: Speed, now: datetime, *, connection: Connection | None = None
    ) -> float | None:
        """How likely a job finishes in time, see :func:`~batchinfer.jobs.deadlines.chance_in_time`.

        With a ``connection`` what it needs is read there.
        """
        if job.deadline_at is None or job.finished_at is not None:
            return None
        found = None
        if not speed.eta_seconds:
            found = self.forecast_of(job.id) if connection is None else _forecast(connection, job.id)
        return chance_in_time(job, speed, None if found is None else found[0], now)

    def past_of(self, tenant_id: str, spec: JobSpec) -> Past:
        """Outcomes of a tenant's earlier jobs that are like this one."""

        def work(connection: Connection, _now: datetime) -> Past:
            row = ForecastRow
            query = select(row).where(row.tenant_id == tenant_id, row.finished_at.is_not(None))
            query = query.order_by(row.finished_at.desc()).limit(MAX_PAST)
            alike = connection.execute(query.where(row.scope == likeness(spec))).all()
            model = connection.execute(query.where(row.model == spec.model)).all()
            return Past(tuple(map(_outcome, alike)), tuple(map(_outcome, model)))

        return self._read(work)


def _forecast(connection: Connection, job_id: str) -> tuple[Mapping[str, Any], Outcome | None] | None:
    row = connection.execute(select(ForecastRow).where(ForecastRow.job_id == job_id)).one_or_none()
    return None if row is None else (row.predicted, None if row.outcome is None else _outcome(row))


def likeness(spec: JobSpec) -> str:
    """Equal for jobs that ask the same of other rows: inputs, labels, limits and money are left out."""
    fields = spec.model_dump(mode="json", exclude=set(NO_PART_OF_ANSWERS))
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def note_outcome(connection: Connection, job: Row[Any], now: datetime) -> None:
    """Keep how a locked job came out, if it was forecast, ran through, and no part of it ran twice."""
    num_rows = job.rows_succeeded + job.rows_errored
    if job.state != JobState.COMPLETED or job.retry_generation or not num_rows or not job.completion_tokens:
        return
    entry = LedgerEntry
    sums = select(entry.kind, func.sum(entry.device_ns), func.sum(entry.nanos)).where(entry.job_id == job.id)
    kinds = {kind: (int(ns), int(nanos)) for kind, ns, nanos in connection.execute(sums.group_by(entry.kind))}
    device = (
        select(Worker.device).join(Attempt, Attempt.worker_id == Worker.id).where(Attempt.job_id == job.id).limit(1)
    )
    outcome = {
        "num_rows": num_rows,
        "prompt_tokens": job.prompt_tokens,
        "cached_tokens": job.cached_tokens,
        "completion_tokens": job.completion_tokens,
        "device_seconds": kinds.get("rows", (0, 0))[0] / 10**9,
        "overhead_seconds": sum(ns for kind, (ns, _) in kinds.items() if kind != "rows") / 10**9,
        "wall_seconds": (now - job.started_at).total_seconds() if job.started_at else 0.0,
        "cost_nanos": sum(nanos for _, nanos in kinds.values()),
        "device": connection.execute(device).scalar_one_or_none() or "",
    }
    mine = (ForecastRow.job_id == job.id) & ForecastRow.outcome.is_(None)
    connection.execute(update(ForecastRow).where(mine).values(outcome=outcome, finished_at=now))


def _outcome(row: Row[Any]) -> Outcome:
    return Outcome(job_id=row.job_id, est_prompt_tokens=int(row.predicted.get("est_prompt_tokens", 0)), **row.outcome)
