"""Who may call: keys are read and checked here, before any route runs."""

from __future__ import annotations

import base64
import binascii
import hashlib
import threading
import time
from enum import StrEnum
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import Request

from batchinfer.api.errors import database_error_response, user_error_response
from batchinfer.api.middleware import host_name, is_loopback
from batchinfer.errors import ForbiddenError, UnauthorizedError, UserError
from batchinfer.jobs.caller import Caller, Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Receive, Scope, Send

    from batchinfer.jobs.service import JobService

PUBLIC_PATHS = frozenset({"/healthz", "/readyz"})
"""Answered without a key: load balancers have none."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
CACHE_SECONDS = 2.0
"""How long a checked key is believed; a revoked one is refused everywhere after this time."""
CACHE_SIZE = 4096
KEY_PREFIX = "bi_"


class Access(StrEnum):
    """Who is let in without a key."""

    LOOPBACK = "loopback"
    """Programs of this machine, as long as no key was ever made."""
    KEYS = "keys"
    """Nobody."""
    INSECURE = "insecure"
    """Everybody."""


class Gate:
    """Knows the caller of a request. Thread-safe; asks the database at most every :data:`CACHE_SECONDS` for a key."""

    def __init__(
        self, service: Callable[[], JobService], access: Access, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._service = service
        self._access = access
        self._now = now
        self._lock = threading.Lock()
        self._callers: dict[bytes, tuple[float, Caller]] = {}
        self._keys_exist_until: tuple[float, bool] = (0.0, False)

    def cached(self, headers: Headers) -> Caller | None:
        """The caller, if that is known without asking the database. Raises what :meth:`find` raises."""
        token = token_of(headers)
        if token is None or not token.startswith(KEY_PREFIX):
            is_known = self._access is not Access.LOOPBACK or self._keys_exist_until[1]
            return self.find(headers) if is_known or self._keys_exist_until[0] >= self._now() else None
        found = self._callers.get(_digest(token))
        return None if found is None or found[0] < self._now() else found[1]

    def find(self, headers: Headers) -> Caller:
        """The caller of a request with these headers.

        Raises:
            UnauthorizedError: no key where one is needed, or a bad one.
            ForbiddenError: no key, and the request names this server by another machine's name.
        """
        token = token_of(headers)
        if token is not None and token.startswith(KEY_PREFIX):
            return self._authenticate(token)
        # clients that cannot do without a key send some word; where none is needed, it says nothing
        if self._access is Access.INSECURE:
            return Caller.operator()
        if self._access is Access.KEYS or self._keys_exist():
            raise UnauthorizedError(
                "send an API key, as `Authorization: Bearer bi_...`; `batchinfer keys create` makes one",
                code="missing_api_key" if token is None else None,
            )
        # The loopback address is the only guard: a web page whose name is re-bound to 127.0.0.1 would pass it from
        # within a browser, but sends its own name as Host.
        if not is_loopback(host_name(headers.get("host", ""))):
            raise ForbiddenError(
                "without keys this server answers only to localhost; make one with `batchinfer keys create`",
                code="host_not_allowed",
            )
        return Caller.operator()

    def _authenticate(self, token: str) -> Caller:
        caller = self._service().keys.authenticate(token)
        with self._lock:
            if len(self._callers) >= CACHE_SIZE:
                self._callers.clear()
            self._callers[_digest(token)] = (self._now() + CACHE_SECONDS, caller)
        return caller

    def _keys_exist(self) -> bool:
        until, exist = self._keys_exist_until
        if not exist and until < self._now():
            exist = self._service().keys.exist()
            self._keys_exist_until = (self._now() + CACHE_SECONDS, exist)
        return exist


def token_of(headers: Headers) -> str | None:
    """The key of a Bearer header, or the password of a Basic one: browsers ask for that by themselves."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return value.strip() or None
    if kind.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2] or None
        except (binascii.Error, UnicodeDecodeError):
            return None
    return None


def _digest(token: str) -> bytes:
    """What the cache remembers of a key: a dump of this process's memory shall not be a list of keys."""
    return hashlib.sha256(token.encode()).digest()


class AccessMiddleware:
    """Lets a request through with its caller in ``request.state.caller``, or answers 401 or 403.

    Reading needs a viewer, everything else a submitter; a route that needs more says so itself. A key's scopes are held
    against the noun of the path: ``jobs`` of ``/v1/jobs/...``. New routes are thus closed before anyone thinks of it.
    """

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] in PUBLIC_PATHS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            caller = self._gate.cached(headers)
            if caller is None:
                caller = await run_in_threadpool(self._gate.find, headers)
            is_safe = scope["method"] in SAFE_METHODS
            _check_origin(headers, is_safe=is_safe)
            caller.check_role(Role.VIEWER if is_safe else Role.SUBMITTER)
            caller.check_scope(noun_of(scope["path"]), "read" if is_safe else "write")
        except UserError as error:
            await user_error_response(error, _challenge(error, headers))(scope, receive, send)
            return
        except SQLAlchemyError as error:
            await database_error_response(Request(scope), error)(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)


def noun_of(path: str) -> str:
    """``jobs`` of ``/v1/jobs/job_1/rows`` and of ``/v1/jobs:estimate``; pages beside /v1 are the ``dashboard``."""
    if not path.startswith("/v1/"):
        return "metrics" if path == "/metrics" else "dashboard"
    return path.removeprefix("/v1/").partition("/")[0].partition(":")[0]


def _check_origin(headers: Headers, *, is_safe: bool) -> None:
    """Refuse what another site's page sends: a browser adds stored passwords, and reaches localhost, by itself."""
    origin = headers.get("origin")
    foreign = origin is not None and origin.partition("://")[2] != headers.get("host")
    if not is_safe and (foreign or headers.get("sec-fetch-site") == "cross-site"):
        raise ForbiddenError("requests from other sites' pages are refused", code="cross_site_request")


def _challenge(error: UserError, headers: Headers) -> dict[str, str]:
    if not isinstance(error, UnauthorizedError):
        return {}
    is_page = "text/html" in headers.get("accept", "")
    return {"WWW-Authenticate": 'Basic realm="batchinfer: the API key is the password"' if is_page else "Bearer"}
