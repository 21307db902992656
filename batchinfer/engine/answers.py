"""From sequences that have ended to the completion of their row: the one place where an answer gets its final form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchinfer.engine.logprobs import PromptScores
from batchinfer.guided import compact
from batchinfer.types import Completion, ErrorCode, FinishReason, RowError, RowStatus, Usage

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Sequence_

    from batchinfer.engine.answer_parts import AnswerParts, AnswerReader
    from batchinfer.engine.detokenizer import Detokenizer
    from batchinfer.engine.logprobs import TokenScore
    from batchinfer.engine.sequence import Sequence

    Ended = tuple[Sequence, FinishReason]
    """A sequence and why it ended."""

TAIL_LENGTH = 60
"""Characters of a truncated answer that its error quotes."""


class AnswerWriter:
    """Writes completions. Values of optional result columns go into ``Completion.extra`` where the row asks for them."""

    def __init__(self, detokenizer: Detokenizer, reader: AnswerReader) -> None:
        self._detokenizer = detokenizer
        self._reader = reader

    def completion(
        self, ended: Sequence_[Ended], usage: Usage, device_ns: int, prompt: str | None, notes: tuple[str, ...] = ()
    ) -> Completion:
        """A row that succeeded; ``ended`` are its samples, best first. ``prompt`` is put before each text (``echo``).

        ``notes`` are warnings that the row has already.
        """
        sequence, params = ended[0][0], ended[0][0].params
        if cut := next((s for s, _ in ended if _is_truncated(s)), None):
            return failed(sequence.request_id, _truncated(cut), usage, device_ns, sequence.clamped_max_tokens)
        parts = [self._reader.parts(sample, reason, index) for index, (sample, reason) in enumerate(ended)]
        warnings = (warning for part in parts for warning in part.warnings)
        return Completion(
            request_id=sequence.request_id,
            status=RowStatus.SUCCEEDED,
            text=(prompt or "") + parts[0].text,
            token_ids=tuple(sequence.output_token_ids),
            finish_reason=parts[0].finish_reason,
            usage=usage,
            device_ns=device_ns,
            clamped_max_tokens=sequence.clamped_max_tokens,
            extra=self._scores(sequence)
            | _parsed(sequence)
            | parts[0].extra
            | self._prompt_scores(ended)
            | ({"samples": self._samples(ended, parts, prompt)} if params.has_samples else {}),
            warnings=(*notes, *_warnings([s for s, _ in ended]), *dict.fromkeys(warnings)),
        )

    def _samples(
        self, ended: Iterable[Ended], parts: Iterable[AnswerParts], prompt: str | None
    ) -> list[dict[str, Any]]:
        return [
            {
                "sample_index": index,
                "output": (prompt or "") + part.text,
                "finish_reason": part.finish_reason.value,
                "token_ids": sequence.output_token_ids,
                **self._scores(sequence),
                **part.extra,
            }
            for index, ((sequence, _), part) in enumerate(zip(ended, parts, strict=True))
        ]

    def _scores(self, sequence: Sequence) -> dict[str, Any]:
        scores = sequence.scores
        if scores is None:
            return {}
        cumulative = {"cumulative_logprob": scores.cumulative}
        if scores.num_top is None:
            return cumulative
        return {"logprobs": [self._score(score) for score in scores.tokens], **cumulative}

    def _prompt_scores(self, ended: Iterable[Ended]) -> dict[str, Any]:
        found = ((s.token_ids[0], s.prompt_scores) for s, _ in ended if isinstance(s.prompt_scores, PromptScores))
        first, scores = next(found, (None, None))
        if first is None or scores is None:
            return {}
        unscored = {"token_id": first, "token": self._text(first), "logprob": None, "rank": None, "top": []}
        return {"prompt_logprobs": [unscored, *(self._score(score) for score in scores.tokens)]}

    def _score(self, score: TokenScore) -> dict[str, Any]:
        top = [{"token_id": token, "token": self._text(token), "logprob": value} for token, value in score.top]
        text = self._text(score.token_id)
        return {"token_id": score.token_id, "token": text, "logprob": score.logprob, "rank": score.rank, "top": top}

    def _text(self, token_id: int) -> str:
        return self._detokenizer.token_text(token_id)


def _is_truncated(sequence: Sequence) -> bool:
    """Whether it was to be JSON or a tool call and is not."""
    constraint = sequence.constraint
    return constraint is not None and constraint.all_or_nothing and not constraint.is_complete


def _truncated(sequence: Sequence) -> RowError:
    cause = "a stop string or stop token" if sequence.num_remaining_tokens else f"max_tokens ({sequence.max_tokens})"
    what = "JSON" if sequence.constraint is None or sequence.constraint.is_json else "tool call"
    tail = sequence.stop.text[-TAIL_LENGTH:]
    return RowError(ErrorCode.TRUNCATED_JSON, f"{cause} cut the {what} off; it ends in {tail!r}")


def _parsed(sequence: Sequence) -> dict[str, str]:
    constraint = sequence.constraint
    if constraint is None or not constraint.is_json:
        return {}
    return {"parsed": compact(constraint.text(sequence.output_token_ids))}


def _warnings(sequences: Sequence_[Sequence]) -> tuple[str, ...]:
    """What a reader of guided answers should know."""
    longer = max((s.max_tokens for s in sequences if s.was_lengthened), default=None)
    notes = [] if longer is None else [f"retried_truncated:{longer}"]
    if any(s.constraint is not None and not s.constraint.is_complete for s in sequences):
        notes.append("guide_incomplete")
    return tuple(notes)


def failed(request_id: str, error: RowError, usage: Usage, device_ns: int, clamped: int | None) -> Completion:
    """A row that did not succeed."""
    cancelled = error.code is ErrorCode.JOB_CANCELLED
    return Completion(
        request_id=request_id,
        status=RowStatus.CANCELLED if cancelled else RowStatus.ERRORED,
        error=error,
        usage=usage,
        device_ns=device_ns,
        clamped_max_tokens=clamped,
    )
