"""A model small enough to be understood, whose answers prove that the engine showed it the right context."""

import random
from dataclasses import dataclass, field

import torch

from batchinfer.engine.block_pool import BlockPool
from batchinfer.engine.core import EngineCore
from batchinfer.engine.head_output import HeadOutput
from batchinfer.engine.ingest import Ingest
from batchinfer.engine.sampler import Sampler
from batchinfer.engine.scheduler import Scheduler
from batchinfer.errors import RowFailure
from batchinfer.types import ErrorCode, RowError

VOCAB = 40
EOS = 0


def next_token(context):
    """The model: an arbitrary but fixed function of the whole context."""
    return random.Random(str(list(context))).randrange(VOCAB)


def answer(prompt, max_tokens, eos=(EOS,)):
    """What a row must generate, computed without an engine: token after token, alone."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


@dataclass
class FakeRunner:
    """Keeps token ids where a real model keeps keys and values; answers from what it finds there.

    ``batches`` has for each step the (request id, first position, number of tokens) of its parts.
    """

    num_blocks: int
    block_size: int
    slots: list = field(default_factory=list)
    batches: list = field(default_factory=list)
    before_step: object = None
    model: object = next_token

    def __post_init__(self):
        self.slots = [None] * (self.num_blocks * self.block_size)

    def slot(self, sequence, position):
        return sequence.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def execute(self, scheduled, kept=(), scored=(), hidden=()):
        self.batches.append([(part.sequence.request_id, part.start, part.num_new_tokens) for part in scheduled])
        if self.before_step is not None:
            self.before_step(scheduled)
        for part in scheduled:
            for position in range(part.start, part.start + part.num_new_tokens):
                tokens = [
                    *part.sequence.token_ids[: part.start + part.num_new_tokens - len(part.guesses)],
                    *part.guesses,
                ]
                self.slots[self.slot(part.sequence, position)] = tokens[position]
        rows = []
        for part in scheduled:
            end = part.start + part.num_new_tokens
            context = [self.slots[self.slot(part.sequence, p)] for p in range(end)]
            own = end - len(part.guesses)
            expected = [*part.sequence.token_ids[:own], *part.guesses]
            assert context == expected, "the cache does not hold this sequence's context"
            if part.samples:
                rows += [one_hot(self.model(context[:length])) for length in range(own, end + 1)]
        places = [
            part.sequence.token_ids[: p + 1]
            for part in scheduled
            for p in range(part.start, part.start + part.num_new_tokens)
        ]
        kept = [*kept, *range(len(rows), len(rows) + len(scored))]
        rows += [one_hot(self.model(places[place])) for place in scored]
        return HeadOutput.of_logits(torch.stack(rows) if rows else torch.empty(0, VOCAB), kept)


def one_hot(token):
    """Logits with one favourite."""
    return torch.nn.functional.one_hot(torch.tensor(token), VOCAB).float()


class FakeRenderer:
    vocab_size = VOCAB

    def encode(self, request):
        if not request.prompt_token_ids:
            raise RowFailure(RowError(ErrorCode.EMPTY_PROMPT, "empty"))
        return list(request.prompt_token_ids)


class FakeStream:
    def __init__(self):
        self.text = ""

    def append(self, token_id):
        self.text += f"<{token_id}>"
        return f"<{token_id}>"


class FakeDetokenizer:
    def start(self):
        return FakeStream()

    def token_text(self, token_id):
        return f"<{token_id}>"


@dataclass
class Clock:
    """Nanoseconds that pass at each look, unevenly, so that shares must be rounded."""

    now: int = 0

    def __call__(self):
        self.now += 997
        return self.now


def make_engine(
    num_blocks=32,
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=16,
    max_model_len=1000,
    caching=True,
    estimate=None,
    speculator=None,
    model=next_token,
):
    """An engine core over the fake model; its runner and scheduler are attributes."""
    runner = FakeRunner(num_blocks, block_size, model=model)
    scheduler = Scheduler(
        BlockPool(num_blocks, block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=caching,
        estimate_remaining=estimate,
        speculator=speculator,
    )
    ingest = Ingest(
        FakeRenderer(),
        FakeDetokenizer(),
        {EOS},
        max_model_len=max_model_len,
        max_kv_tokens=num_blocks * block_size,
    )
    return EngineCore(runner, scheduler, ingest, Sampler({EOS}), clock=Clock())


def drain(engine, most_steps=10_000, before=lambda _: None):
    """Step until nothing is left, calling ``before`` with each step's number; the bound turns a spin into a failure."""
    completions = []
    for step in range(most_steps):
        if not engine.has_unfinished():
            return completions
        before(step)
        completions += engine.step()
        engine.check_integrity()
    raise AssertionError("the engine spins")
