"""``score``: continuations of a prompt, or a text of any length."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from batchinfer.engine.logprobs import ContinuationScores
from batchinfer.engine.tasks.likelihood import Likelihood, Likelihoods

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchinfer.engine.sequence import Sequence
    from batchinfer.engine.tasks.encode import Pair
    from batchinfer.engine.tasks.likelihood import Make


def score_fields(likelihood: Likelihood, text: str) -> dict[str, Any]:
    """The struct of one scored text."""
    num_bytes = len(text.encode(errors="surrogatepass"))
    return {
        "logprob": likelihood.logprob,
        "num_tokens": likelihood.num_tokens,
        "num_bytes": num_bytes,
        "logprob_per_token": likelihood.logprob / likelihood.num_tokens,
        "logprob_per_byte": likelihood.logprob / max(1, num_bytes),
        "is_greedy": likelihood.is_greedy,
    }


def perplexity(likelihood: Likelihood) -> float:
    """The exponential of the mean negative log-probability a token; infinite where that is too large for a float."""
    try:
        return math.exp(-likelihood.logprob / likelihood.num_tokens)
    except OverflowError:
        return math.inf


class ChoicesOutcome:
    """Continuations of one prompt, one of which is the best by each way to count."""

    def __init__(self, texts: list[str], pairs: list[Pair]) -> None:
        self._texts = texts
        self._likelihoods = Likelihoods(pairs)
        self.num_prompt_tokens = max(len(p.context) for p in pairs) + sum(len(p.continuation) for p in pairs)

    def sequences(self, make: Make) -> Iterator[Sequence]:
        """What must be computed."""
        return self._likelihoods.sequences(make)

    def take(self, sequence: Sequence) -> None:
        """See :class:`~batchinfer.engine.tasks.row.Outcome`."""
        self._likelihoods.take(sequence)

    def result(self) -> tuple[str, dict[str, Any]]:
        """See :class:`~batchinfer.engine.tasks.row.Outcome`: the text is the likeliest continuation."""
        found = self._likelihoods.in_order()
        choices = [score_fields(likelihood, text) for likelihood, text in zip(found, self._texts, strict=True)]

        def best(field: str) -> int:  # of equals the first
            return max(range(len(choices)), key=lambda index: choices[index][field])

        by_sum = best("logprob")
        chosen = {"sum": by_sum, "per_token": best("logprob_per_token"), "per_byte": best("logprob_per_byte")}
        extra = {
            "choice_scores": choices,
            "best_choice": chosen,
            "logprob": found[by_sum].logprob,
            "perplexity": perplexity(found[by_sum]),
        }
        return self._texts[by_sum], extra


class TextOutcome:
    """A whole text, in windows of ``context_len`` tokens where it is longer; each token is scored once.

    The first window scores as many tokens as the context holds, each further one the next ``stride`` (by default as
    many again), after as many tokens as the context then has room for. Of a window only sums are kept.
    """

    def __init__(self, text: str, pair: Pair, *, context_len: int, stride: int | None) -> None:
        self._text = text
        self._token_ids = [*pair.context, *pair.continuation]
        self._context_len = context_len
        self._stride = min(stride or context_len, context_len)
        self._starts: dict[Sequence, int] = {}
        self._windows: dict[int, Likelihood] = {}  # windows end in any order, and sums depend on it
        self.num_prompt_tokens = len(pair.continuation)

    def sequences(self, make: Make) -> Iterator[Sequence]:
        """One window after the other."""
        token_ids, done = self._token_ids, 1
        while done < len(token_ids):
            end = min(len(token_ids), done + (self._context_len if done == 1 else self._stride))
            start = max(0, end - 1 - self._context_len)
            window = token_ids[start : end - 1]  # the last token is only predicted
            sequence = make(window)
            sequence.prompt_scores = ContinuationScores(len(window), done - 1 - start, (token_ids[end - 1],))
            self._starts[sequence] = done
            yield sequence
            done = end

    def take(self, sequence: Sequence) -> None:
        """See :class:`~batchinfer.engine.tasks.row.Outcome`."""
        scores = sequence.prompt_scores
        assert isinstance(scores, ContinuationScores)
        last = scores.last[0]
        self._windows[self._starts.pop(sequence)] = Likelihood(
            scores.shared_logprob + last.logprob,
            scores.num_shared + 1,
            scores.is_shared_greedy and last.rank == 1,
        )

    def result(self) -> tuple[str, dict[str, Any]]:
        """See :class:`~batchinfer.engine.tasks.row.Outcome`."""
        windows = [self._windows[start] for start in sorted(self._windows)]
        total = Likelihood(
            sum(window.logprob for window in windows),
            sum(window.num_tokens for window in windows),
            all(window.is_greedy for window in windows),
        )
        return "", {
            "choice_scores": [score_fields(total, self._text)],
            "logprob": total.logprob,
            "perplexity": perplexity(total),
        }
