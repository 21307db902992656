"""Server-sent events, followed over lost connections: nothing is told twice and nothing is left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx

from batchinfer.jobs.views import EventView

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from batchinfer.client.transport import Transport

END = "end"
"""The server's word that nothing more happens for now."""


def follow(transport: Transport, path: str, *, after: int = 0) -> Iterator[EventView]:
    """Events behind ``after`` as they happen, until the server says that there are no more.

    A stream that breaks off is asked for again from the last event on, with the transport's waits in between.

    Raises:
        UserError: the server refuses it; ServerError: it is away for longer than the retries last.
    """
    num_lost = 0
    while True:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        try:
            with transport.open("GET", path, headers=headers) as answer:
                for kind, data in messages(answer.iter_lines()):
                    if kind == END:
                        return
                    event = EventView.model_validate_json(data)
                    if event.id > after:
                        after, num_lost = event.id, 0
                        yield event
        except httpx.TransportError as error:
            transport.wait_after_loss(num_lost, error)
            num_lost += 1
        else:
            # servers end long streams by themselves, proxies silent ones
            transport.wait_after_loss(0)


def messages(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """``(event, data)`` of each whole message of a ``text/event-stream``; comments and half messages are dropped."""
    kind, data = "message", list[str]()
    for line in lines:
        if not line:
            if data:
                yield kind, "\n".join(data)
            kind, data = "message", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            kind = value
        elif field == "data":
            data.append(value)
