"""Workers: who works, with what, and since when."""

from typing import Annotated

from fastapi import APIRouter, Query

from batchinfer.api.deps import PlatformService
from batchinfer.jobs.views import QueueView, WorkerList

router = APIRouter(prefix="/v1", tags=["workers"])


@router.get("/workers")
def list_workers(service: PlatformService) -> WorkerList:
    """All workers, newest first. Needs a key of the whole platform, since workers tell of every tenant's models."""
    return service.workers()


@router.get("/queue")
def get_queue(
    service: PlatformService,
    target_seconds: Annotated[
        float, Query(gt=0, le=7 * 86400, description="Time within which the work should be done.")
    ] = 600,
) -> QueueView:
    """What waits and runs by model, pool and kind of hardware, and how many workers it wants: a signal to scale by."""
    return service.queue(target_seconds=target_seconds)
