"""Finishing a job whose rows have all ended: manifest, ``_SUCCESS``, the single file if one was asked for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from batchinfer import __version__
from batchinfer.dataset.finalize import ShardResultFile, finalize_output
from batchinfer.dataset.long_samples import long_location, write_long
from batchinfer.dataset.source import InputSource
from batchinfer.errors import BatchInferError
from batchinfer.jobs.batch_results import publish_batch_files
from batchinfer.jobs.planner import result_schema
from batchinfer.jobs.spec import SamplesLayout
from batchinfer.jobs.status import Action
from batchinfer.money import nanos_to_usd
from batchinfer_workers.heartbeat import LeaseKeeper
from batchinfer_workers.reuse_index import write_key_index
from batchinfer_workers.shard_files import output_layout, output_metadata, quantization_recipe

if TYPE_CHECKING:
    from batchinfer.dataset.roots import Roots
    from batchinfer.jobs.leases import FinalizeLease
    from batchinfer.jobs.ledger import Ledger
    from batchinfer.jobs.records import JobRecord

_log = logging.getLogger(__name__)


def run_finalizing(
    ledger: Ledger, lease: FinalizeLease, *, lease_seconds: float, roots: Roots | None = None
) -> JobRecord:
    """Publish the job's results and end it. Safe to run again after a crash at any point.

    Raises:
        FencedError: the lease was lost: somebody else finishes the job.
    """
    job = lease.job

    def renew() -> Action:
        ledger.heartbeat_finalizing(job.id, lease.token, lease_seconds=lease_seconds)
        return Action.CONTINUE

    with LeaseKeeper(renew, seconds=lease_seconds / 4) as keeper:
        results = _results(ledger, job)
        try:
            if roots is not None and job.output is not None:
                roots.check_output(job.output)
            manifest_path = _publish(ledger, job, results)
            publish_batch_files(ledger, job)
        except Exception as error:  # noqa: BLE001 -- a full disk or a removed file: `resume` tries again
            keeper.check()
            _log.exception("the results of job %s cannot be published", job.id)
            return ledger.fail_finalizing(job.id, lease.token, "finalizing_failed", f"{type(error).__name__}: {error}")
        return ledger.finish(job.id, lease.token, manifest_path)


def _publish(ledger: Ledger, job: JobRecord, results: list[ShardResultFile]) -> str:
    layout = output_layout(job)
    manifest = finalize_output(
        layout,
        results,
        num_rows=job.num_rows or 0,
        output_schema=None if job.num_shards else _output_schema(job),
        prefix=job.spec.column_prefix,
        input_fingerprint=job.fingerprint,
        job=_describe(job),
        metadata=output_metadata(job),
        has_stages=bool(job.spec.stages),
    )
    if job.spec.reuse_results:
        write_key_index(ledger, job, layout, manifest)
    if job.spec.samples_layout is SamplesLayout.LONG:
        files = [layout.manifest.parent.child(file.name) for file in manifest.files]
        write_long(files, long_location(layout.output), job.spec.column_prefix, output_metadata(job))
    return layout.manifest_path


def _output_schema(job: JobRecord) -> Any:
    """Arrow schema of the results of a job without rows, whose one file is empty."""
    source = InputSource.reopen(job.fingerprint)
    return result_schema(job.spec, source.schema).output_schema


def _results(ledger: Ledger, job: JobRecord) -> list[ShardResultFile]:
    found = []
    for shard in ledger.shards(job.id):
        if shard.result_path is None:
            raise BatchInferError(f"shard {shard.index} of {job.id} has no result: the job is not ready to be finished")
        found.append(
            ShardResultFile(
                shard.index,
                shard.row_start,
                shard.row_end,
                shard.result_path,
                shard.result_bytes or 0,
                shard.result_sha256 or "",
            )
        )
    return found


def _describe(job: JobRecord) -> dict[str, Any]:
    """What the manifest says about the job beside its files."""
    return {
        "name": job.name,
        "model": job.model,
        "spec": job.spec.model_dump(mode="json"),
        "spec_hash": job.spec_hash,
        "recipe": quantization_recipe(job),
        "retry_generation": job.retry_generation,
        "rows": job.counts.as_dict(),
        "usage": {
            "prompt_tokens": job.usage.prompt_tokens,
            "cached_tokens": job.usage.cached_tokens,
            "completion_tokens": job.usage.completion_tokens,
        },
        "cost_usd": {
            "metered": str(nanos_to_usd(job.metered_nanos)),
            "overhead": str(nanos_to_usd(job.overhead_nanos)),
            "list": str(nanos_to_usd(job.list_nanos)),
        },
        "warnings": list(job.warnings),
        "created_at": job.created_at.isoformat(),
        "version": __version__,
    }
