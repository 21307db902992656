"""CTranslate2: INT8 weights and activations, static batches by length."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.adapters.serve import Adapter, serve

BATCH_SIZE = 32


class CTranslate2(Adapter):
    """Settings: ``model`` folder as the converter wrote it, ``threads``, ``compute_type``."""

    packages = ("ctranslate2",)

    def __init__(self, settings: dict[str, Any]) -> None:
        import json
        from pathlib import Path

        import ctranslate2

        folder = Path(settings["model"])
        self._generator = ctranslate2.Generator(
            str(folder), device="cpu", compute_type=settings["compute_type"], intra_threads=settings["threads"]
        )
        # it takes and gives words of its vocabulary
        self._words: list[str] = json.loads((folder / "vocabulary.json").read_text())

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        """Static batches of equal answer lengths as far as they can be had, cut to what each row asked for."""
        order = sorted(range(len(prompts)), key=lambda i: (max_tokens[i], len(prompts[i])))
        answers: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(order), BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            count = max(max_tokens[i] for i in rows)
            results = self._generator.generate_batch(
                [[self._words[token] for token in prompts[i]] for i in rows],
                max_length=count,
                end_token=[],
                include_prompt_in_result=False,
                sampling_topk=1,
            )
            for i, result in zip(rows, results, strict=True):
                answers[i] = list(result.sequences_ids[0])[: max_tokens[i]]
        return answers


if __name__ == "__main__":
    serve(CTranslate2)
