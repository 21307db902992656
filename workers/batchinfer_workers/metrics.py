"""Numbers for Prometheus: what this worker commits, spends and loses, and how its engine does.

No label names a tenant or a job: their number has no bound.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

from batchinfer.errors import FencedError, UserError
from batchinfer.jobs.ledger import Ledger
from batchinfer.jobs.status import FailureKind
from batchinfer.money import NANOS_PER_USD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from sqlalchemy import Engine

    from batchinfer.jobs.leases import Lease, PartCommit
    from batchinfer.jobs.records import AttemptRecord, JobRecord, ShardRecord
    from batchinfer.settings import Settings

_log = logging.getLogger(__name__)
_COUNTERS = (
    ("steps", "batchinfer_engine_steps", "Steps that computed something."),
    ("failed_steps", "batchinfer_engine_failed_steps", "Steps that raised and were rolled back."),
    (
        "out_of_memory",
        "batchinfer_engine_out_of_memory",
        "Of these, for want of memory: computed again in smaller ones.",
    ),
    ("preemptions", "batchinfer_engine_preemptions", "Rows put back since the KV cache was full."),
    ("misestimates", "batchinfer_engine_misestimates", "Answers longer than was estimated."),
    ("prompt_tokens", "batchinfer_engine_prompt_tokens", "Prompt tokens of admitted rows."),
    ("cached_tokens", "batchinfer_engine_prefix_hit_tokens", "Of these, found in the KV cache."),
    ("completion_tokens", "batchinfer_engine_generated_tokens", "Tokens sampled, of unfinished rows too."),
)
_GAUGES = (
    ("num_running", "batchinfer_engine_running_rows", "Rows that hold blocks of the KV cache."),
    ("num_waiting", "batchinfer_engine_waiting_rows", "Rows that the engine has and does not run yet."),
)
_SUMMARIES = (
    ("steps", "step_ns", "batchinfer_engine_step_seconds", "Time of a step."),
    ("first_tokens", "first_token_ns", "batchinfer_time_to_first_token_seconds", "From the engine's queue on."),
    ("later_tokens", "later_token_ns", "batchinfer_time_per_output_token_seconds", "After the first token."),
)


class EngineCollector:
    """The engine's own counters; they begin anew with a new engine, as Prometheus expects of a restart."""

    def __init__(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        self._stats = stats

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing ahead of time."""
        return []

    def collect(self) -> Iterator[Any]:
        """Read the last snapshot that the engine sent."""
        stats = self._stats()
        for field, name, text in _COUNTERS:
            yield CounterMetricFamily(name, text, value=stats.get(field, 0))
        for field, name, text in _GAUGES:
            yield GaugeMetricFamily(name, text, value=stats.get(field, 0))
        for number, total, name, text in _SUMMARIES:
            count, seconds = stats.get(number, 0), stats.get(total, 0) / 1e9
            yield SummaryMetricFamily(name, text, count_value=count, sum_value=seconds)
        for name, text, part, whole in (
            (
                "batchinfer_engine_batch_occupancy",
                "Running rows over the most there may be.",
                "num_running",
                "max_num_seqs",
            ),
            ("batchinfer_engine_kv_cache_usage", "Used blocks over all blocks.", "used_blocks", "num_blocks"),
            ("batchinfer_engine_roofline_share", "Of the device's limit, reached so far.", "roofline_ns", "step_ns"),
        ):
            yield GaugeMetricFamily(name, text, value=stats.get(part, 0) / (stats.get(whole, 0) or 1))


class WorkerMetrics:
    """The registry of one worker."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.rows = Counter("batchinfer_rows_total", "Rows committed, by outcome.", ["status"], registry=registry)
        self.tokens = Counter("batchinfer_tokens_total", "Tokens of committed rows.", ["kind"], registry=registry)
        self.cost = Counter("batchinfer_cost_usd_total", "Metered dollars booked.", ["kind"], registry=registry)
        self.attempts = Counter("batchinfer_attempts_total", "Attempts that ended.", ["end"], registry=registry)
        self.retries = Counter(
            "batchinfer_shard_retries_total", "Leases of shards that failed before.", registry=registry
        )
        self.device_healthy = Gauge(
            "batchinfer_worker_device_healthy", "0 while the device is not well and takes no shards.", registry=registry
        )
        self.device_healthy.set(1)
        self.losses = Counter("batchinfer_lease_losses_total", "Own leases found to be lost.", registry=registry)
        self.reaped = Counter(
            "batchinfer_leases_reaped_total", "Expired leases ended, of any worker.", registry=registry
        )

    def watch_engine(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        """Show an engine's counters as well."""
        self.registry.register(EngineCollector(stats))

    def serve_if(self, settings: Settings) -> Callable[[], None]:
        """Answer scrapes in a thread of its own, if the settings name a port; returns what ends that.

        Raises:
            UserError: the port is taken.
        """
        if not settings.metrics_port:
            return lambda: None
        try:
            server, thread = start_http_server(settings.metrics_port, settings.metrics_host, self.registry)
        except OSError as error:
            raise UserError(
                f"cannot listen on {settings.metrics_host}:{settings.metrics_port} for metrics: {error.strerror}; "
                "give each worker of a machine its own BATCHINFER_METRICS_PORT",
                param="metrics_port",
            ) from None
        _log.info("metrics at http://%s:%s/metrics", settings.metrics_host, settings.metrics_port)

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join(timeout=5)

        return close


class CountingLedger(Ledger):
    """The ledger, with what this worker does through it counted."""

    def __init__(self, engine: Engine, metrics: WorkerMetrics) -> None:
        super().__init__(engine)
        self._metrics = metrics

    def lease_shard(self, worker_id: str, **options: Any) -> Lease | None:
        """Lease; see the ledger."""
        lease = super().lease_shard(worker_id, **options)
        if lease is not None and lease.shard.num_failures + lease.shard.num_faults:
            self._metrics.retries.inc()
        return lease

    def commit_part(self, attempt_id: int, part: PartCommit) -> Any:
        """Commit rows; see the ledger."""
        done = self._fenced(lambda: super(CountingLedger, self).commit_part(attempt_id, part))
        for status, number in part.counts.as_dict().items():
            self._metrics.rows.labels(status).inc(number)
        usage = part.usage
        self._metrics.tokens.labels("prompt").inc(usage.prompt_tokens - usage.cached_tokens)
        self._metrics.tokens.labels("cached").inc(usage.cached_tokens)
        self._metrics.tokens.labels("completion").inc(usage.completion_tokens)
        self._metrics.cost.labels("rows").inc(part.metered_nanos / NANOS_PER_USD)
        return done

    def commit_shard(self, *shard: Any, **options: Any) -> JobRecord:
        """Commit a shard; see the ledger."""
        job: JobRecord = self._fenced(lambda: super(CountingLedger, self).commit_shard(*shard, **options))
        self._metrics.attempts.labels("committed").inc()
        return job

    def release(self, attempt_id: int, metered_ns: int, *, device_fault: str | None = None) -> None:
        """Give a shard back; see the ledger."""
        self._fenced(lambda: super(CountingLedger, self).release(attempt_id, metered_ns, device_fault=device_fault))
        self._metrics.attempts.labels("released").inc()

    def fail(
        self, attempt_id: int, reason: str, metered_ns: int, *, kind: FailureKind = FailureKind.ENGINE
    ) -> ShardRecord:
        """End an attempt as failed; see the ledger."""
        shard: ShardRecord = self._fenced(
            lambda: super(CountingLedger, self).fail(attempt_id, reason, metered_ns, kind=kind)
        )
        self._metrics.attempts.labels(f"failed_{kind.value}").inc()
        return shard

    def heartbeat(self, attempt_id: int, metered_ns: int, **options: Any) -> Any:
        """Renew a lease; see the ledger."""
        return self._fenced(lambda: super(CountingLedger, self).heartbeat(attempt_id, metered_ns, **options))

    def add_overhead(self, job_id: str | None, source_id: str, **booked: Any) -> Any:
        """Book overhead; see the ledger."""
        is_new = super().add_overhead(job_id, source_id, **booked)
        self._metrics.cost.labels(booked["kind"]).inc(booked["nanos"] / NANOS_PER_USD)
        return is_new

    def reap_expired(self, **options: Any) -> list[AttemptRecord]:
        """End expired leases; see the ledger."""
        reaped = super().reap_expired(**options)
        self._metrics.reaped.inc(len(reaped))
        return reaped

    def _fenced(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except FencedError:
            self._metrics.losses.inc()
            raise
