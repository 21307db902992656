"""When a row's answer ends, and where its text is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from batchinfer.engine.detokenizer import TextStream
    from batchinfer.sampling_params import SamplingParams


class StopChecker:
    """Follows one row's output tokens: stop strings, stop ids and EOS. ``max_tokens`` is the scheduler's affair."""

    def __init__(self, params: SamplingParams, eos_token_ids: Collection[int], stream: TextStream) -> None:
        self._params = params
        self._stream = stream
        self._stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))

    def append(self, token_id: int) -> bool:
        """Add a generated token; True if the row ends with it (finish reason ``stop``)."""
        raise NotImplementedError(token_id)

    @property
    def text(self) -> str:
        """The answer: without the stop string or the stop token that ended it."""
        raise NotImplementedError
