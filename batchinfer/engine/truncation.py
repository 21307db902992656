"""Prompts that leave no room for their answer, made shorter where the row asks for it.

Text and token ids are cut at the side that was named. A conversation keeps the frame that its template makes: the
oldest turns after the system message go first, then text of the longest message that is left, at the side named.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from batchinfer.chat_params import Truncate
from batchinfer.engine.messages import normalize_messages
from batchinfer.template_budget import budget

if TYPE_CHECKING:
    from batchinfer.engine.chat import ChatRenderer
    from batchinfer.types import Message, Request

    Encoded = tuple[list[int], tuple[str, ...]]
    """Token ids, and what to say in the row."""

_SYSTEM = ("system", "developer")
_PLACE_HOLDER = "\ufffd"


def encode_within(renderer: ChatRenderer, request: Request, room: int) -> Encoded:
    """Token ids of a prompt, cut to ``room`` tokens if the request says how; longer where no cut can help.

    Raises:
        RowFailure: as :meth:`ChatRenderer.encode`.
    """
    token_ids = renderer.encode(request)
    side = request.params.truncate
    if side is None or len(token_ids) <= room or room < 1:
        return token_ids, ()
    if request.messages is None:
        cut = _cut(token_ids, room, side, keep=renderer.num_leading(token_ids))
        return cut, (_note(side, len(token_ids) - len(cut)),)
    shorter = _ShorterChat(renderer, request, room)
    with budget.of_a_row():  # however often it is rendered
        cut = shorter.encode(side)
    if len(cut) > room:
        return token_ids, ()
    notes = (_note(side, len(token_ids) - len(cut)),)
    return cut, (*notes, f"messages_dropped:{shorter.num_dropped}") if shorter.num_dropped else notes


def _note(side: Truncate, num_tokens: int) -> str:
    return f"truncated:{side.value}:{num_tokens} tokens"


def _cut(token_ids: list[int], room: int, side: Truncate, keep: int = 0) -> list[int]:
    """``room`` of the tokens; the first ``keep`` (BOS) stay whatever the side."""
    head, body = token_ids[:keep], token_ids[keep:]
    room = max(room - keep, 0)
    if side is Truncate.RIGHT:
        return head + body[:room]
    if side is Truncate.LEFT:
        return head + body[len(body) - room :]
    first = (room + 1) // 2
    return head + body[:first] + body[len(body) - (room - first) :]


class _ShorterChat:
    """A conversation that loses turns, then text."""

    def __init__(self, renderer: ChatRenderer, request: Request, room: int) -> None:
        self._renderer = renderer
        self._request = request
        self._room = room
        self.num_dropped = 0

    def encode(self, side: Truncate) -> list[int]:
        """Token ids, within the room if that can be."""
        messages = self._drop_turns(normalize_messages(self._request.messages))
        token_ids = self._tokens(messages)
        while len(token_ids) > self._room:
            shorter = self._shorten(messages, len(token_ids) - self._room, side)
            if shorter is None:
                break
            messages = shorter
            token_ids = self._tokens(messages)
        return token_ids

    def _tokens(self, messages: list[Message]) -> list[int]:
        return self._renderer.encode(replace(self._request, messages=messages))

    def _drop_turns(self, messages: list[Message]) -> list[Message]:
        """Without the oldest turns (from a user's message to the next), as few as make room, and never the last."""
        num_system = next((i for i, m in enumerate(messages) if m["role"] not in _SYSTEM), len(messages))
        starts = [i for i in range(num_system, len(messages)) if messages[i]["role"] == "user"]
        system = messages[:num_system]
        low, high = 0, len(starts) - 1  # turn `high` is the last and stays; fewer turns never need more room
        while low < high:
            middle = (low + high) // 2
            if len(self._tokens(system + messages[self._first(starts, middle, num_system) :])) <= self._room:
                high = middle
            else:
                low = middle + 1
        start = self._first(starts, low, num_system)
        self.num_dropped = start - num_system
        return system + messages[start:]

    @staticmethod
    def _first(starts: list[int], turn: int, num_system: int) -> int:
        return starts[turn] if turn > 0 else num_system

    def _shorten(self, messages: list[Message], excess: int, side: Truncate) -> list[Message] | None:
        """The longest message with ``excess`` tokens less (all of its tokens if it has no more); None if all are empty."""
        tokens = [self._renderer.encode_fragment(message["content"]) for message in messages]
        index = max(range(len(messages)), key=lambda i: len(tokens[i]))
        if not tokens[index]:
            return None
        content = self._cut_text(tokens[index], max(len(tokens[index]) - excess, 0), side)
        if len(content) >= len(messages[index]["content"]):  # a cut that shows as a replacement character
            content = ""
        return [*messages[:index], messages[index] | {"content": content}, *messages[index + 1 :]]

    def _cut_text(self, token_ids: list[int], room: int, side: Truncate) -> str:
        """Text of what is left; characters that the cut halved are left out."""
        if side is Truncate.LEFT:
            return self._renderer.decode(token_ids[len(token_ids) - room :]).lstrip(_PLACE_HOLDER)
        if side is Truncate.RIGHT:
            return self._renderer.decode(token_ids[:room]).rstrip(_PLACE_HOLDER)
        first = (room + 1) // 2
        before = self._renderer.decode(token_ids[:first]).rstrip(_PLACE_HOLDER)
        return before + self._renderer.decode(token_ids[len(token_ids) - (room - first) :]).lstrip(_PLACE_HOLDER)
