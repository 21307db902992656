"""A leased shard's files: the rows it reads, the parts it has, the file it becomes."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from batchinfer import __version__
from batchinfer.dataset.layout import OutputLayout
from batchinfer.dataset.merge import base_rows_with_status, merge_shard
from batchinfer.dataset.roots import Roots
from batchinfer.dataset.sink import PartWriter, iter_done_rows
from batchinfer.dataset.source import InputSource
from batchinfer.dataset.stage_reader import row_reader
from batchinfer.jobs.leases import ShardResult
from batchinfer.jobs.planner import prompt_config, result_schema
from batchinfer.jobs.status import ShardState
from batchinfer_workers.remaining import RemainingRows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchinfer.dataset.layout import BaseFile
    from batchinfer.dataset.prompt import RowInput
    from batchinfer.jobs.leases import Lease
    from batchinfer.jobs.ledger import Ledger
    from batchinfer.jobs.records import JobRecord
    from batchinfer.types import RowStatus

READ_ROWS = 256
"""Rows read and rendered at once."""


def output_metadata(job: JobRecord) -> dict[str, str]:
    """What goes into the footer of each result file, beside what the data set layer adds."""
    found = {"job_id": job.id, "spec_hash": job.spec_hash, "model": job.model, "engine_version": __version__}
    recipe = quantization_recipe(job)
    return found | {"recipe": recipe} if recipe else found


def quantization_recipe(job: JobRecord) -> str:
    """How the engines that worked on a job quantised its model; empty if they did not."""
    return ", ".join(sorted({engine["recipe"] for engine in job.engines if engine.get("recipe")}))


def output_layout(job: JobRecord) -> OutputLayout:
    """Where a planned job's results lie."""
    if job.output is None:
        raise ValueError(f"job {job.id} is not planned: it has no output yet")
    return OutputLayout(job.output, job.id)


class ShardFiles:
    """Files of one lease.

    Raises:
        InputError: ``input_changed``: the input is not what was planned; also while iterating.
    """

    def __init__(self, ledger: Ledger, lease: Lease, roots: Roots | None = None) -> None:
        self._ledger = ledger
        self._lease = lease
        spec = lease.job.spec
        roots = self._roots = roots or Roots()
        assert lease.job.output is not None
        roots.check_output(lease.job.output)
        self.layout = output_layout(lease.job)
        self._source = InputSource.reopen(lease.job.fingerprint, roots.check_input)
        self._schema = result_schema(spec, self._source.schema)
        self.writer = PartWriter(self.layout, self._schema, lease.shard.index, lease.attempt_id)

    @cached_property
    def replaced(self) -> dict[int, RowStatus]:
        """In a retry: the rows to run again and the outcomes they have; empty otherwise."""
        base = self._base
        if base is None:
            return {}
        shard, spec = self._lease.shard, self._lease.job.spec
        return base_rows_with_status(
            base, shard.row_start, shard.row_end, self._lease.retry_statuses, prefix=spec.column_prefix
        )

    def remaining(self) -> RemainingRows:
        """Rows that have no outcome in this generation."""
        shard = self._lease.shard
        rows = RemainingRows(shard.row_start, shard.row_end, self.replaced if self._base else None)
        rows.discard(int(row) for row in iter_done_rows(self._parts()))
        return rows

    def read(self, rows: RemainingRows) -> Iterator[RowInput]:
        """Read and render these rows, in order, in bounded memory."""
        reader = row_reader(prompt_config(self._lease.job.spec, self._roots), self._source.schema)
        start, end = rows.bounds
        if start == end:
            return
        for first, batch in self._source.iter_batches(start, end, reader.columns, READ_ROWS):
            yield from reader.read(batch, first, skip=rows.skip)

    def merge(self) -> ShardResult:
        """Join input and parts into the shard's file, hidden until it is committed and published."""
        shard = self._lease.shard
        merged = merge_shard(
            self._source,
            self._schema,
            shard.row_start,
            shard.row_end,
            self._parts(),
            self.layout.merged_path(shard.index, self._lease.attempt_id),
            base=self._base,
            metadata=output_metadata(self._ledger.get_job(self._lease.job.id)),
        )
        return ShardResult(merged.path, merged.num_rows, merged.num_bytes, merged.sha256)

    def _parts(self) -> list[str]:
        return [part.path for part in self._ledger.parts(self._lease.shard.id, generation=self._lease.generation)]

    def own_results(self) -> Iterator[str]:
        """Files of this job that may hold answers already: the shard's own parts, and other shards' published files."""
        yield from self._parts()
        for shard in self._ledger.shards(self._lease.job.id):
            if shard.state is ShardState.COMMITTED and shard.id != self._lease.shard.id:
                yield self.layout.shard_path(shard.index)

    def publish(self, result: ShardResult) -> None:
        """Make the committed file visible."""
        if self._lease.generation > 0:
            self.layout.retract()
        self.layout.publish_shard(result.path)

    @cached_property
    def _base(self) -> BaseFile | None:
        """The earlier result that a retry builds on."""
        shard = self._lease.shard
        return self.layout.base(shard.index, shard.row_start) if self._lease.generation > 0 else None
