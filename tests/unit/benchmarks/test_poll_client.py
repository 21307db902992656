"""The client that polls a server in the benchmark: what it sends, and what it counts."""

import asyncio
import time
from itertools import pairwise

import pytest

from benchmarks.poll_client import PollClient, Polls

WHOLE = b'HTTP/1.1 200 OK\r\nContent-Length: 5\r\nETag: W/"1"\r\nX-Other: 7\r\n\r\nhello'
UNCHANGED = b'HTTP/1.1 304 Not Modified\r\netag: W/"1"\r\n\r\n'


class Server(asyncio.Protocol):
    """Answers each request with the same pieces; None hangs up."""

    def __init__(self, pieces):
        self.pieces = pieces
        self.asked = []

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.asked.append(data.decode())
        task = asyncio.get_running_loop().create_task(self.answer())
        task.add_done_callback(lambda done: done.result())

    async def answer(self):
        for piece in self.pieces:
            if piece is None:
                self.transport.close()
                return
            self.transport.write(piece)
            await asyncio.sleep(0.002)


def run(*pieces, seconds=0.1, period=0.0, is_conditional=False):
    server, polls = Server(pieces), Polls()

    async def main():
        loop = asyncio.get_running_loop()
        async with await loop.create_server(lambda: server, "127.0.0.1", 0) as listener:
            client = PollClient(["a", "b"], polls, period=period, is_conditional=is_conditional)
            await loop.create_connection(lambda: client, *listener.sockets[0].getsockname())
            start = time.perf_counter()
            client.start(start, start + seconds)
            await client.done

    asyncio.run(main())
    return server.asked, polls


@pytest.mark.parametrize("cuts", [(), (10,), (30, 60), (len(WHOLE) - 2,)])
def test_answers_in_pieces_are_counted_whole(cuts):
    ends = [0, *cuts, len(WHOLE)]
    asked, polls = run(*(WHOLE[start:end] for start, end in pairwise(ends)))
    assert len(asked) > 2
    assert polls.statuses == {200: len(asked)}
    assert polls.num_bytes == 5 * len(asked)
    assert len(polls.milliseconds) == len(asked)
    assert [head.split()[1] for head in asked[:3]] == ["/v1/jobs/a", "/v1/jobs/b", "/v1/jobs/a"]
    assert "If-None-Match" not in "".join(asked)


def test_a_polite_client_sends_each_jobs_last_etag():
    asked, polls = run(UNCHANGED, is_conditional=True)
    assert polls.statuses == {304: len(asked)}
    assert ["If-None-Match" in head for head in asked[:4]] == [False, False, True, True]
    assert 'If-None-Match: W/"1"\r\n\r\n' in asked[2]


def test_polls_are_due_at_fixed_times_and_late_answers_are_counted_from_then():
    """Five polls, 20 ms apart, of a server that takes at least 30: the last is answered 60 ms or more after it was due."""
    slow = [WHOLE[place : place + 1] for place in range(15)]
    asked, polls = run(*slow, WHOLE[15:], period=0.02, seconds=0.09)
    assert len(asked) == 5
    assert polls.milliseconds == sorted(polls.milliseconds)
    assert polls.milliseconds[-1] >= 60


def test_a_server_that_hangs_up_is_no_answer():
    with pytest.raises(ConnectionError):
        run(WHOLE[:20], None)
