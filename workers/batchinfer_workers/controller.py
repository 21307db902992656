"""A Celery worker in a thread of this process, without Celery's signal handlers and logging."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from celery.worker import state as celery_state

from batchinfer.jobs.dispatch import CONTROL_QUEUE, PLAN_TASK, shard_queue
from batchinfer_workers.app import create_app

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.settings import Settings
    from batchinfer_workers.node import WorkerNode


class CeleryThread:
    """Starts, watches and stops the worker. One at a time in a process: Celery keeps its stop flag globally.

    ``models`` and ``job_id`` limit what it leases; ``queues_of`` names models whose queues it consumes from the start,
    so that no message waits until the ticker has found out.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        models: Sequence[str] | None = None,
        job_id: str | None = None,
        queues_of: Sequence[str] = (),
    ) -> None:
        self._app = create_app(settings)
        self._app.batchinfer_options = replace(
            self._app.batchinfer_options, models=None if models is None else tuple(models), job_id=job_id
        )
        # without these two, nothing is consumed in a thread
        self._app.finalize()
        self._app.set_default()
        self._controller = self._app.WorkController(
            hostname=f"batchinfer-{os.getpid()}@{socket.gethostname()}",
            loglevel=settings.log_level.upper(),
            pool_cls=self._app.conf.worker_pool,
            concurrency=self._app.conf.worker_concurrency,
            # workers learn of each other from the database
            without_gossip=True,
            without_mingle=True,
            without_heartbeat=True,
        )
        for model in queues_of:
            self._app.amqp.queues.select_add(shard_queue(model))
        self._thread = threading.Thread(target=self._controller.start, name="celery-worker", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether it works."""
        return self._thread.is_alive()

    @property
    def exit_code(self) -> int:
        """0 after a stop that was asked for."""
        return int(self._controller.exitcode or 0)

    @property
    def node(self) -> WorkerNode | None:
        """What it works with, once it has started."""
        return getattr(self._app, "batchinfer_node", None)

    def start(self) -> None:
        """Begin to work."""
        celery_state.should_stop = None
        self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """Drain and stop; False if ``timeout`` seconds were not enough. Finished rows are committed."""
        if node := self.node:
            node.drain()
        celery_state.should_stop = os.EX_OK
        # the memory transport's loop waits two seconds for a message before it looks at the flag, and once more after
        with suppress(Exception):
            for _ in range(2):
                self._app.send_task(PLAN_TASK, ("",), queue=CONTROL_QUEUE, retry=False)
        self._thread.join(timeout)
        if self.is_alive:
            return False
        celery_state.should_stop = None
        self._app.close()
        return True
