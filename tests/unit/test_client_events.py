"""Following events: wherever the connection breaks, each event is told once and none is left out."""

import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.client.event_stream import follow, messages
from batchinfer.client.transport import RetryPolicy, Transport
from batchinfer.errors import NotFoundError, ServerError

EVENTS = [
    {
        "id": number,
        "object": "job.event",
        "job_id": "job_1",
        "at": "2030-01-01T00:00:00Z",
        "kind": "state",
        "data": {"new": "gün\n"},
    }
    for number in (3, 4, 7, 8)
]


def text_of(events, *, ends):
    """What the server sends, written out by the standard's rules."""
    parts = [": hello\n\n"]
    parts += [f"id: {event['id']}\nevent: {event['kind']}\ndata: {json.dumps(event)}\n\n" for event in events]
    return "".join([*parts, "event: end\ndata: {}\n\n" if ends else ""])


class Broken(httpx.SyncByteStream):
    """Bytes, and then no more."""

    def __init__(self, data, error):
        self.data, self.error = data, error

    def __iter__(self):
        yield self.data
        if self.error is not None:
            raise self.error


def transport_of(handle, max_retries=3):
    waits = []
    http = httpx.Client(transport=httpx.MockTransport(handle), base_url="http://server")
    return Transport(http, RetryPolicy(max_retries=max_retries), sleep=waits.append, draw=lambda: 0.0), waits


@given(st.lists(st.tuples(st.integers(0, 400), st.booleans()), max_size=3))
def test_a_stream_that_is_cut_anywhere_is_whole(cuts):
    """Cut by an error or by a quiet end, after any number of bytes, and taken up behind the last whole event."""
    left = list(cuts)

    def handle(request):
        assert request.headers["Accept"] == "text/event-stream"
        after = int(request.headers["Last-Event-ID"])
        data = text_of([event for event in EVENTS if event["id"] > after], ends=True).encode()
        if not left:
            return httpx.Response(200, stream=Broken(data, None))
        where, is_error = left.pop(0)
        return httpx.Response(200, stream=Broken(data[:where], httpx.ReadError("gone") if is_error else None))

    transport, _ = transport_of(handle)
    assert [event.model_dump(mode="json") for event in follow(transport, "/e")] == EVENTS


def test_it_begins_where_it_is_told_and_never_tells_twice():
    """A server that repeats an old event is not believed."""
    transport, _ = transport_of(lambda _request: httpx.Response(200, text=text_of(EVENTS, ends=True)))
    assert [event.id for event in follow(transport, "/e", after=4)] == [7, 8]


def test_a_server_that_stays_away_is_given_up():
    def handle(_request):
        return httpx.Response(200, stream=Broken(text_of(EVENTS[:1], ends=False).encode(), httpx.ReadError("gone")))

    transport, waits = transport_of(handle, max_retries=2)
    told = []
    with pytest.raises(ServerError, match="does not answer"):
        told.extend(event.id for event in iter(follow(transport, "/e")))
    assert (told, waits) == ([3], [0.25, 0.5])  # an old event that comes again is no sign of life


def test_a_job_that_is_not_there_is_said_so():
    body = {"error": {"message": "no job", "type": "t", "param": None, "code": "not_found"}}
    transport, _ = transport_of(lambda _request: httpx.Response(404, json=body))
    with pytest.raises(NotFoundError, match="no job"):
        next(follow(transport, "/e"))


def test_messages_by_the_standard():
    """The examples of the HTML standard: comments, several data lines, a missing space, a half message at the end."""
    lines = [": c", "", "data: first event", "id: 1", "", "data:second", "data: line", "", "event: x", "", "data: half"]
    assert list(messages(lines)) == [("message", "first event"), ("message", "second\nline")]
