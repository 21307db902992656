"""A client that polls over one connection which stays open, for as little CPU time as Python allows.

It shares the machine with the server that it measures: half a millisecond a poll of its own would be half of what is
measured. So it reads of an answer what a poller needs (status, length, ETag) and makes no object a header.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_ETAG = re.compile(rb"\r\netag: *([^\r]+)", re.IGNORECASE)


@dataclass(slots=True)
class Polls:
    """What clients saw."""

    milliseconds: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    num_bytes: int = 0
    """Of bodies."""


class PollClient(asyncio.Protocol):
    """Polls its jobs in turn until ``end``; :attr:`done` is set then, or fails with the connection.

    With a ``period`` polls are due at fixed times, and latency counts from then however late they are sent; without
    one (0) the next poll is due when the last one is answered. Times are those of :func:`time.perf_counter`, in seconds.
    """

    def __init__(self, job_ids: Sequence[str], polls: Polls, *, period: float, is_conditional: bool) -> None:
        self._requests = [f"GET /v1/jobs/{job_id} HTTP/1.1\r\nHost: localhost\r\n".encode() for job_id in job_ids]
        self._tags: list[bytes] = [b""] * len(job_ids)
        self._polls = polls
        self._period = period
        self._is_conditional = is_conditional
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._received = b""
        self._number = 0
        self._due = self._end = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Nothing is sent before :meth:`start`."""
        self._transport = cast("asyncio.Transport", transport)

    def start(self, due: float, end: float) -> None:
        """Poll from ``due`` on; what is due at ``end`` or later is not sent."""
        self._due, self._end = due, end
        self._plan()

    def _plan(self) -> None:
        if self._due >= self._end:
            self._transport.close()
            self.done.set_result(None)
        elif (wait := self._due - time.perf_counter()) > 0:
            self._loop.call_later(wait, self._send)
        else:
            self._send()

    def _send(self) -> None:
        place = self._number % len(self._requests)
        tag = self._tags[place]
        condition = b"If-None-Match: %b\r\n" % tag if tag else b""
        self._transport.write(b"%b%b\r\n" % (self._requests[place], condition))

    def data_received(self, data: bytes) -> None:
        """Take an answer in, which may come in pieces."""
        data = self._received + data
        head, found, rest = data.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        size = 0 if length is None else int(length[1])
        if not found or len(rest) < size:
            self._received = data
            return
        self._received = b""
        self._note(int(head[9:12]), size)
        if self._is_conditional and (tag := _ETAG.search(head)) is not None:
            self._tags[self._number % len(self._tags)] = tag[1]
        self._number += 1
        self._due = self._due + self._period if self._period else time.perf_counter()
        self._plan()

    def _note(self, status: int, size: int) -> None:
        polls = self._polls
        polls.milliseconds.append((time.perf_counter() - self._due) * 1e3)
        polls.statuses[status] = polls.statuses.get(status, 0) + 1
        polls.num_bytes += size

    def connection_lost(self, error: Exception | None) -> None:
        """A server that hangs up in the middle is no answer."""
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed the connection"))
