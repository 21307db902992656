"""Models that requests may name: those of the server's settings, of workers alive and of recent jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import func, select

from batchinfer.db.session import read_transaction
from batchinfer.db.tables import Job, Worker
from batchinfer.errors import NotFoundError
from batchinfer.jobs.openai_views import ModelList, ModelObject

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from sqlalchemy import Engine, Select

    from batchinfer.jobs.caller import Caller

OWNER = "batchinfer"
RECENT_JOBS = 1000
"""So many of the newest jobs are looked at: a list of models must not read a table of a million jobs."""


def known_models(engine: Engine, names: Mapping[str, str], *, caller: Caller, workers_since: datetime) -> ModelList:
    """All models by name. ``names`` are the settings' aliases; Jobs are those that the caller sees."""
    of_all = cast("Select[Any]", select(Job.model, Job.created_at))
    recent = caller.only(of_all, Job.tenant_id)
    recent_jobs = recent.order_by(Job.id.desc()).limit(RECENT_JOBS).subquery()
    of_jobs = select(recent_jobs.c.model, func.min(recent_jobs.c.created_at)).group_by(recent_jobs.c.model)
    of_workers = select(Worker.models, Worker.started_at).where(Worker.last_seen_at >= workers_since)
    created = dict.fromkeys(names, 0)
    with read_transaction(engine) as connection:
        found = [(str(model), at) for model, at in connection.execute(of_jobs)]
        for models, at in connection.execute(of_workers):
            found += [(str(model), at) for model in models]
    # whom a client may call by a short name is listed by that alone
    targets = set(names.values())
    for model, at in found:
        if model not in targets:
            created[model] = min(created.get(model, int(at.timestamp())), int(at.timestamp()))
    return ModelList(
        data=[ModelObject(id=name, created=when, owned_by=OWNER) for name, when in sorted(created.items())]
    )


def find_model(models: ModelList, name: str) -> ModelObject:
    """Raises NotFoundError."""
    for model in models.data:
        if model.id == name:
            return model
    raise NotFoundError(f"no model {name[:100]!r}; GET /v1/models lists them", param="model", code="model_not_found")
