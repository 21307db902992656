"""``rerank``: how well each document answers a query, by what a decoder says to the question whether it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchinfer.engine.tasks.classify import softmax
from batchinfer.engine.tasks.likelihood import Likelihoods

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batchinfer.engine.sequence import Sequence as Running
    from batchinfer.engine.tasks.encode import Pair
    from batchinfer.engine.tasks.likelihood import Make
    from batchinfer.types import Message

DEFAULT_INSTRUCTION = "Given a search query, find passages that answer it."
ANSWERS = ("yes", "no")
_SYSTEM = "Decide whether the document meets the instruction for the query. The answer is only yes or no."


def question(instruction: str, query: str, document: str) -> str:
    """What the model is asked; the document is last, so that all documents of a query share what comes before it."""
    return f"Instruction: {instruction}\nQuery: {query}\nDocument: {document}"


def chat(instruction: str, query: str, document: str) -> list[Message]:
    """The question to a model that has a chat template."""
    return [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": question(instruction, query, document)},
    ]


def plain(instruction: str, query: str, document: str) -> str:
    """The question to a model without one."""
    return f"{_SYSTEM}\n\n{question(instruction, query, document)}\nAnswer:"


def ranking_result(scores: Sequence[float], documents: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """A ranked row: the text is the best document, of equals the first; ranks count from 1."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    ranks = {index: place for place, index in enumerate(order, start=1)}
    ranking = [{"index": i, "score": score, "rank": ranks[i]} for i, score in enumerate(scores)]
    return documents[order[0]], {"score": scores[order[0]], "ranking": ranking}


class RankOutcome:
    """Documents of one query; ``pairs`` are yes and no after the question about each."""

    def __init__(self, documents: Sequence[str], pairs: list[Pair]) -> None:
        self._documents = documents
        self._likelihoods = Likelihoods(pairs)
        self.num_prompt_tokens = sum(len(pair.context) for pair in pairs[:: len(ANSWERS)])

    def sequences(self, make: Make) -> Iterator[Running]:
        """What must be computed."""
        return self._likelihoods.sequences(make)

    def take(self, sequence: Running) -> None:
        """See :class:`~batchinfer.engine.tasks.row.Outcome`."""
        self._likelihoods.take(sequence)

    def result(self) -> tuple[str, dict[str, Any]]:
        """See :class:`~batchinfer.engine.tasks.row.Outcome`: a score is the probability of yes against no."""
        values = [likelihood.logprob for likelihood in self._likelihoods.in_order()]
        scores = [softmax(values[i : i + len(ANSWERS)])[0] for i in range(0, len(values), len(ANSWERS))]
        return ranking_result(scores, self._documents)
