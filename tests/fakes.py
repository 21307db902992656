"""A deterministic engine without a model: ``EngineConfig`` in, answers out, and faults on request.

A prompt is answered by its words in reverse order. Words of the prompt make it misbehave:

- ``CRASH`` ends the process with ``os._exit(13)`` when the row runs; ``SEGFAULT`` with that signal; ``CRASH-ONCE`` does
  so only where the file named by ``CRASH_FILE`` in the environment does not exist, and makes it
- ``HANG`` blocks a step for ever; ``SPIN`` never ends, though steps go on; ``RAISE`` breaks the engine as a whole;
  ``ASSERT`` poisons the device; ``ECC-ONCE`` is a fault of the hardware where the file named by ``CRASH_FILE`` does not exist, and makes it
- ``ERROR`` becomes an ``engine_error`` row; ``ERROR-ONCE`` only where the file named by ``ERROR_FILE`` does not exist,
  and makes it
- ``SEED`` is answered with the row's seed
- ``WAIT:n`` takes n steps more; ``SLEEP:s`` holds its last step up for s seconds, ``PACE:s`` each of them

Texts to embed become vectors: how many words they have, and a third of how many characters.

A model named ``missing`` raises ModelError, ``broken`` RuntimeError, ``crashing`` ends the process, ``slow:s`` takes
s seconds to load. ``CALLS_FILE`` in the environment names a file to which each row that runs adds its prompt.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from batchinfer.engine.stats import EngineStats
from batchinfer.errors import DeviceUnhealthyError, EngineError, ModelError
from batchinfer.types import Completion, ErrorCode, FinishReason, Request, RowError, RowStatus, SampleProgress, Usage

if TYPE_CHECKING:
    from batchinfer.engine.config import EngineConfig

STEP_NS = 1_000_000
"""What a row is charged for each step that it was in: nothing is measured, so costs can be predicted."""


def create_engine(config: EngineConfig) -> FakeEngine:
    """The factory: ``tests.fakes:create_engine``."""
    name, _, seconds = config.model.partition(":")
    if name == "missing":
        raise ModelError(f"no model at {config.model}: give another", param="model")
    if name == "broken":
        raise RuntimeError("the weights are\nbroken")
    if name == "crashing":
        print("last words", flush=True)
        os._exit(13)
    if name == "slow":
        time.sleep(float(seconds))
    return FakeEngine(config)


def create_reference(config: EngineConfig) -> FakeReference:
    """The factory of the sentinel's engine: ``tests.fakes:create_reference``."""
    if config.model.endswith("unreadable"):
        raise ModelError("the reference cannot be read")
    return FakeReference(config)


def answer(prompt: str) -> str:
    """What the fake says to a prompt."""
    return " ".join(reversed(prompt.split()))


def texts_of(request: Request) -> list[str]:
    """What is to be embedded: texts, or token ids as words."""
    task = request.task or {}
    return task.get("texts") or [" ".join(map(str, ids)) for ids in task.get("token_ids", [])] or [request.prompt or ""]


def vector_of(text: str) -> list[float]:
    """What the fake makes of a text."""
    return [float(len(text.split())), len(text) / 3]


def text_of(request: Request) -> str:
    """The prompt, or the last message's content, or the token ids as words; of an embedding its texts."""
    if (request.task or {}).get("task") == "embed":
        return " ".join(texts_of(request))
    if request.messages is not None:
        return str(request.messages[-1]["content"])
    if request.prompt_token_ids is not None:
        return " ".join(map(str, request.prompt_token_ids))
    return request.prompt or ""


def _is_first(mark: Path) -> bool:
    """Whether the file is not there yet; it is then."""
    is_first = not mark.exists()
    mark.touch()
    return is_first


class FakeEngine:
    """Runs up to ``max_num_seqs`` rows at a time, one step a row unless told otherwise."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._waiting: deque[Request] = deque()
        self._running: dict[str, _Row] = {}
        self._ids: set[str] = set()  # of all that is waiting or running
        self._ended: list[Completion] = []
        self._stats = EngineStats()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add_request(self, request: Request) -> None:
        if request.request_id in self._ids:
            raise ValueError(f"request {request.request_id} is unfinished")
        self._ids.add(request.request_id)
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        row = self._running.pop(request_id, None)
        kept = [waiting for waiting in self._waiting if waiting.request_id != request_id]
        if row is None and len(kept) == len(self._waiting):
            return
        self._waiting = deque(kept)
        self._ids.discard(request_id)
        error = RowError(ErrorCode.JOB_CANCELLED, "aborted")
        device_ns = row.device_ns if row else 0
        self._stats.cancelled += 1
        self._ended.append(Completion(request_id, RowStatus.CANCELLED, error=error, device_ns=device_ns))

    def step(self) -> list[Completion]:
        while self._waiting and len(self._running) < self._config.max_num_seqs_on("cpu"):
            request = self._waiting.popleft()
            self._running[request.request_id] = _Row(request)
        done = self._ended + [row.completion() for row in list(self._running.values()) if row.step()]
        self._ended = []
        for completion in done:
            self._running.pop(completion.request_id, None)
            self._ids.discard(completion.request_id)
        self._count(done)
        return done

    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running or self._ended)

    def progress(self) -> dict[str, tuple[SampleProgress, ...]]:
        """The words said so far, a word a step, as numbers of tokens."""
        done = {request_id: row.said for request_id, row in self._running.items()}
        return {request_id: (SampleProgress(tuple(range(count))),) for request_id, count in done.items() if count}

    def stats(self) -> EngineStats:
        self._stats.num_waiting, self._stats.num_running = self.num_waiting, self.num_running
        self._stats.unfinished_device_ns = sum(row.device_ns for row in self._running.values())
        return self._stats

    def check_integrity(self) -> None:
        assert not set(self._running) & {request.request_id for request in self._waiting}

    def close(self) -> None:
        self._running.clear()

    def _count(self, done: list[Completion]) -> None:
        if not all(row.is_spinning for row in self._running.values()) or done:
            self._stats.steps += 1
        self._stats.step_ns += STEP_NS * (len(self._running) + len(done))
        self._stats.succeeded += sum(completion.status is RowStatus.SUCCEEDED for completion in done)
        self._stats.errored += sum(completion.status is RowStatus.ERRORED for completion in done)
        for completion in done:
            self._stats.prompt_tokens += completion.usage.prompt_tokens
            self._stats.completion_tokens += completion.usage.completion_tokens


class _Row:
    """A row that runs."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.text = text_of(request)
        self.words = self.text.split()
        self.steps_left = 1 + sum(int(word[5:]) for word in self.words if word.startswith("WAIT:"))
        self.said = len(request.progress[0].token_ids) if request.progress else 0
        self.steps_left = max(1, self.steps_left - self.said)
        self.device_ns = 0
        self.is_spinning = "SPIN" in self.words
        if path := os.environ.get("CALLS_FILE"):
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(self.text.replace("\n", " ") + "\n")

    def step(self) -> bool:
        """Run one step; True if it was the last."""
        self.device_ns += STEP_NS
        self.said += 1
        self._misbehave()
        self.steps_left -= 1
        for word in self.words:
            if word.startswith("PACE:"):
                time.sleep(float(word[5:]))
        if self.is_spinning or self.steps_left > 0:
            return False
        for word in self.words:
            if word.startswith("SLEEP:"):
                time.sleep(float(word[6:]))
        return True

    def completion(self) -> Completion:
        num_tokens = len(self.words)
        if "ERROR" in self.words or ("ERROR-ONCE" in self.words and _is_first(Path(os.environ["ERROR_FILE"]))):
            error = RowError(ErrorCode.ENGINE_ERROR, "asked for an error")
            usage = Usage(num_tokens, 0, 0)
            return Completion(
                self.request.request_id, RowStatus.ERRORED, error=error, usage=usage, device_ns=self.device_ns
            )
        task = self.request.task or {}
        if task.get("task") == "embed":
            return self._embedded(task.get("dimensions"))
        limit = self.request.params.max_tokens
        said = answer(self.text).replace("SEED", f"seed={self.request.params.seed}").split()[:limit]
        return Completion(
            self.request.request_id,
            RowStatus.SUCCEEDED,
            text=" ".join(said),
            token_ids=tuple(range(len(said))),
            finish_reason=FinishReason.LENGTH if num_tokens > limit else FinishReason.STOP,
            usage=Usage(num_tokens, 0, len(said)),
            device_ns=self.device_ns,
        )

    def _embedded(self, dimensions: int | None) -> Completion:
        vectors = [vector_of(text)[:dimensions] for text in texts_of(self.request)]
        return Completion(
            self.request.request_id,
            RowStatus.SUCCEEDED,
            usage=Usage(len(self.words), 0, 0),
            device_ns=self.device_ns,
            extra={"embedding": vectors[0] if len(vectors) == 1 else None, "embeddings": vectors},
        )

    def _misbehave(self) -> None:
        if "CRASH" in self.words:
            print(f"crashing on {self.request.request_id}", flush=True)
            os._exit(13)
        if "CRASH-ONCE" in self.words and _is_first(Path(os.environ["CRASH_FILE"])):
            os._exit(13)
        if "SEGFAULT" in self.words:
            os.kill(os.getpid(), signal.SIGSEGV)
        if "ECC-ONCE" in self.words and _is_first(Path(os.environ["CRASH_FILE"])):
            raise DeviceUnhealthyError("the device is not well: CUDA error: uncorrectable ECC error encountered")
        if "ASSERT" in self.words:
            raise EngineError("the device failed") from RuntimeError("CUDA error: device-side assert triggered")
        if "RAISE" in self.words:
            raise EngineError("the device is poisoned")
        while "HANG" in self.words:
            time.sleep(3600)


class FakeReference(FakeEngine):
    """Compares the words of answers: each differs by 0.01 nats, one that says DRIFT by 1."""

    def step(self) -> list[Completion]:
        done = [self._compare(request) for request in self._waiting]
        self._waiting.clear()
        self._ids.clear()
        self._stats.steps += 1
        return done

    @staticmethod
    def _compare(request: Request) -> Completion:
        words = [str(token) for token in request.progress[0].token_ids] if request.progress else request.answer.split()
        kl = [1.0 if word == "DRIFT" else 0.01 for word in words]
        places = [{"position": i, "kl": 1.0, "token": "DRIFT"} for i, value in enumerate(kl) if value == 1]
        drift = {
            "tokens": len(kl), "same": len(kl) - len(places), "kl_sum": sum(kl), "kl_max": max(kl), "loss": 2.0 * len(kl),
            "reference_loss": 1.0 * len(kl), "kl_counts": {"350": len(kl) - len(places), "450": len(places)},
            "differences": places[:5],
        }  # fmt: skip
        return Completion(request.request_id, RowStatus.SUCCEEDED, extra={"drift": drift}, device_ns=STEP_NS)
