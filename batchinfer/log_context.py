"""What a log line is about: ids that are bound where the work begins, and read where a line is written."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_NOTHING: Mapping[str, str | int] = {}
_IDS: ContextVar[Mapping[str, str | int]] = ContextVar("batchinfer_log_ids", default=_NOTHING)


@contextmanager
def bound(**ids: str | int) -> Iterator[None]:
    """Lines written inside are about these ids, and about those bound outside."""
    token = _IDS.set({**_IDS.get(), **ids})
    try:
        yield
    finally:
        _IDS.reset(token)


def bound_ids() -> Mapping[str, str | int]:
    """The ids that a line written now is about."""
    return _IDS.get()
