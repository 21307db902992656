"""The ``body`` of an OpenAI batch request: its prompt, and its parameters in our names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from batchinfer.dataset.nulls import failure
from batchinfer.dataset.row_params import ALIASES
from batchinfer.dataset.text import replace_in_tree
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROMPT_KEYS = frozenset({"model", "messages", "prompt"})
NO_EFFECT = frozenset({"user", "metadata", "store", "service_tier", "stream_options", "safety_identifier"})
"""Fields that change no answer."""
# Parameters that are not supported, with the values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
}


def parse_body(text: str) -> tuple[dict[str, Any], bool]:
    """The body as an object with text that UTF-8 can hold, and whether a character had to be replaced for that.

    Raises:
        RowFailure: ``invalid_messages``: not a JSON object.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise failure(ErrorCode.INVALID_MESSAGES, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise failure(ErrorCode.INVALID_MESSAGES, "the body is not a JSON object")
    clean, replaced = replace_in_tree(body)
    return clean, replaced


def body_params(body: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters that the body sets.

    Raises:
        RowFailure: ``invalid_params``: it asks for something that is not supported; ignoring it would give the caller
            another answer than was asked for.
    """
    chosen: dict[str, Any] = {}
    for key, value in body.items():
        name = ALIASES.get(key, key)
        if key == "top_logprobs" or (key == "logprobs" and isinstance(value, bool)):
            chosen |= _chat_logprobs(body)
            continue
        if value is None or key in _PROMPT_KEYS or key in NO_EFFECT or value in _NEUTRAL.get(key, ()):
            continue
        if name not in SamplingParams.model_fields:
            raise failure(ErrorCode.INVALID_PARAMS, f"parameter {key!r} is not supported")
        chosen[name] = value
    return chosen


def _chat_logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    """A chat says with two parameters what a completion says with one.

    Raises:
        RowFailure: ``invalid_params``: ``top_logprobs`` without ``logprobs``.
    """
    top = body.get("top_logprobs")
    if body.get("logprobs") is True:
        return {"logprobs": 0 if top is None else top}
    if top:
        raise failure(ErrorCode.INVALID_PARAMS, "top_logprobs needs logprobs: true")
    return {}
