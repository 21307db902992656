"""Results, for clients that do not see the server's disks: whole files, and the proof."""

from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Path, Query
from fastapi.responses import StreamingResponse

from batchinfer.api.deps import JobId, Service
from batchinfer.api.schemas import ErrorBody, VerifyView

router = APIRouter(
    prefix="/v1/jobs/{job_id}",
    tags=["jobs"],
    responses={404: {"model": ErrorBody, "description": "No such job or file."}},
)


@router.get("/results/{name}", response_class=StreamingResponse)
def get_result_file(
    job_id: JobId, name: Annotated[str, Path(description="Last part of a result file's path.")], service: Service
) -> StreamingResponse:
    """Fetch one result file, as Parquet. `GET /v1/jobs/{job_id}/results` lists them with their hashes."""
    file, chunks = service.read_result(job_id, name)
    headers = {
        "Content-Length": str(file.num_bytes),
        "Content-Disposition": f"attachment; filename*=utf-8''{quote(name, safe='')}",
        "X-Content-Type-Options": "nosniff",
    }
    return StreamingResponse(chunks, media_type="application/vnd.apache.parquet", headers=headers)


@router.get("/verify", responses={409: {"model": ErrorBody, "description": "The job has not ended."}})
def verify_job(
    job_id: JobId,
    service: Service,
    check_input: Annotated[bool, Query(description="Compare the rows with the input's.")] = True,
) -> VerifyView:
    """Prove from the files that every input row has exactly one outcome. Reads all of them: it may take a while."""
    report = service.verify(job_id, check_input=check_input)
    return VerifyView(
        output=report.output,
        job_id=report.job_id,
        num_files=report.num_files,
        num_rows=report.num_rows,
        counts=report.counts,
        input_checked=report.input_checked,
        problems=list(report.problems),
        ok=report.ok,
    )
