"""Workers: who works, with what, and since when."""

from fastapi import APIRouter

from batchinfer.api.deps import PlatformService
from batchinfer.jobs.views import WorkerList

router = APIRouter(prefix="/v1/workers", tags=["workers"])


@router.get("")
def list_workers(service: PlatformService) -> WorkerList:
    """All workers, newest first. Needs a key of the whole platform, since workers tell of every tenant's models."""
    return service.workers()
