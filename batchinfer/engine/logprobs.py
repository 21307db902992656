"""Log-probabilities of tokens, under the model's logits as they are: before bias, penalties and temperature.

A row at a time, so that the bytes of a number depend on its row alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token's log-probability (float32), its rank (1 is the likeliest; ties share the better one), and the best."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    """Likeliest tokens and their log-probabilities, best first; of equals the lower id first."""


@torch.inference_mode()
def log_softmax(line: torch.Tensor) -> torch.Tensor:
    """float32 log-probabilities of one row of logits ``[vocab_size]``."""
    relative = line.float() - line.max().float()
    return relative - relative.exp().sum(dtype=torch.float64).log().float()


def score_token(line: torch.Tensor, token_id: int, num_top: int) -> TokenScore:
    """The score of one token under one row of logits ``[vocab_size]``, with the ``num_top`` likeliest."""
    return score_tokens(line, (token_id,), num_top)[0]


@torch.inference_mode()
def score_tokens(line: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenScore]:
    """Scores of several tokens under the same row of logits."""
    scores = log_softmax(line)
    top = tuple(best_tokens(scores, num_top)) if num_top else ()
    ranks = [int((scores > scores[token_id]).sum()) + 1 for token_id in token_ids]
    return [TokenScore(t, scores[t].item(), rank, top) for t, rank in zip(token_ids, ranks, strict=True)]


def best_tokens(scores: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """The ``count`` largest of ``scores [vocab_size]`` and their places, best first; of equals the first place."""
    values, ids = scores.topk(min(count, len(scores)))
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))


@torch.inference_mode()
def packed_score(line: torch.Tensor, token_id: torch.Tensor, num_top: int) -> torch.Tensor:
    """:func:`score_token` without a look at its numbers: int32 bits that :func:`unpacked_score` reads on the host.

    ``token_id`` is int64 ``[1]``, where the logits are; one below 0 gives a score of no meaning.
    """
    scores = log_softmax(line)
    own = scores.gather(0, token_id.clamp(min=0))
    rank = (scores > own).sum(dtype=torch.int32).reshape(1) + 1
    values, ids = scores.topk(min(num_top, len(scores)))
    return torch.cat([own.view(torch.int32), rank, ids.int(), values.view(torch.int32)])


def unpacked_score(bits: torch.Tensor, token_id: int, num_top: int) -> TokenScore:
    """The score of a token, with at most ``num_top`` likeliest, from what :func:`packed_score` gave."""
    logprob, values = bits[:1].view(torch.float32).item(), bits[2 + (len(bits) - 2) // 2 :].view(torch.float32)
    pairs = zip(bits[2 : 2 + len(values)].tolist(), values.tolist(), strict=True)
    top = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:num_top]
    return TokenScore(token_id, logprob, int(bits[1]), tuple(top))


class AnswerScores:
    """Scores of one answer's tokens, collected as they come; ``num_top`` None keeps nothing but the sum."""

    def __init__(self, num_top: int | None) -> None:
        self.num_top = num_top
        self.tokens: list[TokenScore] = []
        self.cumulative = 0.0

    def append(self, score: TokenScore) -> None:
        """Take in the next token's score."""
        self.cumulative += score.logprob
        if self.num_top is not None:
            self.tokens.append(score)


class PromptReader(Protocol):
    """What collects scores of a prompt's tokens, chunk by chunk and in order."""

    @property
    def num_top(self) -> int:
        """Likeliest tokens wanted with each score."""

    @property
    def first_missing(self) -> int | None:
        """The next position whose logits are wanted; None once all are there."""

    def wanted(self, start: int, stop: int) -> range:
        """Of the positions ``[start, stop)`` those whose logits are wanted."""

    def targets(self, position: int, token_ids: Sequence[int]) -> Sequence[int]:
        """The tokens that are scored at a position of a prompt; at least one."""

    def append(self, score: TokenScore) -> None:
        """Take in the next target's score."""


class PromptScores:
    """Scores of a prompt's tokens but the first, which nothing comes before; collected chunk by chunk."""

    def __init__(self, num_prompt_tokens: int, num_top: int) -> None:
        self.num_top = num_top
        self.tokens: list[TokenScore] = []
        self._num_wanted = num_prompt_tokens - 1

    @property
    def first_missing(self) -> int | None:
        """See :class:`PromptReader`."""
        return len(self.tokens) if len(self.tokens) < self._num_wanted else None

    def wanted(self, start: int, stop: int) -> range:
        """See :class:`PromptReader`."""
        return range(max(start, len(self.tokens)), min(stop, self._num_wanted))

    def targets(self, position: int, token_ids: Sequence[int]) -> Sequence[int]:
        """See :class:`PromptReader`: the token that follows."""
        return (token_ids[position + 1],)

    def append(self, score: TokenScore) -> None:
        """Take in the next token's score."""
        self.tokens.append(score)


class ContinuationScores:
    """Sums over the tokens of continuations that are alike but for their last token.

    A sequence has the prompt and what they share. Its positions from ``first`` on predict the shared tokens, its last
    position predicts each of ``last_token_ids``, which are therefore never computed: one pass scores them all.
    """

    num_top = 0

    def __init__(self, num_tokens: int, first: int, last_token_ids: Sequence[int]) -> None:
        self.last: list[TokenScore] = []
        """Of the last tokens, in their order."""
        self.shared_logprob = 0.0
        self.is_shared_greedy = True
        self.num_shared = 0
        self._next = first
        self._num_tokens = num_tokens
        self._last_token_ids = last_token_ids

    @property
    def first_missing(self) -> int | None:
        """See :class:`PromptReader`."""
        return None if self.last else self._next

    def wanted(self, start: int, stop: int) -> range:
        """See :class:`PromptReader`."""
        return range(max(start, self._next), self._next if self.last else min(stop, self._num_tokens))

    def targets(self, position: int, token_ids: Sequence[int]) -> Sequence[int]:
        """See :class:`PromptReader`."""
        return self._last_token_ids if position == self._num_tokens - 1 else (token_ids[position + 1],)

    def append(self, score: TokenScore) -> None:
        """Take in the next target's score."""
        if self._next == self._num_tokens - 1:
            self.last.append(score)
            return
        self._next += 1
        self.num_shared += 1
        self.shared_logprob += score.logprob
        self.is_shared_greedy &= score.rank == 1
