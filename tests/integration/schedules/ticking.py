"""A ticker as a process of its own: ticks a few times under a clock that is ahead of the schedule, then ends."""

import sys
from datetime import datetime

from batchinfer.db.session import create_db_engine
from batchinfer.jobs.dispatch import NullDispatcher
from batchinfer.jobs.ledger import Ledger
from batchinfer.jobs.schedule_firing import Firing
from batchinfer.jobs.schedule_runner import ScheduleRunner

if __name__ == "__main__":
    url, now, ticks = sys.argv[1], datetime.fromisoformat(sys.argv[2]), int(sys.argv[3])
    engine = create_db_engine(url)
    runner = ScheduleRunner(
        Firing(engine, clock=lambda: now, retry_seconds=60), Ledger(engine, clock=lambda: now), NullDispatcher()
    )
    for _ in range(ticks):
        runner.tick()
    engine.dispose()
