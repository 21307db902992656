"""Which logits of a step are wanted for log-probabilities, and the scores that they give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchinfer.engine.logprobs import score_token, score_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from batchinfer.engine.head_output import HeadOutput
    from batchinfer.engine.logprobs import AnswerScores, PromptReader, TokenScore
    from batchinfer.engine.scheduler import SchedulerOutput
    from batchinfer.engine.sequence import Sequence as Running
    from batchinfer.types import RowError

    Found = Iterator[tuple[PromptReader | AnswerScores, TokenScore]]
    """Scores and where they belong, once the step has passed."""


@dataclass(frozen=True, slots=True)
class Unscored:
    """Prompt tokens of a step whose logits are wanted."""

    places: list[int]
    """Their places among the step's tokens."""
    _targets: list[tuple[PromptReader, Sequence[int]]]
    """For each place, where the scores belong and of which tokens."""

    @classmethod
    def of(cls, output: SchedulerOutput) -> Unscored:
        """Those of a step; none, and no work, where no row asks for them."""
        places: list[int] = []
        targets = []
        first = 0
        for part in output.scheduled if output.num_scored else ():
            scores = part.sequence.prompt_scores
            if scores is not None:
                for position in scores.wanted(part.start, part.start + part.num_new_tokens):
                    places.append(first + position - part.start)
                    targets.append((scores, scores.targets(position, part.sequence.token_ids)))
            first += part.num_new_tokens
        return cls(places, targets)

    def scores(self, logits: torch.Tensor) -> Found:
        """Scores of the tokens that follow, by ``logits [len(places), vocab_size]``."""
        for (scores, token_ids), line in zip(self._targets, logits, strict=True):
            for score in score_tokens(line, token_ids, scores.num_top):
                yield scores, score


def score_answers(head: HeadOutput, sampling: Sequence[Running], tokens: Sequence[int | RowError]) -> Found:
    """Scores of the tokens that sequences have sampled, of those that want them."""
    for place, i in enumerate(head.kept):
        scores, token = sampling[i].scores, tokens[i]
        if scores is not None and isinstance(token, int):
            yield scores, score_token(head.logits[place], token, scores.num_top or 0)
