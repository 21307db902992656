"""Numbers for Prometheus: what the database says at the moment of a scrape, and how this server answers.

No label names a tenant, a job, a file or an address: their number has no bound.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily

from batchinfer.jobs import queries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from batchinfer.jobs.service import JobService
    from batchinfer.jobs.views import QueueLane

BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)


class InstallationCollector:
    """Jobs, work that waits and workers, asked of the database at each scrape."""

    def __init__(self, service: Callable[[], JobService]) -> None:
        self._service = service

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing ahead of time: registering must not ask the database."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Ask."""
        service = self._service()
        jobs = GaugeMetricFamily("batchinfer_jobs", "Jobs by state.", labels=["state"])
        for state, number in queries.jobs_by_state(service.engine).items():
            jobs.add_metric([state], number)
        yield jobs
        shards = GaugeMetricFamily(
            "batchinfer_pending_shards", "Shards that a worker could lease now.", labels=["model"]
        )
        for model, number in service.ledger.pending_models().items():
            shards.add_metric([model], number)
        yield shards
        yield from _lane_metrics(service.queue().data)
        yield GaugeMetricFamily("batchinfer_workers", "Workers alive.", value=service.num_workers())
        sick = service.num_unhealthy_workers()
        yield GaugeMetricFamily("batchinfer_workers_unhealthy", "Of these, those whose device is not well.", value=sick)
        pending = queries.pending_deliveries(service.engine)
        yield GaugeMetricFamily("batchinfer_webhook_deliveries_pending", "Messages not yet delivered.", value=pending)


def _lane_metrics(lanes: Iterable[QueueLane]) -> Iterator[GaugeMetricFamily]:
    """What waits and runs by model, pool and kind of hardware; the kind is ``any`` where jobs ask for none."""
    names = ["model", "pool", "kind"]
    rows = GaugeMetricFamily(
        "batchinfer_queue_rows", "Rows without an outcome of jobs that may run.", labels=[*names, "state"]
    )
    seconds = GaugeMetricFamily(
        "batchinfer_queue_device_seconds", "Estimated device time that these rows need.", labels=names
    )
    workers = GaugeMetricFamily("batchinfer_queue_workers", "Living workers that may serve them.", labels=names)
    wanted = GaugeMetricFamily(
        "batchinfer_queue_workers_wanted", "Workers that would do them within ten minutes.", labels=names
    )
    for lane in lanes:
        place = [lane.model, lane.pool, lane.device_kind or "any"]
        rows.add_metric([*place, "waiting"], lane.waiting_rows)
        rows.add_metric([*place, "running"], lane.running_rows)
        seconds.add_metric(place, lane.device_seconds)
        workers.add_metric(place, lane.workers)
        wanted.add_metric(place, lane.workers_wanted)
    yield from (rows, seconds, workers, wanted)


class ServerMetrics:
    """The registry of one server."""

    def __init__(self, service: Callable[[], JobService]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(InstallationCollector(service))
        labels = ("method", "route", "status")
        self._requests = Counter("batchinfer_http_requests_total", "Requests answered.", labels, registry=self.registry)
        self._seconds = Histogram(
            "batchinfer_http_request_duration_seconds", "Time to the end of the answer.", ("method", "route"),
            buckets=BUCKETS, registry=self.registry,
        )  # fmt: skip
        self._kept: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        """By method, route and status, as the library keeps them too, but found without looking at each label."""

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request is answered."""
        kept = self._kept.get((method, route, status))
        if kept is None:
            kept = (self._requests.labels(method, route, str(status)), self._seconds.labels(method, route))
            self._kept[method, route, status] = kept
        kept[0].inc()
        kept[1].observe(seconds)


class MetricsMiddleware:
    """Counts requests by route: ``/v1/jobs/{job_id}`` and not the id. Paths without a route are one: strangers invent them."""

    METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            method = scope["method"] if scope["method"] in self.METHODS else "other"
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.count(method, route, status, time.perf_counter() - started)
