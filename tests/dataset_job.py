"""A whole job on the data set layer alone: what planner, workers and finalizer do, without a database or an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchinfer.dataset.finalize import ShardResultFile, finalize_output
from batchinfer.dataset.layout import OutputLayout
from batchinfer.dataset.merge import merge_shard
from batchinfer.dataset.prompt import PromptConfig, RowReader
from batchinfer.dataset.schema import ResultRow, ResultSchema
from batchinfer.dataset.sink import PartWriter
from batchinfer.dataset.source import InputSource
from batchinfer.types import FinishReason, Request, RowStatus, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchinfer.dataset.manifest import Manifest
    from batchinfer.dataset.prompt import RowInput

MODEL = "echo"


def text_of(request: Request) -> str:
    """The prompt, or the last message's content."""
    return request.prompt if request.messages is None else request.messages[-1]["content"]


def echo(row: RowInput, attempt: int) -> ResultRow:
    """Result of an engine that repeats the prompt."""
    if row.request is None:
        status = RowStatus.SKIPPED if row.skipped else RowStatus.ERRORED
        return ResultRow(row.row_index, status, MODEL, attempt, error=row.error, warnings=row.warnings)
    text = text_of(row.request)
    return ResultRow(
        row.row_index,
        RowStatus.SUCCEEDED,
        MODEL,
        attempt,
        output=f"echo {text}",
        finish_reason=FinishReason.STOP,
        usage=Usage(len(text), 0, 2),
        cost_nanos=1000 + row.row_index,
        warnings=row.warnings,
    )


@dataclass
class DatasetJob:
    """One job; ``shard_rows`` and ``part_rows`` are small so that tests see several of each."""

    inputs: list[str]
    output: str
    config: PromptConfig = field(default_factory=PromptConfig)
    prefix: str = ""
    limit: int | None = None
    shard_rows: int = 10
    part_rows: int = 3
    job_id: str = "job_1"
    answer: Callable[[RowInput, int], ResultRow] = echo

    def __post_init__(self) -> None:
        self.source = InputSource.open(self.inputs, self.limit)
        self.schema = ResultSchema(self.source.schema, self.prefix)
        self.reader = RowReader(self.config, self.source.schema)
        self.layout = OutputLayout(self.output, self.job_id)
        self.next_attempt = 1

    def ranges(self) -> list[tuple[int, int]]:
        """Row ranges of the shards."""
        ends = range(0, self.source.num_rows, self.shard_rows)
        return [(start, min(start + self.shard_rows, self.source.num_rows)) for start in ends]

    def rows(self, start: int, end: int) -> Iterator[RowInput]:
        """Rendered rows of a range."""
        for first, batch in self.source.iter_batches(start, end, self.reader.columns):
            yield from self.reader.read(batch, first)

    def write_parts(self, index: int, start: int, end: int) -> list[str]:
        """Run a shard's rows; return its parts' paths."""
        writer = PartWriter(self.layout, self.schema, index, self.next_attempt)
        paths, buffer = [], []
        for row in self.rows(start, end):
            buffer.append(self.answer(row, self.next_attempt))
            if len(buffer) == self.part_rows:
                paths.append(writer.write(buffer).path)
                buffer = []
        return paths + ([writer.write(buffer).path] if buffer else [])

    def run_shard(self, index: int, start: int, end: int) -> ShardResultFile:
        """Run, merge and publish a shard."""
        parts = self.write_parts(index, start, end)
        merged = merge_shard(
            self.source, self.schema, start, end, parts, self.layout.merged_path(index, self.next_attempt),
            metadata={"job_id": self.job_id},
        )  # fmt: skip
        self.next_attempt += 1
        self.layout.publish_shard(merged.path)
        return ShardResultFile(index, start, end, merged.path, merged.num_bytes, merged.sha256)

    def finalize(self, shards: list[ShardResultFile]) -> Manifest:
        """Finish the output."""
        return finalize_output(
            self.layout, shards, num_rows=self.source.num_rows, output_schema=self.schema.output_schema,
            prefix=self.prefix, input_fingerprint=self.source.fingerprint(), metadata={"job_id": self.job_id},
        )  # fmt: skip

    def run(self) -> Manifest:
        """All of it."""
        self.layout.prepare()
        return self.finalize([self.run_shard(i, *span) for i, span in enumerate(self.ranges())])
