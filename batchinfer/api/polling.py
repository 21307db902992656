"""Polls made cheap: most ask for a job of which nothing has changed since somebody asked last.

A poll reads one row by its key. What was answered before is given again while that row is the same, for a second where
time alone changes the answer (speed, time left, why it waits). Bytes are kept of few jobs, the ones asked for last.
Polls that arrive while rows are read, or just were, wait for the next read, all together: the busier a server is, the
fewer transactions and switches of threads a poll costs, and what each is told was read after it had come.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from anyio import CapacityLimiter, to_thread
from starlette.responses import Response

from batchinfer.jobs.ledger_changes import version_of
from batchinfer.jobs.queries import JobVersion, job_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchinfer.jobs.caller import Caller
    from batchinfer.jobs.service import JobService

VIEW_THREADS = 3
"""Of their own, as the one that reads rows: uploads, estimates and downloads of slow clients never keep polls waiting, nor
polls them. Few: more wait for each other, and the event loop for them."""
READ_SECONDS = 0.005
"""Time between the beginnings of reads: polls that come sooner go together, one that comes alone waits for nothing."""
FRESH_SECONDS = 1.0
"""How long at most an answer of a job that has not ended is given again."""
MAX_ANSWERS = 512
"""Answers kept; of a few kilobytes each."""
UNCHANGED_SECONDS = 5
"""Longest time that a poller of a job that has not ended is told that nothing has changed: its speed has, by then."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How a job stands, as bytes."""

    version: str
    etag: str
    fresh_until: float
    whole: Response
    unchanged: Response

    @classmethod
    def of(cls, version: str, etag: str, body: bytes, fresh_until: float) -> Self:
        """Both of its responses, made once for all who are answered with them."""
        headers = {"ETag": etag}
        whole = Response(body, media_type="application/json", headers=headers)
        return cls(version, etag, fresh_until, whole, Response(status_code=304, headers=headers))

    def response(self, if_none_match: str | None) -> Response:
        """The answer, or 304 if the caller's ETag is still right."""
        return self.unchanged if matches(if_none_match, self.etag) else self.whole


@dataclass(frozen=True, slots=True, eq=False)
class _Poll:
    service: JobService
    caller: Caller
    job_id: str
    if_none_match: str | None
    reply: asyncio.Future[Answer]

    def answer(self, answer: Answer) -> None:
        """Give it the answer."""
        if not self.reply.done():  # the client may have gone
            self.reply.set_result(answer)

    def fail(self, error: Exception) -> None:
        """Have the request answered with an error."""
        if not self.reply.done():
            self.reply.set_exception(error)


class Poller:
    """Answers polls of one server, in its event loop."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._reads = CapacityLimiter(1)
        self._views = CapacityLimiter(VIEW_THREADS)
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._waiting: list[_Poll] = []
        self._read_at = 0.0
        self._reader: asyncio.Task[None] | None = None
        self._making: dict[tuple[str, str], list[_Poll]] = {}
        """Polls that wait for an answer that is being made, by job and version."""
        self._makers: set[asyncio.Task[None]] = set()

    async def answer(self, service: JobService, caller: Caller, job_id: str, if_none_match: str | None) -> Answer:
        """How a job stands, for a caller whose ETag may still be right. Raises NotFoundError."""
        poll = _Poll(service, caller, job_id, if_none_match, asyncio.get_running_loop().create_future())
        self._waiting.append(poll)
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())
        return await poll.reply

    async def _read(self) -> None:
        """Read the rows of the polls that wait, until none does."""
        try:
            while self._waiting:
                if (pause := self._read_at + READ_SECONDS - time.monotonic()) > 0:
                    await asyncio.sleep(pause)
                self._read_at = time.monotonic()
                polls, self._waiting = self._waiting, []
                try:
                    await self._answer_all(polls)
                except Exception as error:  # noqa: BLE001 -- whatever it is, each of their requests answers with it
                    for poll in polls:
                        poll.fail(error)
        finally:
            self._reader = None

    async def _answer_all(self, polls: Sequence[_Poll]) -> None:
        # what a caller may see is decided with each read; answers are the same for all who may see the job
        asked = [(poll.job_id, poll.caller) for poll in polls]
        found = await to_thread.run_sync(job_versions, polls[0].service.engine, asked, limiter=self._reads)
        now = self._now()
        for poll, version in zip(polls, found, strict=True):
            if not isinstance(version, JobVersion):
                poll.fail(version)
                continue
            name = (
                version.version
                if version.has_ended
                else f"{version.version}.{int(now / UNCHANGED_SECONDS + _phase(poll.job_id))}"
            )
            kept = self._answers.get(poll.job_id)
            is_same = kept is not None and kept.version == name
            if kept is not None and is_same and (
                version.has_ended or now < kept.fresh_until or matches(poll.if_none_match, kept.etag)
            ):  # fmt: skip
                poll.answer(kept)
            elif (making := self._making.get((poll.job_id, name))) is not None:
                making.append(poll)
            else:
                self._making[poll.job_id, name] = [poll]
                # not waited for: what takes longer keeps no other poll
                maker = asyncio.create_task(self._make(poll.service.acting_for(poll.caller), poll.job_id, name))
                self._makers.add(maker)
                maker.add_done_callback(self._makers.discard)

    async def _make(self, service: JobService, job_id: str, version: str) -> None:
        """Answer the polls that wait for a job's answer of this version, and keep it."""
        try:
            etag, body = await to_thread.run_sync(_view, service, job_id, version, limiter=self._views)
        except Exception as error:  # noqa: BLE001 -- as above
            for poll in self._making.pop((job_id, version)):
                poll.fail(error)
            return
        now = self._now()
        fresh_until = now + FRESH_SECONDS * (1 - (now / FRESH_SECONDS + _phase(job_id)) % 1)
        answer = Answer.of(version, etag, body, fresh_until)
        self._answers[job_id] = answer
        self._answers.move_to_end(job_id)
        while len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)
        for poll in self._making.pop((job_id, version)):
            poll.answer(answer)


def _phase(job_id: str) -> float:
    """When within each period a job's answer grows old, of 0 to 1: all at once would keep polls waiting for all."""
    return zlib.crc32(job_id.encode()) / 2**32


def _view(service: JobService, job_id: str, version: str) -> tuple[str, bytes]:
    """ETag and body."""
    job, view = service.get_with_record(job_id)
    return f'W/"{version_of(job)}.{version}"', view.model_dump_json().encode()


def matches(if_none_match: str | None, etag: str) -> bool:
    """Whether an If-None-Match header names this ETag; compared weakly, as RFC 9110 has it for GET."""
    if if_none_match is None:
        return False
    opaque = etag.removeprefix("W/")
    return any(each.strip() == "*" or each.strip().removeprefix("W/") == opaque for each in if_none_match.split(","))
