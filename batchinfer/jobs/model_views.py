"""What ``batchinfer models`` shows."""

from datetime import datetime
from typing import Literal

from batchinfer.jobs.views import View


class LocalModelView(View):
    """A model on this machine."""

    name: str
    """As jobs name it: a hub id, or a path."""
    object: Literal["local_model"] = "local_model"
    kind: Literal["hub", "gguf", "folder"]
    revision: str
    """A hub model's commit, or a hash of the files' content."""
    refs: list[str]
    """Branches and tags that a hub model's commit was when it was fetched."""
    num_bytes: int
    path: str
    fetched_at: datetime | None
    pinned_as: list[str]
    num_jobs: int
    """Of the newest jobs in the database, those that name it."""
    num_workers: int
    """Workers alive that have it loaded."""


class PinView(View):
    """What a name stands for."""

    name: str
    object: Literal["model_pin"] = "model_pin"
    model: str
    """``owner/name@commit``."""
    created_at: datetime


class LocalModelList(View):
    """Models on this machine, and pins."""

    object: Literal["list"] = "list"
    data: list[LocalModelView]
    pins: list[PinView]
