"""The peers' side of the protocol: one JSON object a line in, one out, run by the peer's own interpreter.

Uses the standard library alone, since nothing else is sure to be installed there. Requests, in order::

    {"op": "load", "settings": {...}}                          -> {"versions": {...}, "seconds": 1.5}
    {"op": "run", "prompts": [[1, 2]], "max_tokens": [4]}      -> {"token_ids": [[5, 6, 7, 8]], "seconds": 0.2}

A failure answers ``{"error": "Type: message"}`` and leaves the traceback in the log. The end of input ends the program.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from abc import ABC, abstractmethod
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable


class Adapter(ABC):
    """One engine, loaded. Greedy, end of sequence ignored."""

    packages: tuple[str, ...] = ()
    """Distributions whose versions belong beside the figures."""

    @abstractmethod
    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        """New token ids of each prompt, in the order of the prompts."""

    def reset(self) -> None:  # noqa: B027 - most engines keep nothing between runs
        """Forget what earlier runs left in caches; not timed."""


def serve(load: Callable[[dict[str, Any]], Adapter]) -> None:
    """Answer requests until the input ends."""
    # libraries print what they like; the protocol keeps the real stdout to itself
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    adapter: Adapter | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["op"] == "load":
                start = time.perf_counter()
                adapter = load(request["settings"])
                _answer(answers, versions=_versions(adapter), seconds=time.perf_counter() - start)
            elif adapter is None:
                _answer(answers, error="ValueError: run before load")
            else:
                adapter.reset()
                start = time.perf_counter()
                token_ids = adapter.generate(request["prompts"], request["max_tokens"])
                _answer(answers, token_ids=token_ids, seconds=time.perf_counter() - start)
        except Exception as error:  # noqa: BLE001 - whatever a peer raises is its result
            traceback.print_exc()
            _answer(answers, error=f"{type(error).__name__}: {error}"[:500])


def _answer(answers: TextIO, **fields: Any) -> None:
    answers.write(json.dumps(fields) + "\n")
    answers.flush()


def _versions(adapter: Adapter) -> dict[str, str]:
    found = {}
    for name in adapter.packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found
