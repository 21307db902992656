"""What the rest of the system may ask of an engine; fakes in tests implement the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from batchinfer.engine.config import EngineConfig
from batchinfer.engine.stats import EngineStats

if TYPE_CHECKING:
    from batchinfer.types import Completion, Request, SampleProgress

__all__ = ["EngineFactory", "EngineProtocol", "EngineStats"]


@runtime_checkable
class EngineProtocol(Protocol):
    """A batch engine driven from one thread: add requests, then step until nothing is unfinished."""

    @property
    def num_waiting(self) -> int:
        """Requests added and not yet running."""

    @property
    def num_running(self) -> int:
        """Sequences that are being computed."""

    def add_request(self, request: Request) -> None:
        """Queue a request.

        A request that cannot run (empty, too long, impossible parameters) does not raise: its errored completion
        comes out of the next :meth:`step`, like that of any other row.

        Raises:
            ValueError: the request id is that of an unfinished request.
        """

    def abort(self, request_id: str) -> None:
        """Stop a request; its ``cancelled`` completion, with what it cost, comes out of the next :meth:`step`.

        An unknown or finished id is ignored: it may have finished while the abort was on its way.
        """

    def step(self) -> list[Completion]:
        """Compute one batch; return the rows that ended, in the order they ended.

        Each call makes progress or ends a row with an error; with nothing unfinished it returns an empty list.

        Raises:
            EngineError: the engine as a whole is broken; unfinished rows have to be run elsewhere.
        """

    def has_unfinished(self) -> bool:
        """Whether a further :meth:`step` would return or compute something."""

    def progress(self) -> dict[str, tuple[SampleProgress, ...]]:
        """How far unfinished rows are, by request id: what :attr:`Request.progress` takes to go on in another engine.

        Rows of which nothing is generated yet are left out, and a row may always be.
        """

    def stats(self) -> EngineStats:
        """A snapshot of the counters."""

    def check_integrity(self) -> None:
        """Raise AssertionError if a KV cache block is lost, shared wrongly or counted twice."""

    def close(self) -> None:
        """Free model and cache; further calls are undefined. May be called twice."""


EngineFactory = Callable[[EngineConfig], EngineProtocol]
"""Builds an engine; named in settings as ``module:callable``."""
