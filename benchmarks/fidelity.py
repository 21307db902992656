"""How near each precision comes to transformers' own float32 model, on text that every Python brings along.

    python -m benchmarks.fidelity --model model.gguf [--texts 24] [--tokens 256] [--recipes]

Teacher-forced: mean and 99th percentile of the Kullback-Leibler divergence of next-token distributions, how often the
likeliest token is the same, and perplexity. ``--recipes`` adds INT8 recipes that are not offered. Writes
benchmarks/results/fidelity-<time>.json with hardware and versions.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import textwrap
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.machine import machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODULES = (
    "argparse", "asyncio", "calendar", "collections", "concurrent.futures", "configparser", "contextlib", "csv",
    "datetime", "decimal", "difflib", "doctest", "email.message", "fractions", "functools", "gettext", "heapq", "imaplib",
    "inspect", "ipaddress", "itertools", "json", "locale", "logging", "mailbox", "optparse", "pdb", "pickle", "pickletools",
    "platform", "profile", "random", "sched", "shlex", "shutil", "smtplib", "socketserver", "statistics", "string",
    "subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit", "trace", "unittest", "urllib.request",
    "uuid", "warnings", "weakref", "zipfile",
)  # fmt: skip
OFFERED: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "float32, INT8 KV": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, INT8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8-weight-only": {"quantization": "int8-weight-only"},
    "int8": {"quantization": "int8"},
    "int8, INT8 KV": {"quantization": "int8", "kv_cache_dtype": "int8"},
}
SCHEMES = (
    (None, 0, None), (0.5, 0, None), (None, 64, None), (0.3, 64, None), (0.5, 64, None), (0.7, 64, None), (0.5, 512, None),
    (None, 0, 0.05), (None, 512, 0.05), (0.5, 64, 0.05), (0.5, 512, 0.01), (0.5, 512, 0.1), (0.7, 512, 0.05),
)  # fmt: skip
"""Smoothing, rotation and damping of W8A8 recipes that are not offered."""


def texts() -> Iterator[str]:
    """Natural text: chapters of the Python reference, and documentation of modules, in turn."""
    topics = importlib.import_module("pydoc_data.topics").topics
    chapters = [topics[name] for name in sorted(topics) if len(topics[name]) > 1500]
    pages = []
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:  # not in every Python version
            continue
        members = [module, *(m for _, m in inspect.getmembers(module) if getattr(m, "__module__", "") == name)]
        documentation = "\n\n".join(
            dict.fromkeys(inspect.cleandoc(m.__doc__) for m in members if isinstance(m.__doc__, str))
        )
        if len(documentation) > 1500:
            pages.append(documentation)
    for pair in zip(chapters, pages, strict=False):
        yield from map(textwrap.dedent, pair)


class Comparison:
    """Sums over tokens."""

    def __init__(self) -> None:
        self.divergences: list[torch.Tensor] = []
        self.same = self.count = 0
        self.loss = 0.0

    def add(self, reference: torch.Tensor, logits: torch.Tensor, token_ids: list[int]) -> None:
        """Take the logits of one text; ``reference`` are log-probabilities."""
        ours = torch.log_softmax(logits, dim=-1)
        self.divergences.append((reference.exp() * (reference - ours)).sum(dim=-1))
        self.same += int((reference.argmax(dim=-1) == ours.argmax(dim=-1)).sum())
        self.count += len(token_ids)
        self.loss -= float(ours[:-1].gather(1, torch.tensor(token_ids[1:])[:, None]).mean())

    def figures(self) -> dict[str, float]:
        """Rounded for a table."""
        all_of_it = torch.cat(self.divergences)
        return {
            "kl_mean": round(float(all_of_it.mean()), 5),
            "kl_p99": round(float(all_of_it.quantile(0.99)), 4),
            "top1_percent": round(100 * self.same / self.count, 2),
            "perplexity": round(math.exp(self.loss / len(self.divergences)), 3),
        }


def candidates(model: str, tokens: int, recipes: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and maker of a scorer; made one after another, so that one is in memory at a time."""
    from batchinfer.engine import forward_pass
    from batchinfer.engine.attention import ATTENTION_NAME, register_attention
    from batchinfer.engine.config import EngineConfig
    from batchinfer.engine.quantization import linears
    from batchinfer.engine.scorer import Scorer
    from batchinfer.models.fused.int8 import Scheme
    from batchinfer.models.load import load_model

    def make(**settings: str) -> Any:
        register_attention()
        config = EngineConfig(model=model, **settings)
        # made anew: what an earlier run kept is not what is measured
        return Scorer(replace(load_model(config, ATTENTION_NAME), cache_dir=None), config, tokens)

    def make_recipe(scheme: Scheme) -> Any:
        forward_pass.linears = partial(linears, scheme=scheme)  # type: ignore[assignment]
        try:
            return make(quantization="int8")
        finally:
            forward_pass.linears = linears

    for name, settings in OFFERED.items():
        yield name, lambda settings=settings: make(**settings)
    for fields in SCHEMES if recipes else ():
        scheme = Scheme(*fields)
        damping = "" if scheme.damping is None else f" (damping {scheme.damping:g})"
        yield scheme.name + damping, lambda scheme=scheme: make_recipe(scheme)


def reference(model: str, count: int, tokens: int) -> list[tuple[list[int], torch.Tensor]]:
    """Token ids of each text, and the log-probabilities of transformers' float32 model."""
    from batchinfer.engine.config import EngineConfig
    from batchinfer.models.load import load_model

    loaded = load_model(EngineConfig(model=model, dtype="float32"), "sdpa")
    found = []
    for text in texts():
        token_ids = loaded.tokenizer.encode(text)[:tokens]
        if len(token_ids) == tokens:
            with torch.inference_mode():
                found.append((token_ids, torch.log_softmax(loaded.model(torch.tensor([token_ids])).logits[0], dim=-1)))
        if len(found) == count:
            break
    return found


def main() -> None:
    """Compare and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--recipes", action="store_true", help="also INT8 recipes that lost")
    parser.add_argument("--only", nargs="*", help="names of the precisions to measure, instead of all")
    options = parser.parse_args()
    truth = reference(options.model, options.texts, options.tokens)
    itself = Comparison()
    for token_ids, expected in truth:
        itself.add(expected, expected, token_ids)
    results = {"reference": itself.figures()}
    print(f"{len(truth)} texts of {options.tokens} tokens; reference perplexity {results['reference']['perplexity']}")
    for name, make in candidates(options.model, options.tokens, options.recipes):
        if options.only and name not in options.only:
            continue
        scorer, comparison = make(), Comparison()
        for token_ids, expected in truth:
            comparison.add(expected, scorer.logits(token_ids), token_ids)
        results[name] = comparison.figures()
        print(f"{name:34}{json.dumps(results[name])}", flush=True)
    report = {**machine(), "model": Path(options.model).name, "texts": len(truth), "tokens": options.tokens}
    folder = Path(__file__).with_name("results")
    folder.mkdir(exist_ok=True)
    path = folder / f"fidelity-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    path.write_text(json.dumps({**report, "results": results}, indent=2) + "\n")
    print(path)


if __name__ == "__main__":
    main()
