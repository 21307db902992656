"""``embed``: texts of a row through a decoder, each of them one vector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchinfer.engine.pooling import Pooler, finish_vector
from batchinfer.errors import RowFailure
from batchinfer.types import ErrorCode, RowError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchinfer.engine.sequence import Sequence
    from batchinfer.engine.tasks.likelihood import Make
    from batchinfer.tasks import Pooling, TaskOptions


def vector_extra(vectors: list[list[float]]) -> dict[str, Any]:
    """The result columns of a row's vectors."""
    return {"embedding": vectors[0] if len(vectors) == 1 else None, "embeddings": vectors}


def check_dimensions(options: TaskOptions, size: int) -> None:
    """Raise RowFailure if a vector of ``size`` numbers has fewer than are asked for."""
    if options.dimensions is not None and options.dimensions > size:
        message = f"dimensions is {options.dimensions}, but the model's vectors have {size}"
        raise RowFailure(RowError(ErrorCode.INVALID_PARAMS, message))


class EmbedOutcome:
    """Vectors of some texts, given as token ids."""

    def __init__(self, texts: list[list[int]], options: TaskOptions, pooling: Pooling) -> None:
        self._texts = texts
        self._options = options
        self._pooling = pooling
        self._indexes: dict[Sequence, int] = {}
        self._vectors: dict[int, list[float]] = {}
        self.num_prompt_tokens = sum(map(len, texts))

    def sequences(self, make: Make) -> Iterator[Sequence]:
        """What must be computed: a sequence a text, the longest first, so that one which is too long fails early."""
        for index, token_ids in sorted(enumerate(self._texts), key=lambda pair: -len(pair[1])):
            sequence = make(list(token_ids))
            sequence.pooler = Pooler(self._pooling, len(token_ids))
            self._indexes[sequence] = index
            yield sequence

    def take(self, sequence: Sequence) -> None:
        """See :class:`~batchinfer.engine.tasks.row.Outcome`."""
        assert sequence.pooler is not None
        vector = sequence.pooler.vector()
        index = self._indexes.pop(sequence)
        self._vectors[index] = finish_vector(vector, self._options.dimensions, normalize=self._options.normalize)

    def result(self) -> tuple[str, dict[str, Any]]:
        """See :class:`~batchinfer.engine.tasks.row.Outcome`."""
        return "", vector_extra([self._vectors[index] for index in range(len(self._texts))])
