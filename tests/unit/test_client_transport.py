"""When the client sends a request again, and how long it waits: on a transport that plays the server."""

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.client.transport import RetryPolicy, Transport
from batchinfer.errors import (
    ConflictError,
    ForbiddenError,
    InvalidSpecError,
    NotFoundError,
    ServerError,
    TooLargeError,
    UnauthorizedError,
)

LOST = httpx.ReadError("gone")
REFUSED = httpx.ConnectError("refused")


def played(*answers, max_retries=3):
    """A transport that gives the answers in turn, and the waits it made."""
    left = list(answers)
    waits = []

    def handle(_request):
        step = left.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    http = httpx.Client(transport=httpx.MockTransport(handle), base_url="http://server")
    return Transport(http, RetryPolicy(max_retries=max_retries), sleep=waits.append, draw=lambda: 0.0), waits, left


def answer(status, **headers):
    body = {"error": {"message": "m", "type": "t", "param": "p", "code": "c"}} if status >= 400 else {"ok": True}
    return httpx.Response(status, json=body, headers={name.replace("_", "-"): value for name, value in headers.items()})


@pytest.mark.parametrize("first", [LOST, REFUSED, answer(429), answer(503), answer(502), answer(500), answer(504)])
def test_a_get_is_sent_again(first):
    transport, waits, left = played(first, answer(200))
    assert transport.ask("GET", "/").json() == {"ok": True}
    assert (len(waits), left) == (1, [])


@pytest.mark.parametrize(("first", "is_again"), [
    (REFUSED, True), (answer(429), True), (answer(503), True), (LOST, False), (answer(500), False), (answer(502), False),
])  # fmt: skip
def test_a_post_is_sent_again_only_if_nothing_was_done(first, is_again):
    transport, waits, _ = played(first, answer(200))
    if is_again:
        assert transport.ask("POST", "/").status_code == 200
    else:
        with pytest.raises(ServerError):
            transport.ask("POST", "/")
    assert len(waits) == is_again


def test_a_post_with_a_key_is_sent_again_like_a_get():
    transport, _, _ = played(LOST, answer(500), answer(200))
    assert transport.ask("POST", "/", is_repeatable=True).status_code == 200


def test_it_gives_up_at_last():
    transport, waits, left = played(*[answer(503)] * 5)
    with pytest.raises(ServerError) as failed:
        transport.ask("GET", "/")
    assert (failed.value.status, len(waits), len(left)) == (503, 3, 1)


def test_retry_after_is_waited_for():
    transport, waits, _ = played(answer(429, Retry_After="7"), answer(200))
    transport.ask("GET", "/")
    assert waits == [7.0]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, InvalidSpecError), (401, UnauthorizedError), (403, ForbiddenError), (404, NotFoundError),
     (409, ConflictError), (413, TooLargeError), (422, InvalidSpecError)],
)  # fmt: skip
def test_refusals_are_not_sent_again_and_keep_their_words(status, kind):
    transport, waits, _ = played(answer(status))
    with pytest.raises(kind) as refused:
        transport.ask("GET", "/")
    assert (refused.value.message, refused.value.param, refused.value.code, waits) == ("m", "p", "c", [])


def test_a_stranger_that_is_no_batchinfer_server_is_named():
    transport, _, _ = played(httpx.Response(404, text="<html>"))
    with pytest.raises(NotFoundError, match="is it a batchinfer server"):
        transport.ask("GET", "/v1/jobs")


@given(st.integers(0, 200), st.floats(0, 1, exclude_max=True), st.integers(0, 10**6))
def test_waits_grow_to_a_bound_and_heed_the_server_to_a_bound(retry, fraction, asked):
    policy = RetryPolicy()
    plain = policy.wait_s(retry, None, fraction)
    assert min(30.0, 0.5 * 2**retry) / 2 <= plain <= 30.0
    assert policy.wait_s(retry, str(asked), fraction) == max(plain, min(asked, 120))
    assert policy.wait_s(retry, "Wed, 21 Oct 2015 07:28:00 GMT", fraction) == plain
