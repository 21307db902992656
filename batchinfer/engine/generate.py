"""Feeds an engine from an iterable and gives its rows back as they end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Request

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from batchinfer.engine.protocol import EngineProtocol
    from batchinfer.types import Completion, Message

    Prompt = Request | str | list[Message]


def generate(
    engine: EngineProtocol, prompts: Iterable[Prompt], params: SamplingParams | None, window: int
) -> Iterator[Completion]:
    """Yield one completion a prompt, in the order in which they end.

    Prompts are pulled one by one and only while fewer than ``window`` are unfinished, so the iterable may be endless.
    A caller who stops early leaves an idle engine behind: what is unfinished is aborted.

    Raises:
        EngineError: the engine broke; rows not yielded yet are lost.
    """
    source = enumerate(prompts)
    unfinished: set[str] = set()
    is_exhausted = False
    try:
        while True:
            while not is_exhausted and len(unfinished) < window:
                if (item := next(source, None)) is None:
                    is_exhausted = True
                else:
                    request = as_request(*item, params)
                    engine.add_request(request)
                    unfinished.add(request.request_id)
            if not unfinished:
                return
            for completion in engine.step():
                unfinished.discard(completion.request_id)
                yield completion
    finally:
        for request_id in unfinished:
            engine.abort(request_id)
        if unfinished:
            engine.step()  # takes the completions of the aborted rows out


def as_request(index: int, prompt: Prompt, params: SamplingParams | None) -> Request:
    """A request as it is; text or messages under their index as id, with ``params``."""
    if isinstance(prompt, Request):
        return prompt
    params = params or SamplingParams()
    if isinstance(prompt, str):
        return Request(str(index), params, prompt=prompt)
    return Request(str(index), params, messages=prompt)
