"""Keeping a lease: a thread renews it for as long as there is progress to show for it."""

from __future__ import annotations

import logging
import threading
from contextvars import copy_context
from typing import TYPE_CHECKING, Self

from batchinfer.errors import FencedError
from batchinfer.jobs.status import Action

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)


class LeaseKeeper:
    """Renews a lease every ``seconds`` until closed. Use as a context manager.

    ``renew`` writes to the ledger and returns what the holder shall do; ``may_renew`` says whether the holder still
    deserves the lease: one whose engine hangs must lose it. A database that is away is tried again at the next beat.
    """

    def __init__(
        self,
        renew: Callable[[], Action],
        *,
        seconds: float,
        may_renew: Callable[[], bool] = lambda: True,
    ) -> None:
        self._renew = renew
        self._may_renew = may_renew
        self._seconds = seconds
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name="lease-keeper", daemon=True)
        self.action = Action.CONTINUE
        """What the ledger said last."""
        self.is_fenced = False
        """Whether the lease was lost: write nothing more."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def beat(self) -> Action:
        """Renew now, and say what the ledger wants. Never raises: the next beat tries again."""
        with self._lock:
            if self._ended.is_set() or self.is_fenced:
                return self.action
            try:
                self.action = self._renew()
            except FencedError:
                self.is_fenced = True
            except Exception:  # noqa: BLE001 -- a database that is away raises its driver's own errors
                _log.warning("could not renew a lease; trying again", exc_info=True)
            return self.action

    def check(self) -> None:
        """Raise FencedError if the lease is known to be lost."""
        if self.is_fenced:
            raise FencedError("the lease is lost")

    def close(self) -> None:
        """Stop renewing. The lease stays until it is given back or expires."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self._seconds) and not self.is_fenced:
            if self._may_renew():
                self.beat()
