"""States of jobs, shards and attempts, and which of them may follow which."""

from __future__ import annotations

from enum import StrEnum

from batchinfer.errors import ConflictError


class JobState(StrEnum):
    """Where a job stands. OpenAI Batch's words where it has one."""

    VALIDATING = "validating"
    """Waits for the planner or is being planned."""
    QUEUED = "queued"
    """Planned; no shard has been leased yet (or not since a retry)."""
    IN_PROGRESS = "in_progress"
    """Shards run, or remaining rows are being closed after the deadline."""
    FINALIZING = "finalizing"
    """Every row has an outcome; the manifest is being written."""
    COMPLETED = "completed"
    """Done. Whether the rows succeeded is told by :class:`Outcome`."""
    PAUSED = "paused"
    """Held by a person; ``resume`` goes on."""
    CANCELLING = "cancelling"
    """Cancelled by a person; remaining rows are being written as ``cancelled``."""
    CANCELLED = "cancelled"
    """Done after a cancel."""
    FAILED = "failed"
    """The job as a whole could not go on; ``error_code`` says why. ``resume`` tries again."""
    EXPIRED = "expired"
    """Done, with rows that the deadline cut off."""
    BUDGET_EXHAUSTED = "budget_exhausted"
    """Held because its budget is spent; ``resume`` with a higher one goes on."""

    @property
    def is_terminal(self) -> bool:
        """Whether nothing more happens unless a person asks for it."""
        return self in TERMINAL


class Outcome(StrEnum):
    """How the rows of a finished job did. A job whose rows all failed is ``none``: completed, but not green."""

    SUCCEEDED = "succeeded"
    PARTIAL = "partial"
    NONE = "none"


class ShardState(StrEnum):
    """Where a shard stands."""

    PENDING = "pending"
    LEASED = "leased"
    COMMITTED = "committed"
    QUARANTINED = "quarantined"
    """Failed for reasons that no single row explains; its job failed with it."""


class AttemptState(StrEnum):
    """How an attempt stands. Only a ``running`` attempt may write."""

    RUNNING = "running"
    COMMITTED = "committed"
    RELEASED = "released"
    FAILED = "failed"
    LOST = "lost"


class LeaseMode(StrEnum):
    """What a lease asks for."""

    RUN = "run"
    """Run the remaining rows."""
    CLOSE = "close"
    """Write the remaining rows with ``Lease.close_status``, without the engine."""


class FailureKind(StrEnum):
    """What an attempt died of."""

    ENGINE = "engine"
    """The engine process died or stalled: one of the rows may be to blame, so the ledger may isolate it."""
    SHARD = "shard"
    """Reading, writing or anything else that no row explains: after ``max_attempts`` the job fails."""


class Action(StrEnum):
    """What a heartbeat's reply tells the worker to do."""

    CONTINUE = "continue"
    STOP_CANCEL = "stop_cancel"
    STOP_PAUSE = "stop_pause"
    STOP_EXPIRED = "stop_expired"
    STOP_BUDGET = "stop_budget"


TERMINAL = frozenset({JobState.COMPLETED, JobState.CANCELLED, JobState.FAILED, JobState.EXPIRED})
"""States in which nothing runs and nothing waits."""

RUNNABLE = frozenset({JobState.QUEUED, JobState.IN_PROGRESS})
"""States in which the shards' rows go to the engine."""

HELD = frozenset({JobState.PAUSED, JobState.BUDGET_EXHAUSTED})
"""States in which shards wait for a person."""

_J = JobState
JOB_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    _J.VALIDATING: frozenset({_J.QUEUED, _J.FINALIZING, _J.PAUSED, _J.CANCELLED, _J.FAILED}),
    _J.QUEUED: frozenset({_J.IN_PROGRESS, _J.PAUSED, _J.CANCELLING, _J.BUDGET_EXHAUSTED, _J.FAILED}),
    _J.IN_PROGRESS: frozenset({_J.FINALIZING, _J.PAUSED, _J.CANCELLING, _J.BUDGET_EXHAUSTED, _J.FAILED}),
    _J.FINALIZING: frozenset({_J.COMPLETED, _J.CANCELLED, _J.EXPIRED, _J.FAILED}),
    # a held job's last running shard may still commit: then it is finalized, since there is nothing left to hold
    _J.PAUSED: frozenset(
        {
            _J.VALIDATING,
            _J.QUEUED,
            _J.IN_PROGRESS,
            _J.FINALIZING,
            _J.CANCELLING,
            _J.CANCELLED,
            _J.FAILED,
        }
    ),
    _J.BUDGET_EXHAUSTED: frozenset({_J.QUEUED, _J.IN_PROGRESS, _J.FINALIZING, _J.CANCELLING, _J.FAILED}),
    _J.CANCELLING: frozenset({_J.FINALIZING, _J.FAILED}),
    # a retry of rows
    _J.COMPLETED: frozenset({_J.QUEUED}),
    _J.CANCELLED: frozenset({_J.QUEUED}),
    _J.EXPIRED: frozenset({_J.QUEUED}),
    # a resume
    _J.FAILED: frozenset({_J.VALIDATING, _J.QUEUED, _J.CANCELLING, _J.FINALIZING}),
}
"""Every legal change of a job's state; all others are refused."""


def check_job_transition(job_id: str, old: JobState, new: JobState) -> None:
    """Refuse an illegal change of a job's state.

    Raises:
        ConflictError: ``new`` may not follow ``old``; the message names both.
    """
    if new not in JOB_TRANSITIONS[old]:
        raise ConflictError(f"job {job_id} is {old} and cannot become {new}", code="illegal_transition")
