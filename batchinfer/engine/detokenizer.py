"""Text of a growing row of token ids, in linear time."""

from __future__ import annotations

from typing import Any, Protocol


class TextStream(Protocol):
    """Text of one row's output tokens."""

    def append(self, token_id: int) -> str:
        """Add a token; return the text that it completed ("" while a character is incomplete)."""

    @property
    def text(self) -> str:
        """All text: equal to ``tokenizer.decode`` of the tokens so far, special tokens skipped."""


class Detokenizer:
    """Starts the text streams of a tokenizer's rows."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def start(self) -> TextStream:
        """The stream of a new row."""
        raise NotImplementedError
