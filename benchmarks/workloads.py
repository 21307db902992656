"""The four workloads, made from a seed: shapes that batch users meet, in token ids so that no tokenizer is timed.

W1: 128 prompts that share 512 tokens and have 64 of their own, 64 new tokens (an instruction before each row).
W2: 128 ragged prompts of 16-512 tokens, 8-256 new tokens, many short and few long (everyday mixture).
W3: 64 prompts of 32 tokens, 256 new tokens (writing).
W4: 256 prompts of 256 tokens, 4 new tokens (classification).

All greedy, end of sequence ignored, so the work is exact.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

FIRST_TOKEN, LAST_TOKEN = 10, 48_999


@dataclass(frozen=True, slots=True)
class Item:
    """One request: prompt token ids and the number of tokens to generate."""

    prompt_token_ids: list[int]
    max_tokens: int


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


def _ragged(rng: random.Random, least: int, most: int) -> int:
    """A length whose logarithm is uniform: as many between 16 and 32 as between 256 and 512."""
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))


def make(name: str, scale: float = 1.0, turn: int = 0) -> list[Item]:
    """Make a workload; ``scale`` below 1 takes that share of its rows, for a quick look.

    Each ``turn`` has other tokens, so that no cache of the turn before helps.
    """
    rng = random.Random(f"batchinfer-{name}-{turn}")
    if name == "W1":
        prefix = _tokens(rng, 512)
        items = [Item(prefix + _tokens(rng, 64), 64) for _ in range(128)]
    elif name == "W2":
        items = [Item(_tokens(rng, _ragged(rng, 16, 512)), _ragged(rng, 8, 256)) for _ in range(128)]
    elif name == "W3":
        items = [Item(_tokens(rng, 32), 256) for _ in range(64)]
    elif name == "W4":
        items = [Item(_tokens(rng, 256), 4) for _ in range(256)]
    else:
        raise ValueError(f"unknown workload {name!r}; there are W1, W2, W3 and W4")
    return items[: max(1, round(len(items) * scale))]
