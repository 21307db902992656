"""Wake-up messages. The database is the truth and a message is only a permit to look there, so losing one is harmless."""

from __future__ import annotations

import hashlib
import logging
from typing import Any, Protocol

CONTROL_QUEUE = "batchinfer.control"
"""Queue of planning and finalizing, which need no device."""
PLAN_TASK = "batchinfer.plan_job"
SHARD_TASK = "batchinfer.run_shard"
FINALIZE_TASK = "batchinfer.finalize_job"
MAX_WAKE_UPS = 64
"""Most messages published at once for a model; workers go on by themselves while there are shards."""
PUBLISH_OPTIONS = {
    "socket_connect_timeout": 2,
    "socket_timeout": 30,
    # give up at once when the broker is away: the change is in the database, and the ticker publishes again
    "max_retries": 1,
    "interval_start": 0,
    "interval_step": 0.1,
    "interval_max": 0.1,
}
"""Options of the broker's transport for a publisher."""

_log = logging.getLogger(__name__)


def shard_queue(model: str) -> str:
    """Queue of a model's shards. The name is a digest, since a model may be a path with any characters."""
    return f"batchinfer.model.{hashlib.sha256(model.encode()).hexdigest()[:16]}"


class Dispatcher(Protocol):
    """Tells workers that there may be work. Best effort: no method raises because a broker is away."""

    def wake_planner(self, job_id: str) -> None:
        """Say that a job waits to be planned."""
        ...

    def wake_shards(self, model: str, count: int) -> None:
        """Say that ``count`` shards of a model may be leased."""
        ...

    def wake_finalizer(self, job_id: str) -> None:
        """Say that a job's last shard is done."""
        ...


class NullDispatcher:
    """Says nothing: with a broker inside the worker's process, its ticker finds new work within a second."""

    def wake_planner(self, job_id: str) -> None:
        """Do nothing."""

    def wake_shards(self, model: str, count: int) -> None:
        """Do nothing."""

    def wake_finalizer(self, job_id: str) -> None:
        """Do nothing."""


class CeleryDispatcher:
    """Publishes through a Celery app. A publish that fails is logged: the ticker sends it again.

    A queue is only topped up to the number of messages asked for, so that messages do not pile up while no worker runs.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    def wake_planner(self, job_id: str) -> None:
        """Publish a planning task."""
        self._top_up(CONTROL_QUEUE, PLAN_TASK, job_id, 1)

    def wake_shards(self, model: str, count: int) -> None:
        """Publish shard tasks to the model's queue, at most :data:`MAX_WAKE_UPS` at once."""
        self._top_up(shard_queue(model), SHARD_TASK, model, min(count, MAX_WAKE_UPS))

    def wake_finalizer(self, job_id: str) -> None:
        """Publish a finalizing task."""
        self._top_up(CONTROL_QUEUE, FINALIZE_TASK, job_id, 1)

    def _top_up(self, queue: str, task: str, argument: str, count: int) -> None:
        try:
            with self._app.pool.acquire(block=True, timeout=5) as connection:
                limit = MAX_WAKE_UPS if queue == CONTROL_QUEUE else count
                room = limit - _num_messages(connection.default_channel, queue)
                for _ in range(min(count, room)):
                    self._app.send_task(task, (argument,), queue=queue, connection=connection, retry=False)
        except Exception as error:  # noqa: BLE001 -- each broker raises its own, and none may fail a committed change
            _log.warning("could not publish to %s (%s); the ticker will send it again", queue, error)


def _num_messages(channel: Any, queue: str) -> int:
    try:
        return int(channel.queue_declare(queue=queue, passive=True).message_count)
    except channel.connection.client.channel_errors:
        return 0  # nobody has used the queue yet


def connect_dispatcher(broker_url: str) -> Dispatcher:
    """Dispatcher for a process that is no worker: the CLI's ``submit`` and the REST API."""
    if broker_url.startswith("memory://"):
        return NullDispatcher()
    from celery import Celery  # noqa: PLC0415 -- a third of a second that only this path needs

    app = Celery("batchinfer", broker=broker_url, backend=None, set_as_current=False)
    app.conf.update(broker_transport_options=PUBLISH_OPTIONS)
    return CeleryDispatcher(app)
