"""Measure the engine on W1-W4, and transformers' own batching beside it in the same run.

    python -m benchmarks.run --model model.gguf [--workload W3] [--dtype bfloat16] [--quantization int8]
        [--kv-cache-dtype int8]
        [--scale 0.25] [--peer] [--rounds 2]
    python -m benchmarks.run --model model.gguf --end-to-end 512 [--quantization int8] [--rounds 2]

Prints output tokens a second, without loading; writes benchmarks/results/<time>.json with hardware and versions.
Figures compare only within one run on one machine. ``--end-to-end`` measures `batchinfer run` on a Parquet file of as
many rows like W3's beside the bare engine: what the job around the engine costs.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.end_to_end import compare, overhead_percent
from benchmarks.machine import machine
from benchmarks.workloads import Item, make

NAMES = ("W1", "W2", "W3", "W4")


class Ours:
    """This engine."""

    name = "batchinfer"

    def __init__(self, model: str, dtype: str, quantization: str, kv_cache_dtype: str) -> None:
        from batchinfer import Engine

        self.engine = Engine(
            model, dtype=dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype, max_model_len=1024
        )

    def run(self, items: list[Item]) -> int:
        """Run all items; return the number of tokens generated."""
        from batchinfer.sampling_params import SamplingParams
        from batchinfer.types import Request

        requests = (
            Request(
                str(i),
                SamplingParams(max_tokens=item.max_tokens, ignore_eos=True),
                prompt_token_ids=item.prompt_token_ids,
            )
            for i, item in enumerate(items)
        )
        return sum(done.usage.completion_tokens for done in self.engine.generate(requests))


class Transformers:
    """transformers' generate on static batches of 32, sorted by output then prompt length, left-padded."""

    name = "transformers"

    def __init__(self, model: str, dtype: str) -> None:
        from batchinfer.engine.config import EngineConfig
        from batchinfer.models.load import load_model

        # transformers' own loader of GGUF files needs another package; the weights are the same to the bit
        self.model = load_model(EngineConfig(model, dtype=dtype), "sdpa").model.eval()

    def run(self, items: list[Item]) -> int:
        """Run all items; return the number of tokens asked for."""
        import torch

        order = sorted(items, key=lambda item: (item.max_tokens, len(item.prompt_token_ids)))
        for start in range(0, len(order), 32):
            batch = order[start : start + 32]
            width = max(len(item.prompt_token_ids) for item in batch)
            ids = torch.tensor([[0] * (width - len(item.prompt_token_ids)) + item.prompt_token_ids for item in batch])
            mask = torch.tensor(
                [[0] * (width - len(i.prompt_token_ids)) + [1] * len(i.prompt_token_ids) for i in batch]
            )
            count = max(item.max_tokens for item in batch)
            with torch.inference_mode():
                self.model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    pad_token_id=0,
                )
        return sum(item.max_tokens for item in items)


def measure(engine: Ours | Transformers, items: list[Item]) -> dict[str, float]:
    """Run once; return seconds, tokens and tokens a second."""
    start = time.perf_counter()
    tokens = engine.run(items)
    seconds = time.perf_counter() - start
    return {"seconds": round(seconds, 3), "tokens": tokens, "tokens_per_second": round(tokens / seconds, 1)}


def main() -> None:
    """Run what was asked for, rounds interleaved, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--workload", action="append", choices=NAMES)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peer", action="store_true", help="measure transformers too")
    parser.add_argument("--end-to-end", type=int, metavar="ROWS", help="a job of so many rows beside the bare engine")
    options = parser.parse_args()
    results = run_end_to_end(options) if options.end_to_end else run_workloads(options)
    report = {
        **machine(),
        "model": Path(options.model).name,
        "dtype": options.dtype,
        "quantization": options.quantization,
        "kv_cache_dtype": options.kv_cache_dtype,
        "scale": options.scale,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "results": results,
    }
    if options.end_to_end:
        report |= {"overhead_percent": overhead_percent(results)}
        print(f"the job took {report['overhead_percent']} % longer than the bare engine")
    folder = Path(__file__).with_name("results")
    folder.mkdir(exist_ok=True)
    path = folder / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(path)


def run_end_to_end(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The job and the bare engine in turn."""
    settings = {"model": options.model, "dtype": options.dtype, "quantization": options.quantization}
    return compare(settings, rows=options.end_to_end, rounds=options.rounds, say=lambda text: print(text, flush=True))


def run_workloads(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every engine on every workload, rounds interleaved."""
    engines: list[Ours | Transformers] = [
        Ours(options.model, options.dtype, options.quantization, options.kv_cache_dtype)
    ]
    if options.peer:
        engines.append(Transformers(options.model, options.dtype))
    results: list[dict[str, Any]] = []
    for turn in range(options.rounds):
        for name in options.workload or NAMES:
            for engine in engines:
                figures = measure(engine, make(name, options.scale, turn))
                results.append({"engine": engine.name, "workload": name, "round": turn, **figures})
                print(
                    f"{name}  {engine.name:<14}{figures['tokens_per_second']:>9.1f} tokens/s{figures['seconds']:>9.1f} s",
                    flush=True,
                )
    return results


if __name__ == "__main__":
    main()
