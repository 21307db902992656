"""What a row asks of an encoder: texts to compute, and what their outputs become."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from batchinfer.adapter_config import invalid
from batchinfer.engine.encoder.model import Encoded
from batchinfer.engine.pooling import finish_vector
from batchinfer.engine.tasks.classify import label_result, softmax
from batchinfer.engine.tasks.embed import check_dimensions, vector_extra
from batchinfer.engine.tasks.ingest import input_texts, input_token_ids, required
from batchinfer.engine.tasks.rerank import ranking_result
from batchinfer.errors import RowFailure
from batchinfer.model_kind import ModelKind
from batchinfer.tasks import Pooling, Task, read_request
from batchinfer.types import ErrorCode, Request, RowError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from batchinfer.engine.chat import ChatRenderer
    from batchinfer.engine.encoder.model import EncoderModel
    from batchinfer.tasks import TaskOptions, TaskRequest

MULTI_LABEL = "multi_label_classification"


class Reading(Protocol):
    """What becomes of a text's output, and of all of a row's."""

    def take(self, output: torch.Tensor, num_tokens: int) -> Any:
        """What is kept of one text's hidden states ``[length, hidden_size]`` or logits ``[num_labels]``."""

    def result(self, taken: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        """The row's text and optional columns."""


@dataclass(eq=False, slots=True)
class EncoderRow:
    """A row under way. ``taken`` has what is kept of each text, None where it is still missing."""

    request_id: str
    texts: list[Encoded]
    reading: Reading
    taken: list[Any] = field(default_factory=list)
    num_missing: int = 0
    device_ns: int = 0

    def __post_init__(self) -> None:
        self.taken = [None] * len(self.texts)
        self.num_missing = len(self.texts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all its texts."""
        return sum(len(text.token_ids) for text in self.texts)


class EncoderIngest:
    """Makes rows of requests, or says why they cannot run."""

    def __init__(self, model: EncoderModel, renderer: ChatRenderer) -> None:
        self._model = model
        self._renderer = renderer
        self._tokenizer = model.tokenizer.backend_tokenizer
        # a tokenizer's file may cut and pad: what is cut here would be cut without a word
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        pooling = model.sentence.pooling
        self._pooling = Pooling.MEAN if pooling is None else pooling

    def row(self, request: Request) -> EncoderRow:
        """The row of a request.

        Raises:
            RowFailure: a text is empty, too long or missing; the model does not fit the task, or takes no adapter.
        """
        if request.params.adapter is not None:
            raise invalid(request.params.adapter, "this model is an encoder, which takes no adapters")
        try:
            asked = read_request(request.task or {})
        except ValueError as error:
            raise RowFailure(RowError(ErrorCode.INVALID_PARAMS, f"the task cannot be read: {error}")) from None
        options, texts, _ = asked
        if request.messages is not None:
            raise RowFailure(RowError(ErrorCode.INVALID_PARAMS, "this model reads plain texts, not messages"))
        if self._model.kind is ModelKind.ENCODER and options.task is Task.EMBED:
            return self._embed(request, asked)
        if self._model.kind is ModelKind.CLASSIFIER and options.task is Task.CLASSIFY:
            return self._classify(request, options)
        if self._model.kind is ModelKind.CLASSIFIER and options.task is Task.RERANK:
            return self._rerank(request, required(texts, "document"))
        message = f"the model is of kind {self._model.kind.value}, which cannot do task {options.task.value}"
        raise RowFailure(RowError(ErrorCode.INVALID_PARAMS, message))

    def _embed(self, request: Request, asked: TaskRequest) -> EncoderRow:
        options = asked.options
        check_dimensions(options, self._model.config.hidden_size)
        if (token_ids := input_token_ids(request, asked)) is not None:
            encoded = [self._from_token_ids(request, ids) for ids in token_ids]
        else:
            encoded = [self._encode((options.instruction or "") + text) for text in input_texts(request, asked.texts)]
        pooling = self._pooling if options.pooling is Pooling.AUTO else options.pooling
        return EncoderRow(request.request_id, encoded, Vectors(options, pooling))

    def _classify(self, request: Request, options: TaskOptions) -> EncoderRow:
        if options.labels:
            message = "the model has labels of its own; labels are for decoders"
            raise RowFailure(RowError(ErrorCode.INVALID_PARAMS, message))
        (text,) = input_texts(request, None)
        return EncoderRow(request.request_id, [self._encode(text)], Labels(self._model))

    def _rerank(self, request: Request, documents: list[str]) -> EncoderRow:
        num_labels = len(self._model.labels)
        if num_labels > 2:
            message = (
                f"the model has {num_labels} classes; a cross-encoder has one, or two of which the second is a hit"
            )
            raise RowFailure(RowError(ErrorCode.INVALID_PARAMS, message))
        (query,) = input_texts(request, None)
        pairs = [self._encode(query, document) for document in documents]
        is_logit = num_labels == 1 and self._model.sentence.has_identity_activation
        return EncoderRow(request.request_id, pairs, Ranks(documents, is_logit=is_logit))

    def _from_token_ids(self, request: Request, token_ids: list[int]) -> Encoded:
        checked = self._renderer.encode(Request(request.request_id, prompt_token_ids=token_ids))
        return self._checked(Encoded(checked, [0] * len(checked)))

    def _encode(self, text: str, second: str | None = None) -> Encoded:
        for part in (text, second):
            if part is not None:
                self._renderer.encode_prompt(part)  # the checks of any prompt
        found = self._tokenizer.encode(text, second)
        return self._checked(Encoded(found.ids, found.type_ids))

    def _checked(self, text: Encoded) -> Encoded:
        if len(text.token_ids) > self._model.longest:
            message = f"the text has {len(text.token_ids)} tokens, but the model reads {self._model.longest}"
            raise RowFailure(RowError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message))
        return text


class Vectors:
    """Token vectors of a text become one."""

    def __init__(self, options: TaskOptions, pooling: Pooling) -> None:
        self._options = options
        self._pooling = pooling

    def take(self, output: torch.Tensor, num_tokens: int) -> list[float]:
        """See :class:`Reading`."""
        if self._pooling is Pooling.MEAN:
            vector = output[:num_tokens].double().mean(0).float()
        else:
            vector = output[0 if self._pooling is Pooling.CLS else num_tokens - 1]
        return finish_vector(vector, self._options.dimensions, normalize=self._options.normalize)

    def result(self, taken: Sequence[list[float]]) -> tuple[str, dict[str, Any]]:
        """See :class:`Reading`."""
        return "", vector_extra(list(taken))


class Labels:
    """Logits become the probabilities of a classifier's labels."""

    def __init__(self, model: EncoderModel) -> None:
        self._labels = model.labels
        self._is_independent = len(self._labels) == 1 or model.config.problem_type == MULTI_LABEL

    def take(self, output: torch.Tensor, num_tokens: int) -> list[float]:  # noqa: ARG002 -- all tokens are in the logits
        """See :class:`Reading`."""
        logits: list[float] = output.tolist()
        return [sigmoid(logit) for logit in logits] if self._is_independent else softmax(logits)

    def result(self, taken: Sequence[list[float]]) -> tuple[str, dict[str, Any]]:
        """See :class:`Reading`."""
        return label_result(self._labels, taken[0])


class Ranks:
    """Logits of pairs become scores."""

    def __init__(self, documents: list[str], *, is_logit: bool) -> None:
        self._documents = documents
        self._is_logit = is_logit

    def take(self, output: torch.Tensor, num_tokens: int) -> float:  # noqa: ARG002 -- all tokens are in the logits
        """See :class:`Reading`."""
        logits: list[float] = output.tolist()
        if len(logits) > 1:
            return softmax(logits)[1]
        return logits[0] if self._is_logit else sigmoid(logits[0])

    def result(self, taken: Sequence[float]) -> tuple[str, dict[str, Any]]:
        """See :class:`Reading`."""
        return ranking_result(taken, self._documents)


def sigmoid(value: float) -> float:
    """The logistic function, without overflow."""
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
