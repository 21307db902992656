"""llama.cpp through llama-cpp-python's low-level batch calls: continuous batching over 32 sequences.

The prefix that all prompts share is computed once and copied; longest answers go first, as they do with its server.
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.adapters.serve import Adapter, serve

LEAST_PREFIX = 16


@dataclass(slots=True)
class Row:
    """A prompt on its way; ``done`` counts its prompt tokens that were given to the model."""

    index: int
    prompt: list[int]
    count: int
    done: int = 0
    tokens: list[int] = field(default_factory=list)


class LlamaCpp(Adapter):
    """Settings: ``model`` file, ``threads``, ``max_num_seqs``, ``max_num_batched_tokens``, ``max_model_len``."""

    packages = ("llama-cpp-python",)

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._slots = settings["max_num_seqs"]
        self._budget = settings["max_num_batched_tokens"]
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            settings["model"].encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise OSError(f"llama.cpp cannot load {settings['model']}")
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = self._slots + 1  # the last one holds the shared prefix
        params.n_ctx = params.n_seq_max * settings["max_model_len"]
        params.n_batch = params.n_ubatch = self._budget
        params.n_threads = params.n_threads_batch = settings["threads"]
        params.flash_attn_type = 1  # on
        params.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise OSError("llama.cpp cannot make a context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(self._budget, 0, 1)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def reset(self) -> None:
        """Empty the KV cache."""
        self._api.llama_memory_clear(self._memory, True)

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        """Decode tokens first, then as much of the waiting prompts as the budget allows."""
        rows = [Row(i, ids, count) for i, (ids, count) in enumerate(zip(prompts, max_tokens, strict=True))]
        shared = self._share(prompts)
        waiting = deque(sorted(rows, key=lambda row: -row.count))
        running: dict[int, Row] = {}
        free = list(range(self._slots))
        while waiting or running:
            while waiting and free:
                slot, row = free.pop(), waiting.popleft()
                if shared:
                    self._api.llama_memory_seq_cp(self._memory, self._slots, slot, -1, -1)
                    row.done = shared
                running[slot] = row
            for slot in self._step(running):
                self._api.llama_memory_seq_rm(self._memory, slot, -1, -1)
                del running[slot]
                free.append(slot)
        return [row.tokens for row in rows]

    def _share(self, prompts: list[list[int]]) -> int:
        """Compute the tokens that all prompts begin with; return how many."""
        first, last = min(prompts), max(prompts)
        common = next(
            (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
        )
        common = min(common, min(map(len, prompts)) - 1)  # a row computes at least one token of its own
        if len(prompts) < 2 or common < LEAST_PREFIX:
            return 0
        for start in range(0, common, self._budget):
            self._batch.n_tokens = 0
            for position in range(start, min(common, start + self._budget)):
                self._add(first[position], position, self._slots, wants_logits=False)
            self._decode()
        return common

    def _step(self, running: dict[int, Row]) -> list[int]:
        """Run one batch; return the slots that are finished."""
        self._batch.n_tokens = 0
        sampling: list[tuple[int, int]] = []
        for slot, row in running.items():
            if row.tokens:
                sampling.append(
                    (slot, self._add(row.tokens[-1], len(row.prompt) + len(row.tokens) - 1, slot, wants_logits=True))
                )
        for slot, row in running.items():
            chunk = row.prompt[row.done : row.done + self._budget - self._batch.n_tokens]
            for token in chunk:
                is_last = row.done == len(row.prompt) - 1
                at = self._add(token, row.done, slot, wants_logits=is_last)
                row.done += 1
                if is_last:
                    sampling.append((slot, at))
        self._decode()
        for slot, at in sampling:
            running[slot].tokens.append(self._argmax(at))
        return [slot for slot, _ in sampling if len(running[slot].tokens) == running[slot].count]

    def _add(self, token: int, position: int, slot: int, *, wants_logits: bool) -> int:
        at: int = self._batch.n_tokens
        self._batch.token[at] = token
        self._batch.pos[at] = position
        self._batch.n_seq_id[at] = 1
        self._batch.seq_id[at][0] = slot
        self._batch.logits[at] = wants_logits
        self._batch.n_tokens = at + 1
        return at

    def _decode(self) -> None:
        if code := self._api.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode returned {code}")

    def _argmax(self, at: int) -> int:
        import numpy as np

        logits = self._api.llama_get_logits_ith(self._context, at)
        pointer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(pointer, shape=(self._vocabulary,)).argmax())


if __name__ == "__main__":
    serve(LlamaCpp)
