"""What a row wants changed in its logits: bias, penalties for what stands already, tokens it must not take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from batchinfer.engine.forced_calls import barred_opening
from batchinfer.errors import RowFailure
from batchinfer.types import ErrorCode, RowError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from batchinfer.engine.chat import ChatRenderer
    from batchinfer.sampling_params import SamplingParams

    Ids = npt.NDArray[np.int64]


class TokenCounts:
    """Distinct tokens of a row and how often each stands in its answer; adding a token takes constant time."""

    def __init__(self, seen: Iterable[int] = ()) -> None:
        """``seen`` are tokens that count as seen though not generated: the prompt's."""
        known = list(dict.fromkeys(seen))
        self._slot = {token: slot for slot, token in enumerate(known)}
        self._ids = np.array(known + [0] * 16, np.int64)
        self._counts = np.zeros(len(self._ids), np.int64)

    def add(self, token_id: int) -> None:
        """Count a generated token."""
        slot = self._slot.setdefault(token_id, len(self._slot))
        if slot == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[slot] = token_id
        self._counts[slot] += 1

    @property
    def ids(self) -> Ids:
        """Tokens seen, in order of appearance."""
        return self._ids[: len(self._slot)]

    @property
    def counts(self) -> Ids:
        """How often each of :attr:`ids` was generated."""
        return self._counts[: len(self._slot)]


class LogitRules:
    """One row's rules and what they must remember. Token ids are within the vocabulary."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], bad_words: Iterable[tuple[int, ...]]) -> None:
        self.params = params
        self.bias_ids: Ids = np.fromiter(params.logit_bias.keys(), np.int64)
        self.bias: npt.NDArray[np.float32] = np.fromiter(params.logit_bias.values(), np.float32)
        self.allowed: Ids = np.unique(np.array(params.allowed_token_ids, np.int64))
        self.counts: TokenCounts | None = None
        if params.has_penalty:
            self.counts = TokenCounts(prompt if params.repetition_penalty != 1 else ())
        words = sorted(set(bad_words))
        self._always = [word[0] for word in words if len(word) == 1]
        self._longer = [(list(word[:-1]), word[-1]) for word in words if len(word) > 1]
        self._tail: list[int] = []
        self._tail_length = max((len(head) for head, _ in self._longer), default=0)

    def append(self, token_id: int) -> None:
        """Take in a generated token."""
        if self.counts is not None:
            self.counts.add(token_id)
        if self._tail_length:
            self._tail = [*self._tail, token_id][-self._tail_length :]

    def barred(self) -> list[int]:
        """Tokens that would complete a bad word now."""
        return self._always + [last for head, last in self._longer if self._tail[-len(head) :] == head]


def rules_of(params: SamplingParams, prompt: Sequence[int], renderer: ChatRenderer) -> LogitRules | None:
    """The rules of a row; None where it has none.

    Raises:
        RowFailure: ``invalid_params``: a token id beyond the vocabulary, or a bad word without tokens.
    """
    opening = barred_opening(params, renderer)
    asks = params.has_penalty or params.logit_bias or params.bad_words or params.allowed_token_ids
    if not asks and opening is None:
        return None
    for name, ids in (("logit_bias", params.logit_bias), ("allowed_token_ids", params.allowed_token_ids)):
        strange = next((token_id for token_id in ids if not 0 <= token_id < renderer.vocab_size), None)
        if strange is not None:
            _refuse(f"{name} names token {strange}, but the model's tokens are 0 to {renderer.vocab_size - 1}")
    words = [] if opening is None else [(opening,)]
    return LogitRules(params, prompt, [*words, *_spellings(params.bad_words, renderer)])


def _spellings(words: Iterable[str], renderer: ChatRenderer) -> Iterable[tuple[int, ...]]:
    """Each word as it is written at the beginning of a text and after a space: most vocabularies tell them apart."""
    for word in words:
        bare = word.lstrip()
        for text in (bare, " " + bare):
            if not (tokens := renderer.encode_fragment(text)):
                _refuse(f"bad_words: {word!r} has no tokens in this model's vocabulary")
            yield tuple(tokens)


def _refuse(message: str) -> None:
    raise RowFailure(RowError(ErrorCode.INVALID_PARAMS, message))
