"""What structured output asks of the engine: which tokens may come next, asked and told token by token."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

MAX_THREADS = 4
"""Threads that compute masks while the model runs; each asks for microseconds a row."""


class TokenConstraint(Protocol):
    """One row's constraint. The engine asks :meth:`mask` before each token and tells :meth:`accept` after it.

    A step that fails is computed again: :meth:`mask` may then be asked twice for one token.
    """

    @property
    def fault(self) -> str | None:
        """Why no token at all may come, where the constraint has failed."""

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end where it is."""

    @property
    def is_json(self) -> bool:
        """Whether a complete answer is JSON."""

    @property
    def all_or_nothing(self) -> bool:
        """Whether an incomplete answer is of no use."""

    def prepare(self) -> None:
        """Compute what :meth:`mask` will return. Called in any one thread, while nothing else is called."""

    def mask(self) -> torch.Tensor | None:
        """The tokens that may come now; None if all may.

        Bits of int32 words ``[ceil(vocab_size / 32)]`` on the CPU; token 0 is the lowest bit of the first word.
        """

    def accept(self, token_id: int) -> bool:
        """A token was generated; True if nothing may follow it.

        Raises:
            Exception: whatever is raised ends the row, and only it, with an error that quotes it.
        """

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of the answer's tokens as the constraint has read it."""

    def forced(self) -> Sequence[int]:
        """Tokens that follow whatever the model says, and need not be sampled; each is told to :meth:`accept`, too."""


class MaskPool:
    """Computes masks in other threads while the model runs; the threads start with the first mask."""

    def __init__(self, num_threads: int | None = None) -> None:
        """By default there are as many threads as cores, at most :data:`MAX_THREADS`."""
        self._num_threads = num_threads or min(MAX_THREADS, os.cpu_count() or 1)
        self._pool: ThreadPoolExecutor | None = None

    @contextmanager
    def computing(self, constraints: Sequence[TokenConstraint]) -> Iterator[None]:
        """Masks are computed while the body runs, and are there when it ends, however it does."""
        if not constraints:
            yield
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads, "mask")
        count = min(self._num_threads, len(constraints))
        futures = [self._pool.submit(_prepare, constraints[i::count]) for i in range(count)]
        try:
            yield
        finally:
            for future in futures:
                future.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _prepare(constraints: Sequence[TokenConstraint]) -> None:
    for constraint in constraints:
        constraint.prepare()
