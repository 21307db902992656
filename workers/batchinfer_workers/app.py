"""The Celery app: settings only. ``celery -A batchinfer_workers.app worker`` and ``batchinfer worker`` run the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery import Celery

from batchinfer.jobs.dispatch import CONTROL_QUEUE, PUBLISH_OPTIONS
from batchinfer.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What a worker of the app works with; ``models`` and ``job_id`` limit what it leases."""

    settings: Settings
    models: tuple[str, ...] | None = None
    job_id: str | None = None


def celery_settings(settings: Settings) -> Mapping[str, Any]:
    """Celery as a thin transport: messages are permits, everything that matters is in the database."""
    return {
        # kombu warns of a URL without a host, though this one has none
        "broker_url": "memory://localhost/" if settings.is_embedded else settings.broker_url,
        "result_backend": None,
        "task_ignore_result": True,
        "task_serializer": "json",
        "accept_content": ["json"],
        # early: a lost message is sent again by the ticker, a late acknowledgement would be delivered twice
        "task_acks_late": False,
        "task_default_queue": CONTROL_QUEUE,
        "task_publish_retry": False,
        "imports": ["batchinfer_workers.tasks"],
        # threads answer pings while they work, and may start the engine's process; prefork children may not
        "worker_pool": "threads",
        # running shards, and one thread each for a planner and a finalizer
        "worker_concurrency": settings.shards_in_flight + 2,
        "worker_prefetch_multiplier": 1,
        "worker_hijack_root_logger": False,
        "worker_enable_remote_control": not settings.is_embedded,
        "worker_cancel_long_running_tasks_on_connection_loss": True,
        "worker_soft_shutdown_timeout": 0,
        # None is for ever: after 100 attempts, the default, a worker would give up and exit
        "broker_connection_max_retries": None,
        "broker_connection_retry_on_startup": True,
        "broker_transport_options": _transport_options(settings),
    }


def create_app(settings: Settings) -> Celery:
    """Build the app. Connects to nothing: neither broker nor database nor device is touched.

    A worker of this app opens a node (see :mod:`batchinfer_workers.worker_step`), which the tasks call.
    """
    app = Celery("batchinfer", set_as_current=False)
    app.conf.update(celery_settings(settings))
    app.steps["worker"].add("batchinfer_workers.worker_step:NodeStep")
    app.batchinfer_options = NodeOptions(settings)
    return app


def _transport_options(settings: Settings) -> dict[str, Any]:
    if settings.is_embedded:
        # each look takes time from the engine, which has the same cores
        return {"polling_interval": 0.1}
    return {
        **PUBLISH_OPTIONS,
        "visibility_timeout": settings.visibility_seconds,
        "socket_keepalive": True,
        "health_check_interval": 10,
    }


def __getattr__(name: str) -> Any:
    """Make ``app`` for ``celery -A`` when it is asked for, so that an import does no work."""
    if name == "app":
        globals()["app"] = create_app(Settings.load())
        return globals()["app"]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
