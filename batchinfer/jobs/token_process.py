"""Token ids of prompts, from a process that has the model's tokenizer: this one stays light, and safe from templates.

A model's chat template is a program of its maker. Running it in a child with a time limit keeps a server's memory and
clock out of its reach, and keeps torch and transformers out of the command line and the API.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias

from batchinfer.errors import ModelError, UserError
from batchinfer.types import ErrorCode, RowError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from batchinfer.types import Request

Tokens: TypeAlias = "list[int] | RowError"
_BOOT = (
    "import sys, runpy; sys.path[:] = {path!r}; runpy.run_module('batchinfer.engine.token_server', run_name='__main__')"
)
LOAD_SECONDS = 120.0
CALL_SECONDS = 120.0


class Encoder(Protocol):
    """Turns requests into token ids."""

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus answer in tokens, if it is known."""
        ...

    def encode(self, requests: Sequence[Request]) -> list[Tokens]:
        """Token ids of each request, or why it has none."""
        ...


class TokenProcess:
    """The child. A context manager.

    Raises:
        ModelError: there is no such model here, or its tokenizer cannot be read.
        UserError: ``tokenizer_failed``: the child died or took too long.
    """

    def __init__(self, model: str, *, load_seconds: float = LOAD_SECONDS, call_seconds: float = CALL_SECONDS) -> None:
        self._model = model
        self._call_seconds = call_seconds
        self._child = subprocess.Popen(  # noqa: S603 -- our own interpreter; the model's name is no option of it
            [sys.executable, "-c", _BOOT.format(path=sys.path), model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
        )
        try:
            self.max_model_len = self._length(self._read(load_seconds))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def encode(self, requests: Sequence[Request]) -> list[Tokens]:
        """Token ids of each request, or why it has none. Raises UserError: ``tokenizer_failed``."""
        assert self._child.stdin is not None
        message = {"requests": [_to_json(request) for request in requests]}
        try:
            self._child.stdin.write(json.dumps(message, separators=(",", ":")) + "\n")
            self._child.stdin.flush()
        except OSError:
            raise self._failure("ended") from None
        return [_tokens(found) for found in self._read(self._call_seconds)["tokens"]]

    def close(self) -> None:
        """End the child."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # what was still to be written has no reader
                    continue

    @staticmethod
    def _length(first: dict[str, Any]) -> int | None:
        if "error" in first:
            raise ModelError(first["error"], param="model")
        length: int | None = first["max_model_len"]
        return length

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self._child.stdout is not None
        watch = threading.Timer(seconds, self._child.kill)
        watch.start()
        try:
            line = self._child.stdout.readline()
        finally:
            watch.cancel()
        if not line:
            raise self._failure(f"did not answer in {seconds:.0f} seconds, or ended")
        message: dict[str, Any] = json.loads(line)
        return message

    def _failure(self, what: str) -> UserError:
        return UserError(
            f"the tokenizer process of {self._model} {what}; try a smaller sample", code="tokenizer_failed"
        )


def _to_json(request: Request) -> dict[str, Any]:
    """The fields that make the prompt; parameters have no part in it."""
    fields: dict[str, Any] = {
        "request_id": request.request_id, "params": {}, "prompt": request.prompt,
        "messages": request.messages, "prompt_token_ids": request.prompt_token_ids,
    }  # fmt: skip
    return {name: value for name, value in fields.items() if value is not None}


def _tokens(found: Any) -> Tokens:
    if isinstance(found, list):
        return found
    return RowError(ErrorCode(found["code"]), found["message"])
