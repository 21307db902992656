"""An engine that generates nothing: it holds given answers against transformers' own model in float32.

Teacher-forced: of each token of an answer, the distribution that the engine's precision gives is compared with the
reference's, both after the same tokens. It is driven like any engine, so a child process can run it.
"""

from __future__ import annotations

import inspect
import math
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from batchinfer.engine.attention import ATTENTION_NAME, register_attention
from batchinfer.engine.chat import ChatRenderer
from batchinfer.engine.detokenizer import Detokenizer
from batchinfer.engine.scorer import Scorer
from batchinfer.engine.stats import EngineStats
from batchinfer.errors import RowFailure
from batchinfer.models.load import load_model
from batchinfer.types import Completion, ErrorCode, RowError, RowStatus, Usage

if TYPE_CHECKING:
    from batchinfer.engine.config import EngineConfig
    from batchinfer.types import Request, SampleProgress

CHUNK_TOKENS = 128
"""Tokens computed at a time: so many rows of logits of either model are in memory, some 80 MB with 150,000 tokens."""
MAX_DIFFERENCES = 5
"""Places of a row that are told, those with the largest divergence among those where the likeliest token differs."""
BUCKETS_A_DECADE = 50
LEAST_KL = 1e-9


def bucket_of(divergence: float) -> int:
    """The histogram's bucket of a divergence: 50 a decade from 1e-9 nats on, below that the first."""
    return 0 if divergence <= LEAST_KL else min(600, int(BUCKETS_A_DECADE * math.log10(divergence / LEAST_KL)))


def create_engine(config: EngineConfig) -> ReferenceEngine:
    """Load the model twice: as ``config`` asks for, and as transformers runs it in float32.

    Raises:
        ModelError: the model cannot be found, read or run.
    """
    return ReferenceEngine(config)


class ReferenceEngine:
    """Compares a row a step. A request's ``progress`` or ``answer`` is what is compared; without, its own prompt is.

    The figures are in ``Completion.extra["drift"]``: sums over the row's tokens, divergences in nats.
    """

    def __init__(self, config: EngineConfig) -> None:
        register_attention()
        plain = replace(config, dtype="float32", quantization="none", kv_cache_dtype="auto")
        truth = load_model(plain, "sdpa")
        self._truth, self._device = truth.model, truth.device
        # transformers has named it anew
        names = inspect.signature(truth.model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        loaded = load_model(config, ATTENTION_NAME)
        self._limit = loaded.max_model_len
        self._scorer = Scorer(loaded, config, self._limit)
        self._renderer = ChatRenderer(truth.tokenizer, truth.hf_config.vocab_size)
        self._text = Detokenizer(truth.tokenizer).token_text
        self._waiting: deque[Request] = deque()
        self._ended: list[Completion] = []
        self._stats = EngineStats()

    @property
    def num_waiting(self) -> int:
        """Rows that are not compared yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """None: a row is compared within a step."""
        return 0

    def add_request(self, request: Request) -> None:
        """Queue a row."""
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Leave a row out."""
        if any(request.request_id == request_id for request in self._waiting):
            self._waiting = deque(request for request in self._waiting if request.request_id != request_id)
            error = RowError(ErrorCode.JOB_CANCELLED, "the row was aborted before it was compared")
            self._ended.append(Completion(request_id, RowStatus.CANCELLED, error=error))

    def step(self) -> list[Completion]:
        """Compare the next row."""
        ended, self._ended = self._ended, []
        if self._waiting:
            request = self._waiting.popleft()
            started = time.perf_counter_ns()
            completion = self._compare(request)
            elapsed = time.perf_counter_ns() - started
            self._stats.steps += 1
            self._stats.step_ns += elapsed
            ended.append(replace(completion, device_ns=elapsed))
        return ended

    def has_unfinished(self) -> bool:
        """Whether rows are left."""
        return bool(self._waiting or self._ended)

    def progress(self) -> dict[str, tuple[SampleProgress, ...]]:
        """Nothing: no row is ever half compared."""
        return {}

    def stats(self) -> EngineStats:
        """Steps and their time."""
        self._stats.num_waiting = self.num_waiting
        return self._stats

    def check_integrity(self) -> None:
        """There is nothing to lose."""

    def close(self) -> None:
        """Drop both models."""
        self._waiting.clear()
        del self._truth, self._scorer

    def _compare(self, request: Request) -> Completion:
        try:
            prompt = self._renderer.encode(request)
        except RowFailure as failure:
            return Completion(request.request_id, RowStatus.ERRORED, error=failure.error)
        answer = self._answer(request)
        tokens = [*prompt, *answer][: self._limit]
        first = len(prompt) if answer else 1  # the first token has nothing before it
        drift = self._drift(tokens, first)
        usage = Usage(prompt_tokens=min(first, len(tokens)), completion_tokens=drift["tokens"])
        return Completion(request.request_id, RowStatus.SUCCEEDED, usage=usage, extra={"drift": drift})

    def _answer(self, request: Request) -> list[int]:
        if request.progress:
            return list(request.progress[0].token_ids)
        return self._renderer.encode_fragment(request.answer) if request.answer else []

    @torch.inference_mode()
    def _drift(self, tokens: list[int], first: int) -> dict[str, Any]:
        """Compare what either model expects at the places ``first ..``, each given the tokens before it."""
        sums = {"tokens": 0, "same": 0, "kl_sum": 0.0, "kl_max": 0.0, "loss": 0.0, "reference_loss": 0.0}
        counts: dict[str, int] = {}
        places: list[dict[str, Any]] = []
        cache = DynamicCache(config=self._truth.config)
        for start in range(0, len(tokens) - 1, CHUNK_TOKENS):
            stop = min(start + CHUNK_TOKENS, len(tokens) - 1)
            wanted = range(max(start, first - 1), stop)
            output = self._truth(
                torch.tensor([tokens[start:stop]], device=self._device),
                **{self._cache_name: cache},
                use_cache=True,
                logits_to_keep=torch.arange(wanted.start - start, max(wanted.start, stop) - start, device=self._device),
            )
            own = self._scorer.chunk(tokens, start, stop, wanted)
            if not wanted:
                continue
            expected = torch.log_softmax(output.logits[0].float(), dim=-1)
            own = torch.log_softmax(own, dim=-1)
            divergences = (expected.exp() * (expected - own)).sum(dim=-1).clamp_(min=0).tolist()
            follows = torch.tensor(tokens[wanted.start + 1 : stop + 1], device=self._device)[:, None]
            theirs, ours = expected.argmax(dim=-1).tolist(), own.argmax(dim=-1).tolist()
            sums["tokens"] += len(divergences)
            sums["same"] += sum(a == b for a, b in zip(theirs, ours, strict=True))
            sums["kl_sum"] += sum(divergences)
            sums["kl_max"] = max(sums["kl_max"], *divergences)
            sums["loss"] -= float(own.gather(1, follows).sum())
            sums["reference_loss"] -= float(expected.gather(1, follows).sum())
            for position, kl, a, b in zip(wanted, divergences, theirs, ours, strict=True):
                bucket = str(bucket_of(kl))
                counts[bucket] = counts.get(bucket, 0) + 1
                if a != b:
                    places.append(
                        {
                            "position": position + 1 - first,
                            "kl": kl,
                            "token": self._text(b),
                            "reference_token": self._text(a),
                            "follows": self._text(tokens[position + 1]),
                        }
                    )
            places = sorted(places, key=lambda place: -place["kl"])[:MAX_DIFFERENCES]
        return {**sums, "kl_counts": counts, "differences": places}
