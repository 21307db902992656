"""Log-probabilities of a result row in the two forms that OpenAI has for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_REPLACEMENT = "\ufffd"

Token = dict[str, Any]
"""A struct of the ``logprobs`` column."""


def chat_logprobs(tokens: Sequence[Token] | None) -> dict[str, Any] | None:
    """The form of chat completions; None where the row has none."""
    if tokens is None:
        return None
    content = [_chat_token(token) | {"top_logprobs": [_chat_token(top) for top in token["top"]]} for token in tokens]
    return {"content": content, "refusal": None}


def _chat_token(token: Token) -> dict[str, Any]:
    """Bytes are null where the token is part of a character: its text says only that there is one."""
    text = token["token"]
    octets = None if _REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": token["logprob"], "bytes": octets}


def text_logprobs(tokens: Sequence[Token] | None) -> dict[str, Any] | None:
    """The form of text completions; of two tokens that read the same, the likelier stands for both."""
    if tokens is None:
        return None
    offsets, end = [], 0
    for token in tokens:
        offsets.append(end)
        end += len(token["token"])
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [{top["token"]: top["logprob"] for top in reversed(token["top"])} for token in tokens],
        "text_offset": offsets,
    }
