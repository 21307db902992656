"""The engine in a child process: a crash, a hang or an out-of-memory kill costs the child only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchinfer.types import Completion, Request


class EngineProcess:
    """An engine in a child process, spoken to in JSON over pipes. Thread-safe.

    ``factory`` is ``"module:callable"``; the child calls it with ``config`` and drives the returned engine.
    ``config`` is an :class:`~batchinfer.engine.config.EngineConfig`. The constructor returns when the engine is loaded.

    Raises:
        ModelError: the model could not be loaded.
        EngineDiedError: the child ended while loading.
    """

    def __init__(
        self, factory: str, config: Any, *, stall_seconds: float = 300.0, load_timeout_seconds: float = 3600.0
    ) -> None:
        raise NotImplementedError(factory, config, stall_seconds, load_timeout_seconds)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        raise NotImplementedError

    @property
    def load_ns(self) -> int:
        """How long loading took, in nanoseconds."""
        raise NotImplementedError

    @property
    def num_unfinished(self) -> int:
        """Requests submitted whose completion has not been returned by :meth:`poll`."""
        raise NotImplementedError

    def submit(self, requests: Iterable[Request]) -> None:
        """Hand requests to the child; never blocks on the engine."""
        raise NotImplementedError

    def abort(self, request_ids: Iterable[str]) -> None:
        """Give up on requests: no completion of theirs will be returned."""
        raise NotImplementedError

    def poll(self, timeout: float) -> list[Completion]:
        """Completions that have arrived, waiting at most ``timeout`` seconds for the first.

        Raises:
            EngineDiedError: the child ended; what had arrived before has been returned by earlier calls.
            EngineStalledError: requests wait and no engine step ended for ``stall_seconds``; the child is killed.
        """
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        """The engine's latest statistics (the fields of ``EngineStats``)."""
        raise NotImplementedError

    def close(self) -> None:
        """End the child, waiting a few seconds before it is killed. May be called twice."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
