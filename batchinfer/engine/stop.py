"""When a row's answer ends, and where its text is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from batchinfer.engine.detokenizer import TextStream
    from batchinfer.sampling_params import SamplingParams


class StopChecker:
    """Follows one row's output tokens: stop strings, stop ids and EOS. ``max_tokens`` is the scheduler's affair.

    It never sees the prompt, so a prompt that ends like a stop string stops nothing. A stop string that is complete
    before ``min_tokens`` tokens stays in the text; one that ends later counts, wherever it began. With
    ``include_stop_str_in_output`` the text ends with the stop string, or with the text of the stop token.
    """

    def __init__(self, params: SamplingParams, eos_token_ids: Collection[int], stream: TextStream) -> None:
        self._stop_strings = params.stop
        self._min_tokens = params.min_tokens
        self._stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        self._keeps_stop = params.include_stop_str_in_output
        self.stream = stream
        """Text of the answer, wherever it is cut."""
        self._num_tokens = 0
        self._longest = max((len(stop) for stop in params.stop), default=0)
        self._tail = ""
        self._cut: int | None = None

    def append(self, token_id: int) -> bool:
        """Add a generated token; True if the row ends with it (finish reason ``stop``)."""
        self._num_tokens += 1
        if token_id in self._stop_ids and self._num_tokens > self._min_tokens:
            if self._keeps_stop:
                self.stream.append(token_id)
            return True
        part = self.stream.append(token_id)
        return self._find_stop_string(part, may_stop=self._num_tokens >= self._min_tokens)

    @property
    def text(self) -> str:
        """The answer: without the stop string or the stop token that ended it, unless these are to be kept."""
        return self.stream.text[: self._cut]

    def _find_stop_string(self, part: str, *, may_stop: bool) -> bool:
        """Look where ``part`` was added: a stop string that ends in it. The earliest to begin cuts the text."""
        if not self._stop_strings or not part:
            return False
        window = self._tail + part
        self._tail = window[-(self._longest - 1) :] if self._longest > 1 else ""
        starts = [window.find(stop, max(0, len(window) - len(part) - len(stop) + 1)) for stop in self._stop_strings]
        found = [(start, stop) for start, stop in zip(starts, self._stop_strings, strict=True) if start >= 0]
        if not found or not may_stop:
            return False
        first, stop = min(found, key=lambda pair: pair[0])
        # the window ends where the text does, but for an incomplete character
        self._cut = self.stream.text.rfind(window[first:]) + (len(stop) if self._keeps_stop else 0)
        return True
