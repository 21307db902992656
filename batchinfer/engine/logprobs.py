"""Log-probabilities of tokens, under the model's logits as they are: before bias, penalties and temperature.

A row at a time, so that the bytes of a number depend on its row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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


@torch.inference_mode()
def score_token(line: torch.Tensor, token_id: int, num_top: int) -> TokenScore:
    """The score of one token under one row of logits ``[vocab_size]``, with the ``num_top`` likeliest."""
    scores = log_softmax(line)
    own = scores[token_id]
    rank = int((scores > own).sum()) + 1
    return TokenScore(token_id, own.item(), rank, tuple(best_tokens(scores, num_top)))


def best_tokens(scores: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """The ``count`` largest of ``scores [vocab_size]`` and their places, best first; of equals the first place."""
    values, ids = scores.topk(min(count, len(scores)))
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))


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


class PromptScores:
    """Scores of a prompt's tokens but the first, which nothing comes before; collected chunk by chunk."""

    def __init__(self, num_prompt_tokens: int, num_top: int) -> None:
        self.num_top = num_top
        self.tokens: list[TokenScore] = []
        self._num_wanted = num_prompt_tokens - 1

    @property
    def num_missing(self) -> int:
        """Positions whose logits are still wanted; the next is the number of those that are there."""
        return self._num_wanted - len(self.tokens)

    def wanted(self, start: int, stop: int) -> range:
        """Of the positions ``[start, stop)`` those whose logits are wanted."""
        return range(max(start, len(self.tokens)), min(stop, self._num_wanted))

    def append(self, score: TokenScore) -> None:
        """Take in the next token's score."""
        self.tokens.append(score)
