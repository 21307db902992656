"""Endless kinds of requests for the simulator, each a stream made from a seed.

A request says how many of its first tokens an earlier one has as well, so that the ideal reuse, that of a trie over all
requests, is known without keeping them.
"""

from __future__ import annotations

import random
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from workloads import make

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VOCAB = 48_000
BLOCK = 16
"""Tokens a block, below which sharing is not counted."""


class Job(NamedTuple):
    """One request and what will come of it."""

    prompt: list[int]
    shared: int
    """Leading tokens that an earlier request has as well."""
    max_tokens: int
    num_output: int
    is_exact: bool = True
    """Whether it goes on to ``max_tokens`` whatever comes; else its length is for the scheduler to guess."""


def _tokens(rng: random.Random, number: int) -> list[int]:
    return rng.choices(range(10, VOCAB), k=number)


def _length(rng: random.Random, mean: float, most: int) -> int:
    """Lengths of answers: many short, few long, none above ``most``."""
    return max(1, min(most, round(rng.lognormvariate(0, 0.6) * mean)))


def real(name: str, num_requests: int) -> Iterator[Job]:
    """W1-W4 of ``workloads.py``, turn after turn with other tokens."""
    left = num_requests
    for turn in count():
        items = make(name, turn=turn)[:left]
        for index, item in enumerate(items):
            shared = 512 if name == "W1" and index else 0
            yield Job(item.prompt_token_ids, shared, item.max_tokens, item.max_tokens)
        left -= len(items)
        if not left:
            return


def template(num_requests: int) -> Iterator[Job]:
    """One instruction before each row, answers of a guessed length."""
    rng = random.Random("template")
    head = _tokens(rng, 300)
    for index in range(num_requests):
        tail = _tokens(rng, rng.randint(20, 120))
        yield Job(head + tail, len(head) if index else 0, 256, _length(rng, 24, 256), is_exact=False)


def few_shot(num_requests: int) -> Iterator[Job]:
    """Sixty tasks with examples of 200-1,200 tokens, in any order, some far more often than others."""
    rng = random.Random("few-shot")
    heads = [_tokens(rng, rng.randint(200, 1200)) for _ in range(60)]
    weights = [1 / (rank + 1) for rank in range(len(heads))]
    seen = set()
    for _ in range(num_requests):
        which = rng.choices(range(len(heads)), weights)[0]
        shared = len(heads[which]) if which in seen else 0
        seen.add(which)
        yield Job(heads[which] + _tokens(rng, rng.randint(8, 60)), shared, 64, _length(rng, 10, 64), is_exact=False)


def turns(num_requests: int) -> Iterator[Job]:
    """Trees of conversations: one system prompt, talks of three turns, two ways to ask the last; mixed up nearby."""
    rng = random.Random("turns")
    system = _tokens(rng, 150)
    left, is_first = num_requests, True
    while left:
        batch = []
        for _ in range(64):
            talk = list(system)
            for _ in range(3):
                talk += _tokens(rng, rng.randint(20, 90))
                batch.append(list(talk))
            batch += [talk + _tokens(rng, 30) for _ in range(2)]
        rng.shuffle(batch)
        known = set() if is_first else set(_block_names(system))
        is_first = False
        for prompt in batch[:left]:
            left -= 1
            names = _block_names(prompt)
            num_known = next((i for i, name in enumerate(names) if name not in known), len(names))
            known.update(names)
            yield Job(prompt, num_known * BLOCK, 40, rng.randint(5, 40))


def _block_names(tokens: list[int]) -> list[int]:
    """A name for each full block and all before it."""
    names = [0]
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        names.append(hash((names[-1], *tokens[end - BLOCK : end])))
    return names[1:]


def ragged(num_requests: int) -> Iterator[Job]:
    """Everyday mixture without any sharing: prompts of 4-400 tokens, answers of a guessed length."""
    rng = random.Random("ragged")
    for _ in range(num_requests):
        prompt = _tokens(rng, round(4 * 100 ** rng.random()))
        yield Job(prompt, 0, 512, _length(rng, 30, 512), is_exact=False)


def adversarial(num_requests: int) -> Iterator[Job]:
    """Prompts that are each other's prefixes, of whole blocks, and now and then a long answer."""
    rng = random.Random("adversarial")
    chain = _tokens(rng, 640)
    longest = 0
    for index in range(num_requests):
        length = 16 * rng.randint(1, 40) + rng.choice((-1, 0, 1))
        shared = min(length, longest)
        longest = max(longest, min(length, 640))
        prompt = chain[:length] + [5] * max(0, length - 640)
        output = 400 if index % 997 == 0 else rng.randint(1, 12)
        yield Job(prompt, shared, output, output)


def mixed(num_requests: int) -> Iterator[Job]:
    """All kinds at once, as several jobs in flight feed one engine."""
    rng = random.Random("mixed")
    makers = [template, few_shot, turns, ragged, adversarial]
    share = -(-num_requests // len(makers))
    streams = [make_stream(share) for make_stream in makers]
    left = num_requests
    while left:
        which = rng.randrange(len(streams))
        job = next(streams[which], None)
        if job is None:
            del streams[which]
            continue
        left -= 1
        yield job


MAKERS: dict[str, Callable[[int], Iterator[Job]]] = {
    "W1": lambda n: real("W1", n),
    "W2": lambda n: real("W2", n),
    "W3": lambda n: real("W3", n),
    "W4": lambda n: real("W4", n),
    "template": template,
    "few-shot": few_shot,
    "turns": turns,
    "ragged": ragged,
    "adversarial": adversarial,
    "mixed": mixed,
}
