"""What happens to a job: a page of events, or a stream of them."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from batchinfer.api.deps import JobId, Limit, Service
from batchinfer.api.routes.jobs import JOB_ERRORS
from batchinfer.jobs.service import JobService
from batchinfer.jobs.status import HELD, JobState
from batchinfer.jobs.views import EventList, EventView

POLL_SECONDS = 1.0
"""How soon a stream tells of an event."""
KEEPALIVE_POLLS = 15
"""Polls without an event before a comment is sent: proxies close what is silent."""
STREAM_POLLS = 3600
"""A stream ends after so many polls; clients come again with Last-Event-ID by themselves."""
MAX_EVENT_ID = 2**63 - 1

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=JOB_ERRORS)
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


@router.get("/{job_id}/events", response_model=EventList, responses=_STREAM)
async def get_events(  # noqa: PLR0917 -- FastAPI passes them by name
    job_id: JobId,
    service: Service,
    request: Request,
    limit: Limit = 100,
    after: Annotated[int, Query(ge=0, le=MAX_EVENT_ID, description="Last event of the page before.")] = 0,
    last_event_id: Annotated[str | None, Header(description="The same as `after`, for streams.")] = None,
) -> EventList | StreamingResponse:
    """What happened to a job, oldest first.

    With `Accept: text/event-stream` a stream: what has happened, then what happens, until the job ends or is held.
    """
    if last_event_id is not None and last_event_id.isdecimal():
        after = min(int(last_event_id[:20]), MAX_EVENT_ID)
    # before the stream begins, so that another tenant's job is 404
    page = await run_in_threadpool(service.events, job_id, after=after, limit=limit)
    if "text/event-stream" not in request.headers.get("accept", ""):
        return page
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(service, job_id, after), media_type="text/event-stream", headers=headers)


async def _events(service: JobService, job_id: str, after: int) -> AsyncIterator[str]:
    num_silent = 0
    for _ in range(STREAM_POLLS):
        # the state first: what happened before it is then in the page
        view = await run_in_threadpool(service.job, job_id)
        page = await run_in_threadpool(service.events, job_id, after=after, limit=100)
        for event in page.data:
            after = event.id
            yield _message(event)
        if not page.has_more:
            if view.state.is_terminal or view.state in HELD or view.state is JobState.FAILED:
                yield "event: end\ndata: {}\n\n"
                return
            num_silent = 0 if page.data else num_silent + 1
            if num_silent >= KEEPALIVE_POLLS:
                num_silent = 0
                yield ": still here\n\n"
            await asyncio.sleep(POLL_SECONDS)


def _message(event: EventView) -> str:
    # JSON has no line breaks of its own, so one data line is enough
    return f"id: {event.id}\nevent: {event.kind}\ndata: {json.dumps(event.model_dump(mode='json'))}\n\n"
