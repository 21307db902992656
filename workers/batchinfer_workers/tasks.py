"""The Celery tasks. A message is a permit to look for work; what work there is, the database says."""

from __future__ import annotations

from typing import Any

from celery import shared_task

from batchinfer.jobs.dispatch import FINALIZE_TASK, PLAN_TASK, SHARD_TASK


@shared_task(name=PLAN_TASK, bind=True)  # type: ignore[untyped-decorator]  # Celery has no types
def plan_job(self: Any, _job_id: str = "") -> None:
    """Plan the jobs that wait for it."""
    self.app.batchinfer_node.plan_jobs()


@shared_task(name=SHARD_TASK, bind=True)  # type: ignore[untyped-decorator]  # Celery has no types
def run_shard(self: Any, _model: str = "") -> None:
    """Lease and run shards while there are any."""
    self.app.batchinfer_node.run_shards()


@shared_task(name=FINALIZE_TASK, bind=True)  # type: ignore[untyped-decorator]  # Celery has no types
def finalize_job(self: Any, _job_id: str = "") -> None:
    """Finish the jobs whose rows have all ended."""
    self.app.batchinfer_node.finalize_jobs()
