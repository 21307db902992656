"""Ties a worker node to a Celery worker's life, however that worker is started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import bootsteps

from batchinfer import tracing
from batchinfer.jobs.dispatch import CeleryDispatcher, shard_queue
from batchinfer.jobs.service import JobService
from batchinfer_workers.clock import file_sweeper, schedule_runner, webhook_sender
from batchinfer_workers.metrics import CountingLedger, WorkerMetrics
from batchinfer_workers.node import WorkerNode
from batchinfer_workers.pools import serves_of

if TYPE_CHECKING:
    from batchinfer_workers.app import NodeOptions


class NodeStep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Opens the node before messages are consumed, and closes it before the pool waits for its threads."""

    requires = ("celery.worker.components:Pool",)

    def create(self, _worker: Any) -> NodeStep:
        """Celery asks for the component; it is the step itself."""
        return self

    def start(self, worker: Any) -> None:
        """The worker starts."""
        options: NodeOptions = worker.app.batchinfer_options
        settings = options.settings
        tracing.start(settings.otlp_endpoint, "batchinfer-worker")
        # the service checks that the database is there and up to date
        self._service = JobService.connect(settings.sqlalchemy_url, "memory://")
        dispatcher = CeleryDispatcher(worker.app)
        metrics = WorkerMetrics()
        self._node = WorkerNode(
            settings,
            CountingLedger(self._service.engine, metrics),
            dispatcher,
            serves=serves_of(settings, options.models),
            job_id=options.job_id,
            listen=Listener(worker),
            # a worker that is there for one job lets the schedules be
            schedules=None if options.job_id is not None else schedule_runner(self._service, settings, dispatcher),
            webhooks=webhook_sender(self._service, settings),
            files=None if options.job_id is not None else file_sweeper(self._service),
        )
        metrics.watch_engine(self._node.engine_stats)
        metrics.device_healthy.set_function(lambda: float(self._node.health.reason is None))
        self._close_metrics = metrics.serve_if(settings)
        worker.app.batchinfer_node = self._node
        self._node.start()

    def stop(self, _worker: Any) -> None:
        """The worker stops."""
        self._node.close()
        self._close_metrics()
        self._service.close()

    def terminate(self, worker: Any) -> None:
        """The worker is made to stop."""
        self.stop(worker)


class Listener:
    """Makes a Celery worker consume the queues of models that have work."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def __call__(self, model: str) -> None:
        """Consume a model's queue from now on. Safe in any thread: the consumer's own thread does it."""
        queue = shard_queue(model)
        consumer = getattr(self._worker, "consumer", None)
        if consumer is not None and queue not in self._worker.app.amqp.queues.consume_from:
            consumer.call_soon(consumer.add_task_queue, queue)
