"""Token ids of a prompt and of what may follow it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from batchinfer.errors import RowFailure
from batchinfer.types import ErrorCode, RowError

if TYPE_CHECKING:
    from batchinfer.engine.chat import ChatRenderer
    from batchinfer.types import Request


class Pair(NamedTuple):
    """Token ids of a context and of a continuation, neither of them empty."""

    context: list[int]
    continuation: list[int]


class PairEncoder:
    """Splits texts as lm-evaluation-harness does, so that its numbers can be compared with.

    White space at the end of a context belongs to the continuation; both are encoded as one text, and what comes after
    as many tokens as the context alone has is the continuation. Special tokens that the tokenizer puts before a text
    stay before the context.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer

    def context(self, request: Request) -> tuple[str, list[int]]:
        """A request's prompt as text, rendered if it is a chat, and the special tokens that come before it.

        Raises:
            RowFailure: it is empty or cannot be rendered.
        """
        if request.messages is not None:
            return self._renderer.render(request.messages), []
        text = request.prompt or ""
        return text, self.leading(text)

    def leading(self, text: str) -> list[int]:
        """Special tokens that the tokenizer puts before a text (BOS, for most that have one)."""
        whole = self._renderer.encode_prompt(text)
        own = self._renderer.encode_fragment(text)
        starts = (i for i in range(len(whole) - len(own) + 1) if whole[i : i + len(own)] == own)
        return whole[: next(starts, 0)]

    def pair(self, context: str, leading: list[int], continuation: str) -> Pair:
        """Encode a continuation of a context.

        Raises:
            RowFailure: the continuation has no token of its own.
        """
        bare = context.rstrip()
        whole = self._renderer.encode_fragment(context + continuation)
        own = self._renderer.encode_fragment(bare)
        if not continuation or len(whole) <= len(own):
            message = f"the continuation {continuation!r:.80} has no token of its own after this prompt"
            raise RowFailure(RowError(ErrorCode.NO_CONTINUATION, message))
        return Pair([*leading, *whole[: len(own)]], whole[len(own) :])

    def text(self, text: str) -> Pair:
        """A whole text after the token that starts one: BOS, or EOS where there is none.

        Raises:
            RowFailure: the text is empty, or the model has neither token.
        """
        self._renderer.encode_prompt(text)  # the checks of any prompt
        start = self._renderer.start_token_id
        if start is None:
            message = "the tokenizer has neither a BOS nor an EOS token, which a text's first token could follow"
            raise RowFailure(RowError(ErrorCode.INVALID_PARAMS, message))
        return Pair([start], self._renderer.encode_fragment(text))
