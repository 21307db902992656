"""This engine; settings are :class:`~batchinfer.engine.config.EngineConfig`'s fields."""

from __future__ import annotations

import gc
from typing import Any

from benchmarks.peers.adapters.serve import Adapter, serve


class Ours(Adapter):
    """The engine in this process, as a worker's child process runs it."""

    packages = ("batchinfer", "torch", "transformers")

    def __init__(self, settings: dict[str, Any]) -> None:
        from batchinfer import Engine

        self._engine = Engine(**settings)
        gc.freeze()  # as the child process does

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        """One request a prompt, all of them known ahead."""
        from batchinfer.sampling_params import SamplingParams
        from batchinfer.types import Request

        requests = (
            Request(str(i), SamplingParams(max_tokens=count, ignore_eos=True), prompt_token_ids=ids)
            for i, (ids, count) in enumerate(zip(prompts, max_tokens, strict=True))
        )
        answers = {int(done.request_id): list(done.token_ids or ()) for done in self._engine.generate(requests)}
        return [answers[i] for i in range(len(prompts))]


if __name__ == "__main__":
    serve(Ours)
