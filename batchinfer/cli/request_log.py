"""Lines about requests, written some at a time: at a thousand a second, a write for each costs as much as the answers."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

LOGGER = "uvicorn.access"
WRITE_SECONDS = 0.1
"""How long a line waits for others; a process that is killed has lost those of this time."""
MAX_LINES = 1000
"""As many are written at once, however short they have waited."""


class RequestLogHandler(logging.Handler):
    """Writes to stderr what was logged in the last :data:`WRITE_SECONDS`, of requests alone: all else goes out at once."""

    def __init__(self) -> None:
        super().__init__()
        self._guard = threading.Lock()
        self._lines: list[str] = []
        self._since = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line, and have it written soon. Called in the event loop of the server, as its requests are."""
        try:
            self._lines.append(self.format(record))
            if len(self._lines) == 1:
                self._since = record.created
                asyncio.get_running_loop().call_later(WRITE_SECONDS, self.flush)
            elif len(self._lines) >= MAX_LINES or record.created - self._since > 2 * WRITE_SECONDS:
                self.flush()
        except Exception:  # noqa: BLE001 -- a line that cannot be written is no reason to fail a request
            self.handleError(record)

    def flush(self) -> None:
        """Write what is kept."""
        with self._guard:
            lines, self._lines = self._lines, []
            if lines:
                sys.stderr.write("\n".join((*lines, "")))
                sys.stderr.flush()


@contextmanager
def requests_logged_together() -> Iterator[None]:
    """Lines about requests look as others do, and are written some at a time, the last ones at the end of the block."""
    logger, handler = logging.getLogger(LOGGER), RequestLogHandler()
    handler.setFormatter(logging.getLogger().handlers[0].formatter)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = True
        logger.removeHandler(handler)
        handler.flush()
