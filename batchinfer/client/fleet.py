"""Workers, the queue and models of a server."""

from __future__ import annotations

from batchinfer.client.noun import Noun
from batchinfer.jobs.openai_views import ModelList, ModelObject
from batchinfer.jobs.views import QueueView, WorkerList


class Workers(Noun):
    """``client.workers``: who works, and what waits for them. Needs a key of the platform."""

    def list(self) -> WorkerList:
        """All workers, newest first."""
        return self._get(WorkerList, "/v1/workers")

    def queue(self, *, target_seconds: float = 600) -> QueueView:
        """What waits and runs by model, pool and hardware, and how many workers it wants."""
        return self._get(QueueView, "/v1/queue", target_seconds=target_seconds)


class Models(Noun):
    """``client.models``: names that jobs on the server may give."""

    def list(self) -> ModelList:
        """Those of the server's settings, of workers alive and of recent jobs; others may be named as well."""
        return self._get(ModelList, "/v1/models")

    def get(self, name: str) -> ModelObject:
        """One model."""
        return self._get(ModelObject, f"/v1/models/{name}")
