"""Text in which some special tokens can be read, though the others are left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batchinfer.engine.detokenizer import TextStream


class MarkedStream:
    """A :class:`~batchinfer.engine.detokenizer.TextStream` that writes each token of ``markers`` as its text.

    ``start`` begins the stream of what stands between two markers.
    """

    def __init__(self, start: Callable[[], TextStream], markers: Mapping[int, str]) -> None:
        self._start = start
        self._markers = markers
        self._before = ""
        self._given = 0  # characters of the open stream that append has returned
        self._open = start()

    def append(self, token_id: int) -> str:
        """Add a token; return the text that it completed."""
        marker = self._markers.get(token_id)
        if marker is None:
            part = self._open.append(token_id)
            self._given += len(part)
            return part
        text = self._open.text
        added = text[self._given :] + marker
        self._before += text + marker
        self._open, self._given = self._start(), 0
        return added

    @property
    def text(self) -> str:
        """All text."""
        return self._before + self._open.text
