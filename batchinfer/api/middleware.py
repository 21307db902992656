"""What surrounds each request: an id, a size limit, and an answer when code fails."""

from __future__ import annotations

import ipaddress
import logging
import re
from http import HTTPStatus
from random import Random
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from batchinfer.api.errors import error_response
from batchinfer.log_context import bound
from batchinfer.tracing import below

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID_HEADER = "X-Request-ID"
SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every answer, where the route does not say otherwise."""
_SECURITY_HEADERS = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
_ID_NAME = REQUEST_ID_HEADER.lower().encode()
_random = Random()  # noqa: S311 -- see below
"""For ids, which are no secrets. Seeded by the system, and not asked of it each time: that lets other threads cut in."""
_SAFE_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_log = logging.getLogger(__name__)


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach ``host``."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class RequestIdMiddleware:
    """Gives each request an id (the client's, if it sent a fair one) and answers 500 when code fails.

    Starlette's own handler for 500 stands outside of all middleware, so its answer would lack the id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope)
        sent = asked.get(REQUEST_ID_HEADER, "")
        request_id = sent if _SAFE_ID.fullmatch(sent) else f"req_{_random.getrandbits(96):024x}"
        id_header = (_ID_NAME, request_id.encode())
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                headers = [header for header in message["headers"] if header[0] != _ID_NAME]
                said = {name for name, _ in headers}
                missing = [header for header in _SECURITY_HEADERS if header[0] not in said]
                message["headers"] = [*headers, *missing, id_header]
            await send(message)

        try:
            with bound(request=request_id), below(asked.get("traceparent")):
                await self._app(scope, receive, send_with_id)
        except Exception:
            _log.exception("request %s failed: %s %s", request_id, scope["method"], scope["path"])
            if has_begun:
                raise
            text = f"An internal error; the server's log has it under {request_id}."
            await error_response(HTTPStatus.INTERNAL_SERVER_ERROR, text)(scope, receive, send_with_id)


class BodyLimitMiddleware:
    """Refuses bodies above ``max_bytes`` before they are parsed, whether or not their length was announced.

    ``streamed`` are (method, path) pairs whose routes read the body as it arrives, with a limit of their own.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, streamed: Collection[tuple[str, str]] = ()) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._streamed = frozenset(streamed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or (scope["method"], scope["path"]) in self._streamed:
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        try:
            body = await self._read(receive, int(announced) if announced.isdecimal() else 0)
        except _TooLargeError:
            text = f"The body is larger than {self._max_bytes} bytes; prompts belong into a Parquet file."
            await error_response(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    async def _read(self, receive: Receive, announced: int) -> bytes | None:
        """The whole body, or None if the client went away before its end."""
        body = bytearray()
        while max(announced, len(body)) <= self._max_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if not message.get("more_body", False) and len(body) <= self._max_bytes:
                return bytes(body)
        raise _TooLargeError


class _TooLargeError(Exception):
    """The body is larger than the limit."""


def _replay(body: bytes, receive: Receive) -> Receive:
    is_read = False

    async def replay() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def host_name(header: str) -> str:
    """``localhost`` of ``localhost:8000``, ``::1`` of ``[::1]:8000``."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]
