"""Removing stored files whose time is over, a few at a time."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING

from batchinfer.jobs.files import remove_bytes

if TYPE_CHECKING:
    from batchinfer.jobs.ledger import Ledger

SWEPT_AT_ONCE = 100
"""Most files of one look, so that a tick stays short."""
GRACE = timedelta(minutes=1)
"""A file is nobody's from its expiry on, and swept this much later: a job that was being submitted has then said that
it reads it."""
_log = logging.getLogger(__name__)


class FileSweeper:
    """Removes bytes and rows of expired files that no unfinished job reads. Any number may sweep at once.

    Bytes go first: a sweeper that dies in between leaves a row, which the next look finds again. A file whose bytes
    cannot be removed keeps its row, is passed over, and comes round again.
    """

    def __init__(self, ledger: Ledger, *, limit: int = SWEPT_AT_ONCE) -> None:
        self._ledger = ledger
        self._limit = limit
        self._after = ""

    def tick(self) -> int:
        """Look once; return how many files were removed."""
        found = self._ledger.expired_files(limit=self._limit, after=self._after, grace=GRACE)
        self._after = found[-1].id if len(found) == self._limit else ""
        removed = []
        for file in found:
            try:
                remove_bytes(file.location)
            except OSError as error:
                _log.warning("expired file %s stays at %s for now: %s", file.id, file.location, error)
            else:
                removed.append(file.id)
        self._ledger.forget_expired(removed, grace=GRACE)
        return len(removed)
