"""A contender in a process of its own: start, load, run, watch its memory, end."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from batchinfer.engine.others_load import OthersLoad
from benchmarks.machine import high_water_mb, tree_cpu_seconds
from benchmarks.peers.catalogue import ROOT, child_environment

if TYPE_CHECKING:
    from benchmarks.peers.catalogue import Contender
    from benchmarks.workloads import Item

WATCH_S = 1.0
LOG_TAIL = 2000


class PeerError(Exception):
    """A contender failed, ended or took too long; the message is for the table."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run: seconds without loading, tokens, and the share of the machine that others took meanwhile."""

    seconds: float
    num_tokens: int
    others_percent: float
    token_ids: list[list[int]]


class PeerProcess:
    """A started contender; use it as a context manager. Requests are answered one at a time, in order."""

    def __init__(self, contender: Contender, *, timeout_s: float, load_timeout_s: float) -> None:
        self.contender = contender
        self.peak_rss_mb = 0
        self.load_seconds = 0.0
        self.versions: dict[str, str] = {}
        self._timeout_s = timeout_s
        self._load_timeout_s = load_timeout_s
        self._log = tempfile.TemporaryFile(mode="w+b")  # noqa: SIM115 - close() closes it
        self._answers = b""
        self._popen = subprocess.Popen(
            contender.command, cwd=ROOT, env=child_environment(contender), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._log, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def load(self) -> None:
        """Load the model.

        Raises:
            PeerError: it cannot be loaded, or not within the time.
        """
        answer = self._ask({"op": "load", "settings": self.contender.settings}, self._load_timeout_s)
        self.versions, self.load_seconds = answer["versions"], round(answer["seconds"], 1)

    def run(self, items: list[Item]) -> Measurement:
        """Run a workload.

        Raises:
            PeerError: it failed, took too long, or gave another number of tokens than was asked for.
        """
        asked = [item.max_tokens for item in items]
        request = {"op": "run", "prompts": [item.prompt_token_ids for item in items], "max_tokens": asked}
        with OthersLoad(own=lambda: tree_cpu_seconds(self._popen.pid)) as others:
            answer = self._ask(request, self._timeout_s)
        counts = [len(ids) for ids in answer["token_ids"]]
        if counts != asked:
            raise PeerError(f"wrong number of tokens: {sum(counts)} in {len(counts)} rows, asked for {sum(asked)}")
        return Measurement(answer["seconds"], sum(counts), others.percent, answer["token_ids"])

    def close(self) -> None:
        """End it and all it started; safe to call twice."""
        if self._popen.stdin is not None:
            with suppress(BrokenPipeError):
                self._popen.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=5)
        # the group outlives its leader where a child was left behind
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        if self._popen.stdout is not None:
            self._popen.stdout.close()
        self._log.close()

    def log_tail(self) -> str:
        """The end of what it wrote to stderr."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - LOG_TAIL))
        return self._log.read().decode(errors="replace")

    def _ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(json.dumps(request).encode() + b"\n")
            self._popen.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        answer: dict[str, Any] = json.loads(self._read_line(deadline, timeout_s))
        self._watch()
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _read_line(self, deadline: float, timeout_s: float) -> bytes:
        assert self._popen.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._popen.stdout, selectors.EVENT_READ)
            while b"\n" not in self._answers:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PeerError(f"took longer than {timeout_s:g} s")
                if not selector.select(min(WATCH_S, left)):
                    self._watch()
                    continue
                read = os.read(self._popen.stdout.fileno(), 1 << 20)
                if not read:
                    raise self._ended()
                self._answers += read
        line, _, self._answers = self._answers.partition(b"\n")
        return line

    def _ended(self) -> PeerError:
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=5)
        lines = self.log_tail().strip().splitlines()
        return PeerError(f"ended with exit code {self._popen.returncode}: {lines[-1] if lines else 'it said nothing'}")

    def _watch(self) -> None:
        self.peak_rss_mb = max(self.peak_rss_mb, high_water_mb(self._popen.pid))
