"""Every error leaves the API as ``{"error": {message, type, param, code}}``, the OpenAI shape."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException

from batchinfer.errors import (
    BatchInferError,
    ConflictError,
    FencedError,
    ForbiddenError,
    NotFoundError,
    PreconditionError,
    TooLargeError,
    UnauthorizedError,
    UserError,
)

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

_log = logging.getLogger(__name__)
_CODES = {
    HTTPStatus.NOT_FOUND: "route_not_found",
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "body_too_large",
}
_STATUSES: dict[type[BatchInferError], HTTPStatus] = {
    UnauthorizedError: HTTPStatus.UNAUTHORIZED,
    ForbiddenError: HTTPStatus.FORBIDDEN,
    NotFoundError: HTTPStatus.NOT_FOUND,
    PreconditionError: HTTPStatus.PRECONDITION_FAILED,
    ConflictError: HTTPStatus.CONFLICT,
    FencedError: HTTPStatus.CONFLICT,
    TooLargeError: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
}
DATABASE_IS_AWAY = (OperationalError, InterfaceError, PoolTimeoutError)
"""What is answered with 503."""
RETRY_AFTER_SECONDS = 2
"""What a client is told when the database is away: SQLite's writers and a failover are done in about that time."""


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON document of an error. ``code`` defaults to one that follows from the status."""
    kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    fallback = "internal_error" if kind == "server_error" else "invalid_request"
    chosen = code or _CODES.get(HTTPStatus(status), fallback)
    return {"error": {"message": _storable(message), "type": kind, "param": _storable(param), "code": chosen}}


def _storable(text: str | None) -> str | None:
    """Text that quotes a client may hold lone surrogates, which no response can carry."""
    return None if text is None else text.encode(errors="replace").decode()


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """An error as a response."""
    return JSONResponse(error_body(status, message, param=param, code=code), status_code=status, headers=headers)


OPENAI_PATHS = ("/v1/files", "/v1/batches", "/v1/models")
"""Where a bad request is 400, as OpenAI's clients expect; elsewhere it is 422."""


def _invalid_status(request: Request) -> HTTPStatus:
    is_openai = request.url.path.startswith(OPENAI_PATHS)
    return HTTPStatus.BAD_REQUEST if is_openai else HTTPStatus.UNPROCESSABLE_ENTITY


def status_of(error: BatchInferError) -> HTTPStatus:
    """The HTTP status of a deliberate error."""
    for kind, status in _STATUSES.items():
        if isinstance(error, kind):
            return status
    return HTTPStatus.UNPROCESSABLE_ENTITY if isinstance(error, UserError) else HTTPStatus.INTERNAL_SERVER_ERROR


def user_error_response(error: UserError, headers: dict[str, str] | None = None) -> JSONResponse:
    """A deliberate error as a response, for middleware, which stands outside of the handlers."""
    return error_response(status_of(error), error.message, param=error.param, code=error.code, headers=headers)


async def _on_batchinfer_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, BatchInferError)
    param, code = (error.param, error.code) if isinstance(error, UserError) else (None, None)
    status = status_of(error)
    if status == HTTPStatus.UNPROCESSABLE_ENTITY:
        status = _invalid_status(request)
    return error_response(status, str(error), param=param, code=code)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    code = "invalid_json" if error.status_code == HTTPStatus.BAD_REQUEST else None
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"No route {request.method} {request.url.path}; /docs lists what there is."
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{request.url.path} does not answer {request.method}; /docs lists what it does."
    return error_response(error.status_code, message, code=code, headers=dict(error.headers or {}))


async def _on_invalid_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    fault = error.errors()[0]
    location = [str(part) for part in fault["loc"]]
    if fault["type"] == "json_invalid":
        reason = fault.get("ctx", {}).get("error", "")
        message = f"The body is not JSON: {reason} at character {location[-1]}."
        return error_response(HTTPStatus.BAD_REQUEST, message, code="invalid_json")
    # the location begins with where it was found, such as body or query
    param = ".".join(location[1:]) or None
    message = f"{param or 'body'}: {str(fault['msg']).removeprefix('Value error, ')}{_given(fault)}."
    return error_response(_invalid_status(request), message, param=param, code="invalid_spec")


def _given(fault: dict[str, Any]) -> str:
    value = fault.get("input")
    if not isinstance(value, str | int | float | bool):
        return ""
    return f" (got {json.dumps(value)[:100]})"


async def _on_database_error(request: Request, error: Exception) -> JSONResponse:
    return database_error_response(request, error)


def database_error_response(request: Request, error: Exception) -> JSONResponse:
    """503, with the time to come back."""
    # the class only: a driver's message may hold the URL with its password
    _log.warning("%s %s: the database does not answer (%s)", request.method, request.url.path, type(error).__name__)
    message = (
        "The database does not answer; send the request again in a moment, with its Idempotency-Key if it has one."
    )
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
    return error_response(HTTPStatus.SERVICE_UNAVAILABLE, message, code="database_unavailable", headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Make ``app`` answer every foreseen failure in the ruled shape; the rest is the middleware's."""
    app.add_exception_handler(BatchInferError, _on_batchinfer_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    for kind in DATABASE_IS_AWAY:
        app.add_exception_handler(kind, _on_database_error)
