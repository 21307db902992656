"""Polls made cheap: most ask for a job of which nothing has changed since somebody asked last.

A poll reads one row by its key. What was answered before is given again while that row is the same, for a second where
time alone changes the answer (speed, time left, why it waits). Bytes are kept of few jobs, the ones asked for last.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anyio import CapacityLimiter, to_thread
from starlette.responses import Response

from batchinfer.jobs.ledger_changes import version_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchinfer.jobs.service import JobService

POLL_THREADS = 8
"""Of their own: uploads, estimates and downloads of slow clients never keep polls waiting, nor polls them."""
FRESH_SECONDS = 1.0
"""How long an answer of a job that has not ended is given again."""
MAX_ANSWERS = 512
"""Answers kept; of about a kilobyte each."""
UNCHANGED_SECONDS = 5
"""Longest time that a poller of a job that has not ended is told that nothing has changed: its speed has, by then."""


@dataclass(frozen=True, slots=True)
class _Answer:
    version: str
    etag: str
    body: bytes
    fresh_until: float


class Poller:
    """Answers polls of one server. Thread-safe."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._limiter = CapacityLimiter(POLL_THREADS)
        self._answers: OrderedDict[str, _Answer] = OrderedDict()
        self._lock = threading.Lock()

    async def answer(self, service: JobService, job_id: str, if_none_match: str | None) -> Response:
        """How a job stands, or 304 if the caller's ETag is still right. Raises NotFoundError."""
        return await to_thread.run_sync(self._answer, service, job_id, if_none_match, limiter=self._limiter)

    def _answer(self, service: JobService, job_id: str, if_none_match: str | None) -> Response:
        # what a caller may see is decided here, each time; answers are the same for all who may see the job
        found = service.job_version(job_id)
        now = self._now()
        version = found.version if found.has_ended else f"{found.version}.{int(now / UNCHANGED_SECONDS)}"
        with self._lock:
            kept = self._answers.get(job_id)
        if kept is not None and kept.version == version and matches(if_none_match, kept.etag):
            return Response(status_code=304, headers={"ETag": kept.etag})
        if kept is None or kept.version != version or (not found.has_ended and kept.fresh_until <= now):
            kept = self._make(service, job_id, version, now)
        if matches(if_none_match, kept.etag):
            return Response(status_code=304, headers={"ETag": kept.etag})
        return Response(kept.body, media_type="application/json", headers={"ETag": kept.etag})

    def _make(self, service: JobService, job_id: str, version: str, now: float) -> _Answer:
        job = service.job(job_id)
        body = service.view_alone(job).model_dump_json().encode()
        answer = _Answer(version, f'W/"{version_of(job)}.{version}"', body, now + FRESH_SECONDS)
        with self._lock:
            self._answers[job_id] = answer
            self._answers.move_to_end(job_id)
            while len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
        return answer


def matches(if_none_match: str | None, etag: str) -> bool:
    """Whether an If-None-Match header names this ETag; compared weakly, as RFC 9110 has it for GET."""
    if if_none_match is None:
        return False
    opaque = etag.removeprefix("W/")
    return any(each.strip() == "*" or each.strip().removeprefix("W/") == opaque for each in if_none_match.split(","))
