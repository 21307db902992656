"""Requests to a server: sent again where that is safe, and answered with this package's errors."""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import httpx

from batchinfer.errors import (
    ConflictError,
    ForbiddenError,
    InvalidSpecError,
    NotFoundError,
    PreconditionError,
    ServerError,
    TooLargeError,
    UnauthorizedError,
    UserError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ERRORS: dict[int, type[UserError]] = {
    HTTPStatus.UNAUTHORIZED: UnauthorizedError,
    HTTPStatus.FORBIDDEN: ForbiddenError,
    HTTPStatus.NOT_FOUND: NotFoundError,
    HTTPStatus.CONFLICT: ConflictError,
    HTTPStatus.PRECONDITION_FAILED: PreconditionError,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: TooLargeError,
    HTTPStatus.BAD_REQUEST: InvalidSpecError,
    HTTPStatus.UNPROCESSABLE_ENTITY: InvalidSpecError,
}
_NOT_TAKEN = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
"""The server says that it did nothing."""
_PERHAPS_TAKEN = frozenset({HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT, HTTPStatus.INTERNAL_SERVER_ERROR})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how soon a request is sent again.

    The n-th wait is drawn from ``[base_s * 2**n / 2, base_s * 2**n]``, at most ``max_s``, and never shorter than the
    server's ``Retry-After`` (itself believed up to ``max_retry_after_s``).
    """

    max_retries: int = 5
    base_s: float = 0.5
    max_s: float = 30.0
    max_retry_after_s: float = 120.0

    def wait_s(self, retry: int, retry_after: str | None, fraction: float) -> float:
        """Seconds before retry number ``retry`` (from 0); ``fraction`` in [0, 1) is the draw."""
        whole = min(self.max_s, self.base_s * 2.0**retry)
        asked = float(retry_after) if retry_after is not None and retry_after.isdecimal() else 0.0
        return max(whole * (1 + fraction) / 2, min(asked, self.max_retry_after_s))


class Transport:
    """Sends requests. ``sleep`` and ``draw`` are replaced in tests."""

    def __init__(
        self,
        http: httpx.Client,
        policy: RetryPolicy,
        *,
        sleep: Callable[[float], None] = time.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._http = http
        self._policy = policy
        self._sleep = sleep
        self._draw = draw

    def close(self) -> None:
        """Give the connections back."""
        self._http.close()

    def ask(self, method: str, path: str, *, is_repeatable: bool | None = None, **options: Any) -> httpx.Response:
        """Send a request and read its answer.

        ``is_repeatable``: a second one does no harm; by default that is a GET or a DELETE. Others are sent again only
        if the server says that it did nothing, or no connection was made.

        Raises:
            UserError: the server refuses it.
            ServerError: the server cannot be reached or fails, also after retries.
        """
        with self.open(method, path, is_repeatable=is_repeatable, **options) as response:
            response.read()
            return response

    @contextmanager
    def open(
        self, method: str, path: str, *, is_repeatable: bool | None = None, **options: Any
    ) -> Iterator[httpx.Response]:
        """Like :meth:`ask`, with a body that is still to be read."""
        is_safe = method in {"GET", "DELETE"} if is_repeatable is None else is_repeatable
        for retry in range(self._policy.max_retries + 1):
            is_last = retry == self._policy.max_retries
            retry_after: str | None = None
            try:
                response = self._http.send(self._http.build_request(method, path, **options), stream=True)
            except httpx.TransportError as error:
                was_sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
                if is_last or (was_sent and not is_safe):
                    raise self._unreachable(error) from None
            else:
                if response.is_success:
                    with _closing(response):
                        yield response
                    return
                with _closing(response):
                    response.read()
                may_repeat = response.status_code in _NOT_TAKEN or (is_safe and response.status_code in _PERHAPS_TAKEN)
                if is_last or not may_repeat:
                    raise error_of(response)
                retry_after = response.headers.get("Retry-After")
            self._sleep(self._policy.wait_s(retry, retry_after, self._draw()))

    def wait_after_loss(self, num_lost: int, error: httpx.TransportError | None = None) -> None:
        """Wait before a body that broke off is asked for again, after ``num_lost`` losses in a row before this one.

        Raises:
            ServerError: there were too many.
        """
        if error is not None and num_lost >= self._policy.max_retries:
            raise self._unreachable(error) from None
        self._sleep(self._policy.wait_s(num_lost, None, self._draw()))

    def _unreachable(self, error: httpx.TransportError) -> ServerError:
        reason = str(error) or type(error).__name__
        return ServerError(
            f"the server {self._http.base_url} does not answer: {reason}; check --server and that it runs"
        )


@contextmanager
def _closing(response: httpx.Response) -> Iterator[None]:
    try:
        yield
    finally:
        response.close()


def error_of(response: httpx.Response) -> UserError | ServerError:
    """The exception of an answer that is no success."""
    try:
        body = response.json()["error"]
        message, param, code = str(body["message"]), body.get("param"), body.get("code")
    except (ValueError, KeyError, TypeError):
        message, param, code = (
            f"{response.request.url} answers {response.status_code}; is it a batchinfer server?",
            None,
            None,
        )
    kind = _ERRORS.get(response.status_code)
    if kind is not None:
        return kind(message, param=param, code=code)
    return ServerError(message, status=response.status_code)
