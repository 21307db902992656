"""From prompts and messages to token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchinfer.types import Message, Request


class ChatRenderer:
    """Turns a request into prompt token ids with the model's own tokenizer and chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, request: Request) -> list[int]:
        """Prompt token ids of a request, whichever of its three forms it has.

        Raises:
            RowFailure: ``empty_prompt``, ``invalid_messages``, ``template_error`` or ``invalid_encoding``.
        """
        raise NotImplementedError(request)

    def encode_prompt(self, prompt: str) -> list[int]:
        """Token ids of plain text, with the special tokens (BOS) that the tokenizer adds, once."""
        raise NotImplementedError(prompt)

    def encode_messages(self, messages: list[Message]) -> list[int]:
        """Token ids of a conversation: the chat template applied once, nothing added after it."""
        raise NotImplementedError(messages)
