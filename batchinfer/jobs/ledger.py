"""The ledger: the only writer of job, shard and attempt state. Each method is one transaction.

Where to read what:

- ``ledger_jobs``: submit; look up jobs, shards, parts, attempts, events, row errors
- ``ledger_steps``, ``ledger_planning``: lease and finish planning and finalizing
- ``ledger_leases``: lease a shard, heartbeat; ``lease_order``: which one; ``pressure``: deadlines in danger
- ``ledger_endings``: release, fail, reap; ``isolation`` finds the row that kills engines
- ``ledger_commits``: parts and shards
- ``ledger_progress``: how far rows are that have not ended; the model they run on; what the sentinel found
- ``ledger_control``: cancel, pause, resume, retry, deadlines; ``ledger_changes``: priority, deadline, budget, labels
- ``ledger_files``: uploaded files; the batches of the OpenAI door
- ``ledger_workers``: the registered workers, and what waits for them
- ``reuse``: indexes of finished jobs' rows
- ``cost``: overhead, a job's sums; ``prices``: the price book; ``budgets``: what tenants may spend in a month; ``forecasts``: expectation and outcome
"""

from __future__ import annotations

from batchinfer.jobs.budgets import Budgets
from batchinfer.jobs.cost import Costs
from batchinfer.jobs.deadline_watch import DeadlineWatch
from batchinfer.jobs.ledger_changes import Changes
from batchinfer.jobs.ledger_commits import Commits
from batchinfer.jobs.ledger_control import RETRIED, Control
from batchinfer.jobs.ledger_files import Batches, Files
from batchinfer.jobs.ledger_jobs import Jobs
from batchinfer.jobs.ledger_planning import Planning
from batchinfer.jobs.ledger_progress import Progress
from batchinfer.jobs.ledger_workers import Workers
from batchinfer.jobs.prices import Prices
from batchinfer.jobs.reuse import KeyIndexes

__all__ = ["RETRIED", "Ledger"]


class Ledger(
    Jobs,
    Planning,
    Commits,
    Progress,
    Control,
    Changes,
    Workers,
    Files,
    Batches,
    Costs,
    Prices,
    Budgets,
    DeadlineWatch,
    KeyIndexes,
):
    """State of jobs over a database engine made by :func:`batchinfer.db.session.create_db_engine`.

    Thread-safe. Transient database errors (a restart, a deadlock, a busy SQLite) are retried for up to
    ``retry_seconds``; each method is safe to run again. ``clock`` replaces the database's clock in tests.
    """
