"""Where a job's results lie, and its first rows for people to look at. pyarrow loads when a function runs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchinfer.errors import InputError, NotFoundError
from batchinfer.jobs.present import output_of
from batchinfer.jobs.status import ShardState
from batchinfer.jobs.views import PreviewRow, ResultFile, ResultsView, TokenUsage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from batchinfer.jobs.records import JobRecord, ShardRecord
    from batchinfer.jobs.spec import JobSpec

_RESULT_COLUMNS = ("row_index", "status", "output", "finish_reason", "error", "usage", "cost_usd")


@dataclass(frozen=True, slots=True)
class RangedFile:
    """A result file and the rows of the input that it has, a half-open range."""

    file: ResultFile
    row_start: int
    row_end: int


def results_view(job: JobRecord, shards: Iterable[ShardRecord]) -> ResultsView:
    """The finished output by its manifest, or the shards published so far."""
    return ResultsView(
        job_id=job.id,
        state=job.state,
        output=output_of(job),
        is_complete=job.manifest_path is not None and job.state.is_terminal,
        manifest=job.manifest_path if job.state.is_terminal else None,
        files=[ranged.file for ranged in ranged_files(job, shards)],
    )


def ranged_files(job: JobRecord, shards: Iterable[ShardRecord]) -> Iterator[RangedFile]:
    """Result files in input order: the manifest's, or those of the shards published so far."""
    from batchinfer.dataset.layout import OutputLayout  # noqa: PLC0415 -- pyarrow loads when it is used

    output = output_of(job)
    files = _manifest_files(output) if job.state.is_terminal else None
    if files is not None:
        yield from files
        return
    layout = OutputLayout(output, job.id)
    for shard in shards:
        if shard.state is ShardState.COMMITTED:
            yield RangedFile(_shard_file(layout.shard_path(shard.index), shard), shard.row_start, shard.row_end)


def _manifest_files(output: str) -> list[RangedFile] | None:
    """None where the manifest cannot be read: this machine may see other disks than the workers do."""
    from batchinfer.dataset.manifest import read_manifest  # noqa: PLC0415 -- pyarrow loads when it is used

    folder = output.rstrip("/").rpartition("/")[0] if output.endswith(".parquet") else output.rstrip("/")
    with suppress(NotFoundError, InputError, OSError):
        return [
            RangedFile(
                ResultFile(
                    path=f"{folder}/{file.name}", num_rows=file.num_rows, num_bytes=file.num_bytes, sha256=file.sha256
                ),
                file.row_start,
                file.row_end,
            )
            for file in read_manifest(output).files
        ]
    return None


def _shard_file(path: str, shard: ShardRecord) -> ResultFile:
    return ResultFile(
        path=path,
        num_rows=shard.result_rows or 0,
        num_bytes=shard.result_bytes or 0,
        sha256=shard.result_sha256 or "",
    )


def first_rows(spec: JobSpec, files: Iterable[ResultFile], limit: int) -> list[PreviewRow]:
    """The first ``limit`` rows of the result files, in input order.

    Raises:
        OSError: a file cannot be read from this machine.
    """
    rows: list[PreviewRow] = []
    for file in files:
        rows.extend(result_row(row, spec) for row in _read_head(file.path, spec, limit - len(rows)))
        if len(rows) >= limit:
            break
    return rows


def _read_head(path: str, spec: JobSpec, limit: int) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq  # noqa: PLC0415 -- pyarrow loads when it is used

    from batchinfer.dataset.filesystem import open_filesystem  # noqa: PLC0415 -- pyarrow loads when it is used

    filesystem, inner = open_filesystem(path)
    with filesystem.open_input_file(inner) as stream:
        file = pq.ParquetFile(stream, pre_buffer=False)
        present = [name for name in result_row_columns(spec) if name in file.schema_arrow.names]
        batch = next(file.iter_batches(batch_size=limit, columns=present), None)
        if batch is not None:
            yield from batch.to_pylist()


def result_row_columns(spec: JobSpec) -> list[str]:
    """Columns of a result file that :func:`result_row` looks at, where there are such."""
    return [spec.column_prefix + name for name in _RESULT_COLUMNS] + _prompt_columns(spec)


def _prompt_columns(spec: JobSpec) -> list[str]:
    """Input columns worth showing; a template's columns are the row itself, so none is."""
    if spec.template is not None:
        return []
    named = [name for name in (spec.messages_column, spec.prompt_column) if name is not None]
    return named or ["messages", "prompt"]


def result_row(row: Mapping[str, Any], spec: JobSpec) -> PreviewRow:
    """A row of a result file, as people see it."""
    result: dict[str, Any] = {name: row.get(spec.column_prefix + name) for name in _RESULT_COLUMNS}
    prompts = (_prompt_text(row.get(name)) for name in _prompt_columns(spec))
    return PreviewRow(
        row_index=result["row_index"],
        status=result["status"],
        prompt=next((text for text in prompts if text is not None), None),
        output=result["output"],
        finish_reason=result["finish_reason"],
        error_code=(result["error"] or {}).get("code"),
        error_message=(result["error"] or {}).get("message"),
        usage=TokenUsage(**(result["usage"] or {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0})),
        cost_usd=result["cost_usd"],
    )


def _prompt_text(value: Any) -> str | None:
    """A prompt, or the last message of a conversation, as text."""
    if isinstance(value, list):
        last = value[-1] if value else {}
        return _prompt_text(last.get("content")) if isinstance(last, dict) else str(last)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return None if value is None else str(value)
