"""What a null does to the row that needs it."""

from __future__ import annotations

from typing import Any, Literal

from jinja2 import Undefined

from batchinfer.errors import RowFailure
from batchinfer.types import ErrorCode, RowError

OnNull = Literal["error", "skip", "empty"]


class RowSkipped(Exception):  # noqa: N818 -- not an error: the outcome that --on-null skip asks for
    """The row has a null that it needs and is to be skipped."""


def failure(code: ErrorCode, message: str) -> RowFailure:
    """A :class:`RowFailure` with this code."""
    return RowFailure(RowError(code, message))


def null_outcome(on_null: OnNull, field: str) -> Exception:
    """The exception that ends a row whose ``field`` is null (not for ``empty``, which goes on)."""
    if on_null == "skip":
        return RowSkipped(field)
    return failure(ErrorCode.NULL_FIELD, f"field {field!r} is null")


class Null(Undefined):
    """A null inside a template: false, equal to none, replaced by ``default``."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, Null)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(None)


class StrictNull(Null):
    """To print it or to compute with it ends the row.

    Hence it never becomes the word "None", whichever filter or operator it goes through.
    """

    __slots__ = ()

    def _fail(self, *_args: object) -> Any:
        self._fail_with_undefined_error()

    __str__ = __repr__ = __iter__ = __len__ = _fail


class EmptyNull(Null):
    """A null under ``--on-null empty``: prints as nothing, has nothing in it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: object) -> Any:
        return self

    def __call__(self, *_args: object, **_kwargs: object) -> Any:  # noqa: D102 -- a magic method like its neighbours
        return self

    def __add__(self, other: Any) -> Any:
        return other if isinstance(other, str | list) else super().__add__(other)

    def __radd__(self, other: Any) -> Any:
        return other if isinstance(other, str | list) else super().__radd__(other)


def template_null(on_null: OnNull, field: str) -> Null:
    """The value that stands for a null ``field`` in a template."""
    kind = EmptyNull if on_null == "empty" else StrictNull

    def outcome(_message: str | None = None) -> Exception:
        return null_outcome(on_null, field)

    # jinja2 raises whatever this returns; its annotation knows only classes.
    return kind(name=field, exc=outcome)  # type: ignore[arg-type]  # a factory does what a class does here
