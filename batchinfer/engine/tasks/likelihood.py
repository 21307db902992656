"""Log-likelihoods of continuations: as few sequences as they need, and the sums that come of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from batchinfer.engine.logprobs import ContinuationScores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from batchinfer.engine.sequence import Sequence
    from batchinfer.engine.tasks.encode import Pair

    Make = Callable[[list[int]], Sequence]
    """A prefill-only sequence of some tokens.

    Raises:
        RowFailure: they are too many.
    """


class Likelihood(NamedTuple):
    """Log-probability of a continuation (a sum over its tokens), and whether greedy decoding would write it."""

    logprob: float
    num_tokens: int
    is_greedy: bool


@dataclass(slots=True)
class _Branch:
    """Continuations that share all tokens but the last, which needs no computing."""

    token_ids: list[int]
    first: int
    members: list[int]
    last_token_ids: list[int]


class Likelihoods:
    """Likelihoods of ``pairs``. Contexts that begin alike find each other's KV blocks in the prefix cache."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        branches: dict[tuple[int, tuple[int, ...]], _Branch] = {}
        self._num_tokens: list[int] = []
        for index, pair in enumerate(pairs):
            token_ids = [*pair.context, *pair.continuation[:-1]]
            first = len(pair.context) - 1
            branch = branches.setdefault((first, tuple(token_ids)), _Branch(token_ids, first, [], []))
            branch.members.append(index)
            branch.last_token_ids.append(pair.continuation[-1])
            self._num_tokens.append(len(pair.continuation))
        self._branches = list(branches.values())
        self._of: dict[Sequence, _Branch] = {}
        self.found: dict[int, Likelihood] = {}
        """By the pair's index."""

    def sequences(self, make: Make) -> Iterator[Sequence]:
        """A sequence a branch, made when it is asked for; the longest first, so that one which is too long fails early."""
        for branch in sorted(self._branches, key=lambda b: -len(b.token_ids)):
            sequence = make(branch.token_ids)
            sequence.prompt_scores = ContinuationScores(len(branch.token_ids), branch.first, branch.last_token_ids)
            self._of[sequence] = branch
            yield sequence

    def take(self, sequence: Sequence) -> bool:
        """Take in a sequence that is computed; False if it is none of these."""
        branch = self._of.pop(sequence, None)
        if branch is None:
            return False
        scores = sequence.prompt_scores
        assert isinstance(scores, ContinuationScores)
        for index, last in zip(branch.members, scores.last, strict=True):
            logprob = scores.shared_logprob + last.logprob
            is_greedy = scores.is_shared_greedy and last.rank == 1
            self.found[index] = Likelihood(logprob, self._num_tokens[index], is_greedy)
        return True

    def in_order(self) -> list[Likelihood]:
        """All of them, in the order of the pairs."""
        return [self.found[index] for index in range(len(self._num_tokens))]
