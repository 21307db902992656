"""Answers polls ahead of the router, which costs more than all the rest of a poll."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from starlette.datastructures import Headers
from starlette.requests import Request

from batchinfer.api.errors import DATABASE_IS_AWAY, database_error_response, user_error_response
from batchinfer.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

    from batchinfer.api.polling import Poller
    from batchinfer.jobs.service import JobService

_PATH = re.compile(r"/v1/jobs/([\w-]{1,64})", re.ASCII)
"""Of a job by its id, as :func:`batchinfer.api.deps.get_job_id` has ids; what else there is goes on to the router."""


class _Route(NamedTuple):
    """What metrics read of a route."""

    path: str


_ROUTE = _Route("/v1/jobs/{job_id}")


class PollMiddleware:
    """Answers ``GET /v1/jobs/{job_id}`` as the route of this path would, without the router.

    It is the innermost: the request has its id, its caller has been let in, and it has been counted.
    """

    def __init__(self, app: ASGIApp, service: Callable[[], JobService], poller: Callable[[], Poller]) -> None:
        self._app = app
        self._service = service
        self._poller = poller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] != "GET" or (path := _PATH.fullmatch(scope["path"])) is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = _ROUTE
        if_none_match = Headers(scope=scope).get("if-none-match")
        response: Response
        try:
            answer = await self._poller().answer(self._service(), scope["state"]["caller"], path[1], if_none_match)
            response = answer.response(if_none_match)
        except UserError as error:
            response = user_error_response(error)
        except DATABASE_IS_AWAY as error:
            response = database_error_response(Request(scope), error)
        await response(scope, receive, send)
