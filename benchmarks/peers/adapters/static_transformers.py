"""transformers' ``generate`` on static batches of 32, sorted by output then prompt length, left-padded, sdpa."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.adapters.serve import Adapter, serve

BATCH_SIZE = 32


class StaticBatches(Adapter):
    """Whoever asks for less than his batch's longest answer waits for it; only what was asked for counts."""

    packages = ("transformers", "torch")

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(settings["threads"])
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=getattr(torch, settings["dtype"]), attn_implementation="sdpa"
        )
        # a minimum of new tokens would suppress the end token and so change greedy choices: no end token instead
        self._model.generation_config.eos_token_id = None

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        """Batch by batch."""
        order = sorted(range(len(prompts)), key=lambda i: (max_tokens[i], len(prompts[i])))
        answers: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(order), BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            new = self._batch([prompts[i] for i in rows], max(max_tokens[i] for i in rows))
            for i, tokens in zip(rows, new, strict=True):
                answers[i] = tokens[: max_tokens[i]]
        return answers

    def _batch(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        import torch

        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = self._model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
        return [row[width:] for row in out.tolist()]


if __name__ == "__main__":
    serve(StaticBatches)
