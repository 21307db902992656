"""From a request that generates nothing to the row that reads it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from batchinfer.engine.tasks.classify import LabelsOutcome
from batchinfer.engine.tasks.embed import EmbedOutcome, check_dimensions
from batchinfer.engine.tasks.encode import PairEncoder
from batchinfer.engine.tasks.rerank import ANSWERS, DEFAULT_INSTRUCTION, RankOutcome, chat, plain
from batchinfer.engine.tasks.row import TaskRow
from batchinfer.engine.tasks.score import ChoicesOutcome, TextOutcome
from batchinfer.errors import RowFailure
from batchinfer.tasks import Pooling, Task, read_request
from batchinfer.types import ErrorCode, Request, RowError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from batchinfer.engine.chat import ChatRenderer
    from batchinfer.engine.sequence import Sequence
    from batchinfer.engine.tasks.encode import Pair
    from batchinfer.tasks import TaskOptions, TaskRequest

    Outcome = ChoicesOutcome | TextOutcome | EmbedOutcome | LabelsOutcome | RankOutcome


class TaskIngest:
    """Makes rows of requests with a task, for a decoder. ``make`` gives a prefill-only sequence, or raises RowFailure."""

    def __init__(
        self,
        renderer: ChatRenderer,
        make: Callable[[Request, list[int]], Sequence],
        *,
        max_model_len: int,
        pooling: Pooling,
        embedding_size: int,
    ) -> None:
        self._renderer = renderer
        self._encoder = PairEncoder(renderer)
        self._make = make
        self._max_model_len = max_model_len
        self._pooling = pooling
        self._embedding_size = embedding_size

    def row(self, request: Request) -> TaskRow:
        """The row of a request.

        Raises:
            RowFailure: a text is empty, too long or missing; the model does not fit the task.
        """
        try:
            asked = read_request(request.task or {})
        except ValueError as error:
            raise RowFailure(RowError(ErrorCode.INVALID_PARAMS, f"the task cannot be read: {error}")) from None
        outcome = self._outcome(request, asked)
        return TaskRow(request.request_id, outcome.sequences(partial(self._make, request)), outcome)

    def _outcome(self, request: Request, asked: TaskRequest) -> Outcome:
        options, texts, _ = asked
        if options.task is Task.SCORE:
            return self._score(request, options, texts)
        if options.task is Task.EMBED:
            return self._embed(request, asked)
        if options.task is Task.CLASSIFY:
            return self._classify(request, options)
        if options.task is Task.RERANK:
            return self._rerank(request, options, required(texts, "document"))
        raise RowFailure(RowError(ErrorCode.INVALID_PARAMS, f"{options.task} is no task of a prompt that is only read"))

    def _score(self, request: Request, options: TaskOptions, texts: list[str] | None) -> Outcome:
        if texts is not None:
            pairs = self._pairs(request, required(texts, "continuation"))
            return ChoicesOutcome(texts, pairs)
        text, _ = self._encoder.context(request)
        pair = self._encoder.text(text)
        return TextOutcome(text, pair, context_len=self._max_model_len, stride=options.score_stride)

    def _embed(self, request: Request, asked: TaskRequest) -> Outcome:
        options = asked.options
        check_dimensions(options, self._embedding_size)
        if (token_ids := input_token_ids(request, asked)) is not None:
            encoded = [self._renderer.encode(Request(request.request_id, prompt_token_ids=ids)) for ids in token_ids]
        elif request.messages is not None:
            encoded = [self._renderer.encode(request)]
        else:
            before = options.instruction or ""
            encoded = [self._renderer.encode_prompt(before + text) for text in input_texts(request, asked.texts)]
        pooling = self._pooling if options.pooling is Pooling.AUTO else options.pooling
        return EmbedOutcome(encoded, options, pooling)

    def _classify(self, request: Request, options: TaskOptions) -> Outcome:
        if not options.labels:
            message = "a decoder needs labels to choose from; submit again with --labels"
            raise RowFailure(RowError(ErrorCode.INVALID_PARAMS, message))
        neutral = None
        if options.content_free_prompt is not None:
            neutral = self._labelled(_instead(request, options.content_free_prompt), options.labels)
        return LabelsOutcome(options.labels, self._labelled(request, options.labels), neutral)

    def _labelled(self, request: Request, labels: Iterable[str]) -> list[Pair]:
        """Labels after a prompt: after a blank, where the prompt ends without one and the label begins so."""
        context, leading = self._encoder.context(request)
        blank = "" if context[-1:].isspace() else " "
        spaced = [label if label[0].isspace() else blank + label for label in labels]
        return [self._encoder.pair(context, leading, label) for label in spaced]

    def _rerank(self, request: Request, options: TaskOptions, documents: list[str]) -> Outcome:
        instruction, query = options.instruction or DEFAULT_INSTRUCTION, request.prompt or ""
        pairs = []
        for document in documents:
            if self._renderer.has_chat_template:
                asked = Request(request.request_id, messages=chat(instruction, query, document))
                answers = list(ANSWERS)
            else:
                asked = Request(request.request_id, prompt=plain(instruction, query, document))
                answers = [" " + answer for answer in ANSWERS]
            pairs += self._pairs(asked, answers)
        return RankOutcome(documents, pairs)

    def _pairs(self, request: Request, continuations: Iterable[str]) -> list[Pair]:
        context, leading = self._encoder.context(request)
        return [self._encoder.pair(context, leading, continuation) for continuation in continuations]


def input_texts(request: Request, texts: list[str] | None) -> list[str]:
    """Texts to embed: the row's list, or its one prompt. Raises RowFailure if one of them is empty."""
    found = [request.prompt or ""] if texts is None else texts
    empty = next((index for index, text in enumerate(found) if not text.strip()), None)
    if not found or empty is not None:
        where = "the list of texts" if not found else "the text" if texts is None else f"text {empty} of the list"
        raise RowFailure(RowError(ErrorCode.EMPTY_PROMPT, f"{where} is empty"))
    return found


def input_token_ids(request: Request, asked: TaskRequest) -> list[list[int]] | None:
    """Texts to embed that came as token ids; None for any others.

    Raises:
        RowFailure: an instruction, which is text, should stand before them.
    """
    found = asked.token_ids
    if request.prompt_token_ids is not None:
        found = [request.prompt_token_ids]
    if found is not None and asked.options.instruction:
        message = "an instruction is put before texts, and these are token ids: send texts, or leave it out"
        raise RowFailure(RowError(ErrorCode.INVALID_PARAMS, message))
    return found


def required(texts: list[str] | None, kind: str) -> list[str]:
    """Raises RowFailure: there is none, or one is empty."""
    if not texts:
        raise RowFailure(RowError(ErrorCode.NO_CONTINUATION, f"the row has no {kind}"))
    for index, text in enumerate(texts):
        if not text.strip():
            raise RowFailure(RowError(ErrorCode.NO_CONTINUATION, f"{kind} {index} is empty"))
    return texts


def _instead(request: Request, content: str) -> Request:
    """The request with other content: of a chat, the last message's."""
    if request.messages is None:
        return replace(request, prompt=content)
    return replace(request, messages=[*request.messages[:-1], {**request.messages[-1], "content": content}])
