"""An answer taken apart into text, reasoning and tool calls, where its row asks for that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchinfer.chat_params import ToolParser
from batchinfer.engine.marked_text import MarkedStream
from batchinfer.engine.reasoning import ReasoningStream, ReasoningTags, tags_of
from batchinfer.engine.tool_calls import MARKERS, MalformedCallError, call_id, parse_calls
from batchinfer.types import FinishReason

if TYPE_CHECKING:
    from batchinfer.engine.chat import ChatRenderer
    from batchinfer.engine.detokenizer import Detokenizer, TextStream
    from batchinfer.engine.sequence import Sequence
    from batchinfer.sampling_params import SamplingParams
    from batchinfer.types import Request

_TAIL = 32
"""Tokens at a prompt's end among which a tag that begins the reasoning is looked for."""


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """One sequence's answer. ``extra`` are values of the columns that the row asks for, by name."""

    text: str
    finish_reason: FinishReason
    extra: dict[str, Any]
    warnings: tuple[str, ...] = ()


class AnswerReader:
    """Starts the text of answers, and takes them apart at their end."""

    def __init__(self, renderer: ChatRenderer, detokenizer: Detokenizer) -> None:
        self._renderer = renderer
        self._detokenizer = detokenizer
        self._tags: ReasoningTags | None = None

    @property
    def tags(self) -> ReasoningTags:
        """What stands around this model's reasoning."""
        if self._tags is None:
            self._tags = tags_of(self._renderer)
        return self._tags

    def stream(self, params: SamplingParams) -> TextStream:
        """Text of tokens as the row wants to read them."""
        if params.skip_special_tokens:
            return self._detokenizer.start()
        return self._detokenizer.start(skip_special_tokens=False)

    def start(self, request: Request, prompt: list[int]) -> TextStream:
        """The stream of a new answer to a prompt."""
        params = request.params
        if not (params.splits_reasoning or params.parses_tool_calls):
            return self.stream(params)
        markers = dict(self.tags.markers) if params.splits_reasoning else {}
        for text in MARKERS.get(self._call_format(params), ()):
            if (token_id := self._renderer.token_id(text)) is not None:
                markers[token_id] = text
        marked = MarkedStream(lambda: self.stream(params), markers)
        if not params.splits_reasoning:
            return marked
        return ReasoningStream(marked, self.tags, is_open=self._is_open(request, prompt))

    def _call_format(self, params: SamplingParams) -> ToolParser:
        return self._renderer.call_format(params) if params.parses_tool_calls else ToolParser.NONE

    def _is_open(self, request: Request, prompt: list[int]) -> bool:
        """Whether the prompt ends within reasoning: with the tag that begins it, or in an unfinished last message."""
        if request.params.continue_final_message and request.messages:
            content = request.messages[-1].get("content")
            return isinstance(content, str) and content.rfind(self.tags.begin) > content.rfind(self.tags.end)
        return self._renderer.decode(prompt[-_TAIL:]).rstrip().endswith(self.tags.begin)

    def parts(self, sequence: Sequence, reason: FinishReason, sample: int) -> AnswerParts:
        """The answer of a sequence that has ended; ``sample`` is its place among the row's."""
        params, text = sequence.params, sequence.stop.text
        extra: dict[str, Any] = {}
        if isinstance(stream := sequence.stop.stream, ReasoningStream):
            extra |= {"reasoning": stream.reasoning, "reasoning_tokens": stream.num_reasoning_tokens}
        if not params.parses_tool_calls:
            return AnswerParts(text, reason, extra)
        return self._with_calls(sequence, AnswerParts(text, reason, extra | {"tool_calls": None}), sample)

    def _with_calls(self, sequence: Sequence, answer: AnswerParts, sample: int) -> AnswerParts:
        params = sequence.params
        call_format = self._call_format(params)
        if call_format is ToolParser.NONE:
            warning = "tool_calls_not_read:the chat template writes calls in no known way; choose a tool_parser"
            return AnswerParts(answer.text, answer.finish_reason, answer.extra, (warning,))
        text = answer.text
        names = frozenset(tool["function"]["name"] for tool in params.tools)
        try:
            found = parse_calls(text, call_format, names)
        except MalformedCallError as error:
            return AnswerParts(text, answer.finish_reason, answer.extra, (f"malformed_tool_call:{error}",))
        if found is None:
            return AnswerParts(text, answer.finish_reason, answer.extra)
        calls = [
            {
                "id": call.id or call_id(sequence.request_id, sample, index, call_format),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(found.calls)
        ]
        strange = dict.fromkeys(call.name for call in found.calls if call.name not in names)
        reason = FinishReason.TOOL_CALLS if answer.finish_reason is FinishReason.STOP else answer.finish_reason
        warnings = tuple(f"unknown_tool:{name}" for name in strange)
        return AnswerParts(found.text, reason, answer.extra | {"tool_calls": calls}, warnings)
