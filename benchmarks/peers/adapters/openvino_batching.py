"""OpenVINO GenAI's continuous batching: INT8 weights, bfloat16 compute, 8-bit KV cache, prefix caching."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.adapters.serve import Adapter, serve


class ContinuousBatching(Adapter):
    """Settings: ``model`` folder, ``threads``, ``max_num_seqs``, ``max_num_batched_tokens``, ``cache_gb``."""

    packages = ("openvino-genai", "openvino")

    def __init__(self, settings: dict[str, Any]) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = settings["cache_gb"]
        scheduler.max_num_seqs = settings["max_num_seqs"]
        scheduler.max_num_batched_tokens = settings["max_num_batched_tokens"]
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            settings["model"], scheduler, "CPU", {"INFERENCE_NUM_THREADS": settings["threads"]}
        )

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        """All prompts in one call."""
        import numpy as np
        import openvino
        import openvino_genai

        configs = []
        for count in max_tokens:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = count
            config.ignore_eos = True
            config.do_sample = False
            configs.append(config)
        inputs = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        return [list(result.m_generation_ids[0]) for result in self._pipeline.generate(inputs, configs)]


if __name__ == "__main__":
    serve(ContinuousBatching)
