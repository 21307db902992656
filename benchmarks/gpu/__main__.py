"""One command for a GPU machine: every kernel against its oracle and its roofline, then the engine.

    python -m benchmarks.gpu [--only paged_attention] [--quick] [--skip-engine] [--budget-s 570]

Run it in a checkout, with torch and triton; the engine needs transformers, pydantic, gguf and psutil, too. Checks every op
of ``torch.ops.batchinfer`` in every type against its oracle on the device; times it with a cold L2 cache against the least
time of the data sheet and against torch's own; then runs the engine on Llama-shaped models of 1B and 8B with random weights
beside transformers' continuous batching. A kernel that faults or hangs costs its own case. Prints tables; writes
benchmarks/results/gpu-<time>.json. The exit code is 1 if a kernel is wrong or failed, or the engine did. What the time did
not suffice for is named. Without a GPU all runs on tiny sizes, the kernels in
Triton's interpreter (it needs numpy) and untimed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.children import ROOT, emit, launch, left
from benchmarks.gpu.report import HEADER, engine_line, exit_code, line, summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Launch = Callable[[str, Sequence[str], float, float], Iterator[dict[str, Any]]]

BUDGET_S = 570.0
SILENCE_S = 120.0
"""A case compiles, computes its oracle and is timed in less; an engine speaks at each stage."""
ENGINE_SHARE = 0.45
"""Of the budget, kept back for the engine."""
MODELS = ("1B", "8B")
LEAST_ENGINE_S = 25.0
"""Loading a model of random weights and a few steps."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="cases whose name contains this")
    parser.add_argument(
        "--quick", action="store_true", help="a case for each kernel and type, shorter timing, the 1B model"
    )
    parser.add_argument("--skip-engine", action="store_true")
    parser.add_argument("--skip-kernels", action="store_true")
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, help="seconds for all; the rest is skipped and named"
    )
    parser.add_argument("--output", type=Path, help="the results file; by default benchmarks/results/gpu-<time>.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--messages", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, start: Launch = launch) -> int:
    """Run what was asked for; return the exit code. ``start`` runs a part and gives its messages."""
    options = parse(argv)
    if options.child:
        return _child(options)
    deadline = time.monotonic() + options.budget_s
    about: dict[str, Any] = {}
    cases: list[dict[str, Any]] = []
    engines: list[dict[str, Any]] = []
    if not options.skip_kernels:
        kept = 0.0 if options.skip_engine else ENGINE_SHARE * options.budget_s
        about, cases = _kernels(options, deadline - kept, start)
    if not options.skip_engine:
        engines = _engines(options, deadline, start)
    print("\n".join(["", *summary(cases, engines)]))
    report = {**about, "budget_s": options.budget_s, "quick": options.quick, "kernels": cases, "engines": engines}
    path = options.output or Path(__file__).parents[1] / "results" / f"gpu-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(path)
    if not options.skip_kernels and not cases:
        print("no kernel was checked", file=sys.stderr)
        return 1
    return exit_code(cases, engines)


def _arguments(options: argparse.Namespace) -> list[str]:
    return [*(f"--only={part}" for part in options.only), *(["--quick"] if options.quick else [])]


def _kernels(
    options: argparse.Namespace, deadline: float, start: Launch
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All cases; a fresh process goes on behind a case that ended its own."""
    about: dict[str, Any] = {}
    cases: list[dict[str, Any]] = []
    first = 0
    while True:
        arguments = [*_arguments(options), f"--first={first}", f"--budget-s={max(0.0, left(deadline)):.0f}"]
        running, how, before = None, "", first
        silence = max(20.0, min(SILENCE_S, left(deadline)))
        with closing(start("kernels", arguments, silence, float("inf"))) as messages:  # type: ignore[type-var]
            for message in messages:
                kind = message.pop("type")
                if kind == "machine" and not about:
                    about = message["about"]
                    cases = [
                        {"op": op, "name": name, "goal": goal, "status": ""} for op, name, goal in message["cases"]
                    ]
                    print("\n".join([_headline(about), "", *HEADER]), flush=True)
                elif kind == "begin":
                    running = message["index"]
                elif kind == "case":
                    running, first = None, message["index"] + 1
                    _note(cases[message.pop("index")], message)
                elif kind == "end":
                    how = message["how"]
        if running is not None:
            _note(cases[running], {"status": "failed", "detail": f"its process {how or 'ended'}"})
            first = running + 1
        elif first == before and first < len(cases):
            _note(cases[first], {"status": "failed", "detail": f"its process {how or 'ended'} before it began"})
            first += 1
        if first >= len(cases):
            return about, cases


def _note(case: dict[str, Any], result: dict[str, Any]) -> None:
    case |= result
    print(line(case), flush=True)


def _headline(about: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    copied = (
        f"copies at {about['copy_bytes_per_second'] / 1e12:.2f} TB/s" if about["copy_bytes_per_second"] else "not timed"
    )
    sheet = f"data sheet of {about['data_sheet']}" if about["data_sheet"] else "no data sheet: no shares"
    driver = f"driver {about['driver_version']}, " if "driver_version" in about else ""
    return f"{about['device']}: {driver}{versions}; {copied}; {sheet}"


def _engines(options: argparse.Namespace, deadline: float, start: Launch) -> list[dict[str, Any]]:
    """Each model through our engine, then through transformers, with equal shares of the time that is left."""
    models = MODELS[:1] if options.quick else MODELS
    parts = [(engine, model) for model in models for engine in ("batchinfer", "transformers")]
    results: list[dict[str, Any]] = []
    for number, (engine, model) in enumerate(parts):
        share = left(deadline) / (len(parts) - number)
        name = f"{engine} {model}"
        found = {"status": "skipped", "detail": "the time is up"}
        if share >= LEAST_ENGINE_S:
            found = _engine(f"{engine}-{model}", share, start)
        result = {"name": name, "is_peer": engine == "transformers", **found}
        if result["is_peer"] and result["status"] == "ok" and results[-1]["status"] == "ok":
            results[-1]["times_peer"] = results[-1]["tokens_per_second"] / result["tokens_per_second"]
            print(engine_line(results[-1]), flush=True)
        print(engine_line(result), flush=True)
        results.append(result)
    return results


def _engine(part: str, seconds: float, start: Launch) -> dict[str, Any]:
    found: dict[str, Any] = {}
    how = ""
    with closing(start(part, [f"--budget-s={seconds:.0f}"], seconds, seconds)) as messages:  # type: ignore[type-var]
        for message in messages:
            kind = message.pop("type")
            if kind == "engine":
                found = message
            elif kind == "end":
                how = message["how"]
    return found or {"status": "failed", "detail": f"its process {how or 'said nothing'}"}


def _child(options: argparse.Namespace) -> int:
    """A part in this process, its messages to the parent."""
    deadline = time.monotonic() + options.budget_s
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]  # a checkout that is not installed
    if options.child == "kernels":
        _interpret_without_gpu()
        from benchmarks.gpu.kernels import run_kernels

        emit(options.messages, run_kernels(options, options.first, deadline))
    else:
        from benchmarks.gpu.engine import run_engine

        engine, _, model = options.child.partition("-")
        emit(options.messages, run_engine(engine, model, deadline))
    return 0


def _interpret_without_gpu() -> None:
    """Without a GPU kernels run in Triton's interpreter, with what the tests' shim makes right in it."""
    import torch

    if not torch.cuda.is_available():
        from tests.triton import interpreter

        interpreter.install()


if __name__ == "__main__":
    sys.exit(main())
