"""Whether the contenders answer alike: greedy tokens on natural text against transformers in float32."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from benchmarks.peers.catalogue import ADAPTERS, Contender, threads
from benchmarks.peers.process import PeerError, PeerProcess
from benchmarks.workloads import Item

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.peers.harness import Plan

PROMPT_TOKENS, NEW_TOKENS = 96, 48


def agreed(tokens: list[int], reference: list[int]) -> int:
    """How many tokens are equal before the first that is not."""
    for i, (one, other) in enumerate(zip(tokens, reference, strict=True)):
        if one != other:
            return i
    return len(reference)


def text_items(model: str, count: int) -> list[Item]:
    """Prompts of natural text, cut to a length."""
    from batchinfer.engine.config import EngineConfig
    from batchinfer.models.load import load_model
    from benchmarks.fidelity import texts

    tokenizer = load_model(EngineConfig(model), "sdpa").tokenizer
    items = []
    for text in texts():
        ids = list(tokenizer.encode(text))[:PROMPT_TOKENS]
        if len(ids) == PROMPT_TOKENS:
            items.append(Item(ids, NEW_TOKENS))
        if len(items) == count:
            break
    return items


def reference_contender(folder: Path, count: int) -> Contender:
    """Unpatched transformers in float32, in this interpreter, on the weights that all peers were made from."""
    return Contender(
        name="transformers float32",
        precision="fp32",
        command=(sys.executable, "-m", f"{ADAPTERS}.static_transformers"),
        settings={"model": str(folder / "models" / "hf"), "dtype": "float32", "threads": count},
        environment=threads(count),
        is_ours=True,
    )


def agreement(
    contenders: list[Contender], reference: Contender, items: list[Item], plan: Plan, say: Callable[[str], None]
) -> dict[str, Any]:
    """Agreed tokens of every contender on every prompt.

    Raises:
        PeerError: the reference itself does not run.
    """
    expected = _answers(reference, items, plan)
    found: dict[str, list[int]] = {}
    for contender in contenders:
        if contender.missing:
            continue
        try:
            answers = _answers(contender, items, plan)
        except PeerError as error:
            say(f"{contender.name}: {error}")
            continue
        found[contender.name] = [agreed(mine, right) for mine, right in zip(answers, expected, strict=True)]
        say(f"{contender.name}: {found[contender.name]} of {NEW_TOKENS} tokens agree")
    return {"prompts": len(items), "max_tokens": NEW_TOKENS, "agreed_tokens": found}


def _answers(contender: Contender, items: list[Item], plan: Plan) -> list[list[int]]:
    with PeerProcess(contender, timeout_s=plan.timeout_s, load_timeout_s=plan.load_timeout_s) as process:
        process.load()
        return process.run(items).token_ids
