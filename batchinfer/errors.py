"""Every exception batchinfer raises on purpose.

::

    BatchInferError
    ├── UserError                 the caller can mend it; the CLI exits 2, REST answers 4xx
    │   ├── InvalidSpecError      a job description that cannot run
    │   ├── InputError            an input that cannot be read as asked
    │   ├── ConflictError         the state or an idempotency key does not allow it
    │   ├── PreconditionError     it was changed since the caller read it
    │   ├── NotFoundError         no such job, worker or file
    │   ├── UnauthorizedError     no key, or one that is not (any more) good
    │   ├── ForbiddenError        the key is good, but not for this
    │   ├── TooLargeError         a body, file or line above its limit
    │   └── ModelError            a model that cannot be found, read or run
    ├── ServerError               a server that cannot be reached, or fails
    ├── FencedError               this attempt lost its lease: stop, write nothing more
    ├── EngineError               the engine failed as a whole
    │   ├── EngineDiedError       its process ended
    │   ├── EngineStalledError    its process makes no progress
    │   └── DeviceUnhealthyError  its device is not well: no row is to blame
    └── RowFailure                one row cannot run; becomes an error row (see ErrorCode)

A message names the thing, its value and the way out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchinfer.types import RowError


class BatchInferError(Exception):
    """Base of all deliberate errors."""


class UserError(BatchInferError):
    """Something the caller can mend. ``code`` is stable; ``param`` names the field at fault, if one is."""

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidSpecError(UserError):
    """A job description that cannot run."""

    code = "invalid_spec"


class InputError(UserError):
    """An input that cannot be read as asked."""

    code = "invalid_input"


class ConflictError(UserError):
    """The job's state, or an idempotency key used with another body, does not allow this."""

    code = "conflict"


class PreconditionError(ConflictError):
    """The thing was changed since the caller read it."""

    code = "precondition_failed"


class NotFoundError(UserError):
    """No such thing, or none that the caller may see."""

    code = "not_found"


class UnauthorizedError(UserError):
    """Who asks has no key, or one that is not (any more) good."""

    code = "invalid_api_key"


class ForbiddenError(UserError):
    """Who asks is known, and may not do this."""

    code = "forbidden"


class TooLargeError(UserError):
    """A body, file or line above its limit."""

    code = "too_large"


class ModelError(UserError):
    """A model that cannot be found, read or run."""

    code = "invalid_model"


class ServerError(BatchInferError):
    """A server that cannot be reached, or fails. ``status`` is its HTTP status, None if there was no answer."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class FencedError(BatchInferError):
    """The attempt no longer holds its lease: whatever it still has must not be published."""


class EngineError(BatchInferError):
    """The engine failed as a whole, not on one row."""


class EngineDiedError(EngineError):
    """The engine's process ended."""


class EngineStalledError(EngineError):
    """The engine's process is alive but makes no progress."""


class DeviceUnhealthyError(EngineError):
    """The device or its driver failed: no row is to blame, and another process on it may fail as well."""


class RowFailure(BatchInferError):  # noqa: N818 -- an outcome of one row, not an error of the program
    """One row cannot run. Carries the :class:`~batchinfer.types.RowError` that goes into its error row."""

    def __init__(self, error: RowError) -> None:
        super().__init__(error.message)
        self.error = error
