"""The files that a batch ends with: its answers and its errors, line by line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchinfer.jobs.batch_view import batch_id_of, error_file_id, output_file_id
from batchinfer.jobs.files import BATCH_OUTPUT
from batchinfer.jobs.ledger_files import FileRecord
from batchinfer.jobs.present import output_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.jobs.ledger import Ledger
    from batchinfer.jobs.records import JobRecord


def publish_batch_files(ledger: Ledger, job: JobRecord) -> None:
    """Write the two files of a job that is a batch; nothing for other jobs. Safe to run again.

    The job's Parquet results must be complete. The files' ids follow from the job's, so the batch names them as soon
    as it has ended, and a batch whose rows ran again has its new files under the same ids.
    """
    terms = ledger.batch_terms(job.id)
    if terms is None:
        return
    from batchinfer.dataset.openai_results import LineContext, write_lines  # noqa: PLC0415 -- pyarrow

    output = output_of(job).rstrip("/")
    created = int((job.started_at or job.created_at).timestamp())
    context = LineContext(job.id.removeprefix("job_"), terms.endpoint, terms.model, created)
    answers, errors = write_lines(
        _result_files(output), context, output=f"{output}.output.jsonl", errors=f"{output}.errors.jsonl"
    )
    for file, file_id, kind in (
        (answers, output_file_id(job.id), "output"),
        (errors, error_file_id(job.id), "errors"),
    ):
        if file is not None:
            name = f"{batch_id_of(job.id)}_{kind}.jsonl"
            record = FileRecord(
                file_id, terms.tenant_id, name, BATCH_OUTPUT, file.num_bytes, file.sha256, file.location, job.id
            )
            ledger.add_file(record, expires_after_s=terms.output_expires_s)


def _result_files(output: str) -> Sequence[str]:
    from batchinfer.dataset.manifest import read_manifest  # noqa: PLC0415 -- pyarrow

    return [f"{output}/{file.name}" for file in read_manifest(output).files]
