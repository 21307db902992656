"""Models that think before they answer: their reasoning is told from the answer, counted, and ended where it is long."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from batchinfer.engine.chat import ChatRenderer
    from batchinfer.engine.constraint import TokenConstraint
    from batchinfer.engine.detokenizer import TextStream

THINK = ("<think>", "</think>")
_OTHER_TAGS = (("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """What stands around the reasoning, and the tokens that close it."""

    begin: str
    end: str
    end_ids: tuple[int, ...]
    markers: dict[int, str]
    """Those of the two that are one token."""


def tags_of(renderer: ChatRenderer) -> ReasoningTags:
    """The tags that the model's vocabulary has, else ``<think>`` spelled out."""
    known = [tags for tags in (THINK, *_OTHER_TAGS) if renderer.token_id(tags[1]) is not None]
    begin, end = known[0] if known else THINK
    ids = {text: renderer.token_id(text) for text in (begin, end)}
    end_id = ids[end]
    end_ids = (end_id,) if end_id is not None else tuple(renderer.encode_fragment(end))
    return ReasoningTags(begin, end, end_ids, {i: text for text, i in ids.items() if i is not None})


class _Place(Enum):
    START = auto()  # nothing but white space, or part of the first tag
    INSIDE = auto()
    ANSWER = auto()


class ReasoningStream:
    """A :class:`~batchinfer.engine.detokenizer.TextStream` of the answer alone; the reasoning before it is kept aside.

    ``stream`` writes the tags out. With ``is_open`` the prompt has begun the reasoning. A last tag without a first
    closes reasoning, too: some templates and models leave the first one out. Stop strings never see the reasoning.
    """

    def __init__(self, stream: TextStream, tags: ReasoningTags, *, is_open: bool) -> None:
        self._stream = stream
        self._tags = tags
        self._place = _Place.INSIDE if is_open else _Place.START
        self._parts: list[str] = []
        self._length = 0
        self._spans: list[tuple[int, int]] = []  # each token's text, until the reasoning has ended
        self._begin = 0
        self._end: int | None = None
        self._answer_from = 0
        self._has_answer = False
        self.num_reasoning_tokens = 0
        """Tokens between the tags so far."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the next token is one of the reasoning's."""
        return self._place is _Place.INSIDE

    @property
    def has_ended(self) -> bool:
        """Whether the reasoning is over, or there is none."""
        return self._place is _Place.ANSWER

    def append(self, token_id: int) -> str:
        """Add a token; return the text that it added to the answer."""
        part = self._stream.append(token_id)
        start = self._length
        self._parts.append(part)
        self._length += len(part)
        if self._end is not None:
            return self._answered(part)
        self._spans.append((start, self._length))
        if self._place is _Place.INSIDE:
            self.num_reasoning_tokens += 1
        if not part:
            return ""
        longest = max(len(self._tags.begin), len(self._tags.end))
        if (found := self._find(self._tags.end, start - longest)) >= 0:
            return self._close(found)
        if self._place is _Place.START:
            return self._leave_start()
        return part if self._place is _Place.ANSWER else ""

    def _find(self, tag: str, since: int) -> int:
        """Where the tag stands in the text, from ``since`` on; -1 if nowhere."""
        text, at = "", self._length
        for part in reversed(self._parts):
            text, at = part + text, at - len(part)
            if at <= since:
                break
        found = text.find(tag)
        return at + found if found >= 0 else -1

    def _close(self, found: int) -> str:
        self._end, self._answer_from = found, found + len(self._tags.end)
        self.num_reasoning_tokens = sum(
            start >= self._begin and (start < found or end <= found) for start, end in self._spans
        )
        self._spans.clear()
        self._place = _Place.ANSWER
        return self._answered("".join(self._parts)[self._answer_from :])

    def _answered(self, part: str) -> str:
        """Text of the answer after reasoning, from its first character that is no white space on."""
        if self._has_answer:
            return part
        part = part.lstrip()
        self._has_answer = bool(part)
        return part

    def _leave_start(self) -> str:
        """See whether the text so far is the first tag, may become it, or is the answer."""
        text = "".join(self._parts)
        body = text.lstrip()
        if body.startswith(self._tags.begin):
            self._begin = len(text) - len(body) + len(self._tags.begin)
            self._place = _Place.INSIDE
            self.num_reasoning_tokens = sum(start >= self._begin for start, _ in self._spans)
            return ""
        if self._tags.begin.startswith(body):
            return ""
        self._place = _Place.ANSWER
        return text

    @property
    def reasoning(self) -> str | None:
        """The reasoning, without white space around; None where there is none."""
        if self._end is None and self._place is not _Place.INSIDE:
            return None
        return self._stream.text[self._begin : self._end].strip()

    @property
    def text(self) -> str:
        """The answer; after reasoning without white space before it."""
        if self._place is _Place.INSIDE:
            return ""
        text = self._stream.text[self._answer_from :]
        return text.lstrip() if self._end is not None else text


class ReasoningLimit:
    """A :class:`~batchinfer.engine.constraint.TokenConstraint`: closes the reasoning once it has ``most`` tokens.

    What another constraint (``then``) asks for holds for the answer, before which there may be reasoning.
    """

    def __init__(
        self, stream: ReasoningStream, tags: ReasoningTags, most: int | None, then: TokenConstraint | None = None
    ) -> None:
        self._stream = stream
        self._end_ids = tags.end_ids
        self._begin_id = next((i for i, text in tags.markers.items() if text == tags.begin), None)
        self._most = most
        self._then = then
        self._num_forced = 0
        self._told: list[int] = []

    @property
    def fault(self) -> str | None:
        """See :class:`~batchinfer.engine.constraint.TokenConstraint`."""
        return None if self._then is None else self._then.fault

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end; reasoning alone may, where nothing is asked of the answer."""
        return self._then is None or (self._then.is_complete and not self._stream.is_reasoning)

    @property
    def is_json(self) -> bool:
        """Whether the answer is to be JSON."""
        return self._then is not None and self._then.is_json

    @property
    def all_or_nothing(self) -> bool:
        """Whether an answer that is cut off is of no use."""
        return self._then is not None and self._then.all_or_nothing

    def prepare(self) -> None:
        """See :class:`~batchinfer.engine.constraint.TokenConstraint`."""
        if self._then is not None and not self._stream.is_reasoning:
            self._then.prepare()

    def mask(self) -> torch.Tensor | None:
        """See :class:`~batchinfer.engine.constraint.TokenConstraint`."""
        if self._must_close():
            return _only(self._end_ids[self._num_forced % len(self._end_ids)])
        if self._then is None or self._stream.is_reasoning:
            return None
        mask = self._then.mask()
        if mask is None or self._begin_id is None or self._stream.has_ended:
            return mask
        return _with(mask, self._begin_id)

    def accept(self, token_id: int) -> bool:
        """See :class:`~batchinfer.engine.constraint.TokenConstraint`; the stream has the token only after that."""
        if self._must_close():
            self._num_forced += 1
            return False
        begins = token_id == self._begin_id and not self._stream.has_ended
        if self._then is None or self._stream.is_reasoning or begins:
            return False
        self._told.append(token_id)
        return self._then.accept(token_id)

    def text(self, _token_ids: Sequence[int]) -> str:
        """Text of the answer's tokens; those of the reasoning are left out."""
        return "" if self._then is None else self._then.text(self._told)

    def forced(self) -> Sequence[int]:
        """Tokens that follow in any case, once the answer has begun."""
        return self._then.forced() if self._then is not None and self._stream.has_ended else ()

    def _must_close(self) -> bool:
        if self._most is None or not self._stream.is_reasoning:
            return False
        return self._num_forced > 0 or self._stream.num_reasoning_tokens >= self._most


def _only(token_id: int) -> torch.Tensor:
    """A mask of one token."""
    import torch  # noqa: PLC0415 -- the rest of this module is plain Python

    return _with(torch.zeros(token_id // 32 + 1, dtype=torch.int32), token_id)


def _with(mask: torch.Tensor, token_id: int) -> torch.Tensor:
    """A copy of a mask in which a token is set, too."""
    copy = mask.clone()
    bit = 1 << (token_id % 32)
    copy[token_id // 32] |= bit - (1 << 32) if bit >= 1 << 31 else bit
    return copy
