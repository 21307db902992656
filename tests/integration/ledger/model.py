"""What must be true of a job, in plain Python: sets of rows and a list of bookings, no database.

Written from the rules in docs/architecture.md and the ledger's docstrings, not from its code.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from batchinfer.money import NS_PER_HOUR

OVER = {"completed", "cancelled", "expired"}
HELD = {"paused", "budget_exhausted", "failed"}


@dataclass
class ModelAttempt:
    """A lease. Whether it is ``running`` is the whole fence."""

    id: int
    job: ModelJob
    shard: ModelShard
    rate: int
    expires_at: float
    closes: str | None
    ending: str | None = None
    metered_ns: int = 0
    device_ns: int = 0

    @property
    def running(self) -> bool:
        return self.ending is None

    def end(self, ending: str) -> None:
        """Stop; the device time that no part paid for is the job's overhead."""
        self.ending = ending
        self.shard.holder = None
        lost_ns = max(self.metered_ns, self.device_ns)
        nanos = lost_ns * self.rate // NS_PER_HOUR - self.device_ns * self.rate // NS_PER_HOUR
        self.job.overhead_nanos += nanos
        self.job.spend()


@dataclass
class ModelShard:
    """Rows to run in this generation, and who holds the shard."""

    index: int
    rows: range
    todo: set[int]
    holder: ModelAttempt | None = None
    is_committed: bool = False
    not_before: float = 0.0
    faults: int = 0
    is_quarantined: bool = False


@dataclass
class ModelJob:
    """Each row's outcome, and where the job stands."""

    id: str
    shards: list[ModelShard]
    max_attempts: int
    budget: int | None
    deadline: float | None
    state: str = "queued"
    closing: str | None = None
    generation: int = 0
    outcome: dict[int, str] = field(default_factory=dict)
    rows_nanos: int = 0
    overhead_nanos: int = 0

    @property
    def num_rows(self) -> int:
        return sum(len(shard.rows) for shard in self.shards)

    def counts(self) -> Counter[str]:
        return Counter(self.outcome.values())

    def closes_as(self, now: float) -> str | None:
        """How rows that have not run are to end."""
        if self.closing is not None:
            return self.closing
        return "expired" if self.deadline is not None and self.deadline <= now else None

    # -- what people may ask ------------------------------------------------------------------------------------------
    def is_legal(self, act: str) -> bool:
        """Whether the ledger must agree; asking for what is so already is legal."""
        match act:
            case "cancel":
                return self.state not in {"finalizing", "completed", "expired", "failed"}
            case "pause":
                return self.state == "paused" or (self.state in {"queued", "in_progress"} and self.closing is None)
            case "resume":
                return self.state in HELD
        return self.state in OVER

    def cancel(self) -> None:
        if self.state not in {"cancelling", "cancelled"}:
            self.state, self.closing = "cancelling", "cancelled"

    def pause(self) -> None:
        self.state = "paused"

    def resume(self, budget: int) -> None:
        self.budget = budget
        if all(s.is_committed for s in self.shards):
            self.state = "finalizing"
        else:
            self.state = "cancelling" if self.closing == "cancelled" else "queued"
        for shard in self.shards:
            if shard.is_quarantined:
                shard.is_quarantined, shard.faults, shard.not_before = False, 0, 0.0

    def retry(self, now: float) -> None:
        failed = {row for row, status in self.outcome.items() if status in {"errored", "expired", "cancelled"}}
        if not failed:
            return
        self.generation += 1
        self.state, self.closing = "queued", None
        if self.deadline is not None and self.deadline <= now:
            self.deadline = None
        for shard in self.shards:
            if todo := failed & set(shard.rows):
                shard.todo, shard.is_committed, shard.faults, shard.not_before = todo, False, 0, 0.0
        self.spend()

    # -- what work does -----------------------------------------------------------------------------------------------
    def claimable(self, now: float) -> list[ModelShard]:
        if self.state not in {"queued", "in_progress", "cancelling"}:
            return []
        return [s for s in self.shards if not s.is_committed and s.holder is None and s.not_before <= now]

    def spend(self) -> None:
        """A budget that is spent holds the job, unless only closing is left."""
        is_spent = self.budget is not None and self.rows_nanos + self.overhead_nanos >= self.budget
        has_open = any(not s.is_committed for s in self.shards)
        if is_spent and has_open and self.state in {"queued", "in_progress"} and self.closing is None:
            self.state = "budget_exhausted"

    def start(self) -> None:
        if self.state == "queued":
            self.state = "in_progress"

    def final_state(self) -> str:
        counts = self.counts()
        if self.closing == "cancelled" or counts["cancelled"]:
            return "cancelled"
        return "expired" if counts["expired"] else "completed"

    def final_outcome(self) -> str:
        counts = self.counts()
        if not counts["errored"] + counts["expired"] + counts["cancelled"]:
            return "succeeded"
        return "partial" if counts["succeeded"] else "none"
