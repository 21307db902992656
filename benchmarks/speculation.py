"""What guessing gains on rows that copy from their prompt: the same small batch with and without, in turn.

    python -m benchmarks.speculation --model MODEL [--dtype bfloat16] [--rows 1 2 4] [--new 96] [--rounds 2]

Each row is a text that is to be repeated word for word, so that most of an answer stands in its prompt. Prints tokens a
second either way, the share of guesses that were right, and whether the answers are equal; then the same for rows of
random tokens, which have nothing to guess from.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.machine import machine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.engine.core import EngineCore

TEXT = (
    "The harbour master writes down each ship that comes in: its name, its flag, the port it left and the cargo it "
    "carries. On the third of May the Adelaide came from Lisbon with cork and wine; on the fourth the Borea came from "
    "Riga with timber; on the fifth nothing came, for there was fog on the whole coast, and the pilots stayed at home. "
)


@dataclass(frozen=True, slots=True)
class Run:
    """One batch, one way."""

    tokens: list[tuple[int, ...]]
    seconds: float
    guessed: int
    accepted: int
    steps: int


def copying(tokenizer: Any, number: int) -> list[list[int]]:
    """Rows that ask for their own text again."""
    prompts = []
    for index in range(number):
        text = TEXT.replace("third", f"{index + 3}th")
        ask = f"Repeat this text word for word.\n\n{text}"
        answer = tokenizer.encode(text, add_special_tokens=False)[:12]
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": ask}], tokenize=False, add_generation_prompt=True
        )
        prompts.append([*tokenizer.encode(chat, add_special_tokens=False), *answer])
    return prompts


def random_rows(number: int) -> list[list[int]]:
    """Rows in which nothing comes back."""
    rng = random.Random("speculation")
    return [[rng.randint(10, 48_000) for _ in range(150)] for _ in range(number)]


def run(engine: EngineCore, prompts: Sequence[list[int]], new: int) -> Run:
    """Run a batch to its end."""
    from batchinfer.sampling_params import SamplingParams
    from batchinfer.types import Request

    params = SamplingParams(max_tokens=new, ignore_eos=True)
    before = engine.stats()
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(str(index), params, prompt_token_ids=prompt))
    done = {}
    while engine.has_unfinished():
        done.update({completion.request_id: completion.token_ids for completion in engine.step()})
    seconds = time.perf_counter() - started
    stats = engine.stats().since(before)
    tokens = [done[str(index)] for index in range(len(prompts))]
    return Run(tokens, seconds, stats.guessed_tokens, stats.accepted_tokens, stats.steps)


def main() -> None:
    """Run what was asked for."""
    from batchinfer.engine.attention import ATTENTION_NAME, register_attention
    from batchinfer.engine.calibration import CalibrationStore, describe
    from batchinfer.engine.config import EngineConfig
    from batchinfer.engine.engine import build_engine
    from batchinfer.engine.speculation import Speculator, StepCosts
    from batchinfer.models.load import load_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cache-dir", help="measure the calibration into another folder")
    options = parser.parse_args()
    print(machine())
    register_attention()
    config = EngineConfig(
        options.model, dtype=options.dtype, quantization=options.quantization, max_model_len=1024,
        enable_prefix_caching=False, num_kv_blocks=64 * max(options.rows), cache_dir=options.cache_dir,
    )  # fmt: skip
    loaded = load_model(config, ATTENTION_NAME, may_defer=True)
    tokenizer = loaded.tokenizer
    engine = build_engine(loaded, config, owns_model=True, calibrate=True)
    ((_, measured), *_) = CalibrationStore(loaded.cache_dir).all()
    print(describe(measured, config.max_num_seqs_on(loaded.device.type)))
    ways = {
        "off": lambda: None,
        "auto": lambda: Speculator(costs=StepCosts(measured.decode)),
        "always": lambda: Speculator(always=True),
    }
    for kind in ("copying", "random"):
        for number in options.rows:
            prompts = copying(tokenizer, number) if kind == "copying" else random_rows(number)
            runs: dict[str, list[Run]] = {way: [] for way in ways}
            for _ in range(options.rounds):
                for way, make in ways.items():
                    engine._scheduler.speculator = make()  # noqa: SLF001 -- one model in memory, guessing its only change
                    runs[way].append(run(engine, prompts, options.new))
            best = {way: min(found, key=lambda one: one.seconds) for way, found in runs.items()}
            for way, one in best.items():
                rate = number * options.new / one.seconds
                right = f"{one.accepted / one.guessed:.0%} of {one.guessed} right" if one.guessed else "no guesses"
                same = "same tokens" if one.tokens == best["off"].tokens else "OTHER TOKENS"
                print(f"{kind:8} {number:3} rows {way:6} {rate:7.1f} tokens/s {one.steps:5} steps, {right}, {same}")


if __name__ == "__main__":
    main()
