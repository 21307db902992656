"""What rows that ask for more cost a batch: all rows plain, and a tenth of them with features, in turn.

    python -m benchmarks.row_features --model MODEL [--dtype bfloat16] [--quantization int8] [--rows 64] [--new 64]

Every row generates the same number of tokens. The tenth that differs takes turns through log-probabilities, penalties,
drawing with top-k, top-p and min-p, a bias with stop strings, a regular expression and a JSON Schema. The same rows run
alone, too, plain and with their features: the difference is what they cost by themselves, and a batch should not lose
more. Prints the medians of some rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

from benchmarks.machine import machine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.engine.core import EngineCore
    from batchinfer.types import Request

PROMPT_TOKENS = 32
FEATURES: list[dict[str, Any]] = [
    {"logprobs": 5},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "seed": 1},
    {"logit_bias": {30: -100, 253: 2.5}, "stop": ["never written", "nor this"], "min_tokens": 4},
    {"guided_regex": "[a-z ,]{2000,}"},
    {"json_schema": {"type": "array", "items": {"type": "string", "minLength": 40}, "minItems": 100}},
]
"""In turn; none of them ends before its tokens are used up."""


def prompts(number: int) -> list[list[int]]:
    """Rows of token ids, no two with a common beginning."""
    rng = random.Random("features")
    return [[rng.randint(10, 48_000) for _ in range(PROMPT_TOKENS)] for _ in range(number)]


def requests(rows: Sequence[list[int]], new: int, every: int) -> list[Request]:
    """A request a row; each ``every``-th has features, none if that is 0."""
    from batchinfer.sampling_params import SamplingParams
    from batchinfer.types import Request

    made = []
    for number, row in enumerate(rows):
        has_features = every > 0 and number % every == 0
        features = FEATURES[number // every % len(FEATURES)] if has_features else {}
        params = SamplingParams(max_tokens=new, ignore_eos=not features, **features)
        made.append(Request(str(number), params, prompt_token_ids=row))
    return made


def run(engine: EngineCore, batch: Sequence[Request]) -> tuple[float, int]:
    """Seconds and generated tokens of a batch."""
    before = engine.stats()
    started = time.perf_counter()
    for request in batch:
        engine.add_request(request)
    while engine.has_unfinished():
        engine.step()
    return time.perf_counter() - started, engine.stats().since(before).completion_tokens


def main() -> None:
    """Run what was asked for."""
    from batchinfer.engine.attention import ATTENTION_NAME, register_attention
    from batchinfer.engine.config import EngineConfig
    from batchinfer.engine.engine import build_engine
    from batchinfer.models.load import load_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(machine())
    register_attention()
    config = EngineConfig(
        options.model, dtype=options.dtype, quantization=options.quantization, max_model_len=512,
        enable_prefix_caching=False, max_num_seqs=options.rows,
    )  # fmt: skip
    engine = build_engine(load_model(config, ATTENTION_NAME, may_defer=True), config, owns_model=True)
    rows = prompts(options.rows)
    tenth = rows[::10]
    batches = {
        "plain": requests(rows, options.new, 0),
        "a tenth with features": requests(rows, options.new, 10),
        "the tenth alone, plain": requests(tenth, options.new, 0),
        "the tenth alone, with features": requests(tenth, options.new, 1),
    }
    run(engine, batches["the tenth alone, with features"])  # compiles what is compiled once
    seconds: dict[str, list[float]] = {name: [] for name in batches}
    for _ in range(options.rounds):
        for name, batch in batches.items():
            took, tokens = run(engine, batch)
            if tokens != len(batch) * options.new:
                raise SystemExit(f"{name}: {tokens} tokens instead of {len(batch) * options.new}")
            seconds[name].append(took)
    middle = {name: statistics.median(found) for name, found in seconds.items()}
    for name, took in middle.items():
        print(f"{name:31} {took:7.3f} s  {len(batches[name]) * options.new / took:8.1f} tokens/s")
    plain, mixed, alone, featured = middle.values()
    print(
        f"the batch loses {mixed - plain:+.3f} s ({mixed / plain - 1:+.1%}); alone these rows cost {featured - alone:+.3f} s"
    )


if __name__ == "__main__":
    main()
