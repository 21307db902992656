"""``classify``: the probabilities of labels that may follow a prompt."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from batchinfer.engine.tasks.likelihood import Likelihoods

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batchinfer.engine.sequence import Sequence as Running
    from batchinfer.engine.tasks.encode import Pair
    from batchinfer.engine.tasks.likelihood import Make


def softmax(values: Sequence[float]) -> list[float]:
    """Probabilities of log-weights."""
    largest = max(values)
    weights = [math.exp(value - largest) for value in values]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def label_result(labels: Sequence[str], probabilities: Sequence[float]) -> tuple[str, dict[str, Any]]:
    """A classified row: the text is the likeliest label, of equals the first."""
    scores = [{"label": label, "probability": p} for label, p in zip(labels, probabilities, strict=True)]
    best = max(range(len(labels)), key=lambda index: probabilities[index])
    return labels[best], {"label": labels[best], "scores": scores}


class LabelsOutcome:
    """Labels after a prompt, each by the log-likelihood of all its tokens.

    With ``neutral``, the labels after a prompt that says nothing, each probability is divided by that of its label
    there, and they are scaled to sum to 1 again (contextual calibration, https://arxiv.org/abs/2102.09690).
    """

    def __init__(self, labels: Sequence[str], pairs: list[Pair], neutral: list[Pair] | None) -> None:
        self._labels = labels
        self._likelihoods = Likelihoods(pairs)
        self._neutral = Likelihoods(neutral) if neutral else None
        self.num_prompt_tokens = max(len(p.context) for p in pairs) + sum(len(p.continuation) for p in pairs)

    def sequences(self, make: Make) -> Iterator[Running]:
        """What must be computed; the neutral prompt of all rows but the first is in the prefix cache, for the most."""
        yield from self._likelihoods.sequences(make)
        if self._neutral is not None:
            yield from self._neutral.sequences(make)

    def take(self, sequence: Running) -> None:
        """See :class:`~batchinfer.engine.tasks.row.Outcome`."""
        if not self._likelihoods.take(sequence) and self._neutral is not None:
            self._neutral.take(sequence)

    def result(self) -> tuple[str, dict[str, Any]]:
        """See :class:`~batchinfer.engine.tasks.row.Outcome`."""
        values = [likelihood.logprob for likelihood in self._likelihoods.in_order()]
        if self._neutral is not None:
            neutral = self._neutral.in_order()
            values = [value - other.logprob for value, other in zip(values, neutral, strict=True)]
        return label_result(self._labels, softmax(values))
