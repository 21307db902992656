"""Looks after deadlines: how likely each is kept, and what that does to the order of leasing."""

from __future__ import annotations

from batchinfer.jobs.forecasts import Forecasts
from batchinfer.jobs.pressure import Pressure
from batchinfer.jobs.speed import measure_speed


class DeadlineWatch(Pressure, Forecasts):
    """Joins the probability (:mod:`~batchinfer.jobs.deadlines`) with the rule (:mod:`~batchinfer.jobs.pressure`)."""

    def watch_deadlines(self) -> list[str]:
        """Press the jobs that may miss their deadline, ease those that are safe; return the ids that moved."""
        if not (jobs := self.jobs_with_deadlines()):
            return []
        now = self._read(lambda _connection, now: now)
        return [
            job.id
            for job in jobs
            if self.press(job.id, self.deadline_chance(job, measure_speed(self.engine, job, now), now))
        ]
