"""Measure this engine and other engines on W1-W4 in one run, in turn, rounds interleaved.

    benchmarks/install_peers.sh                 # once: each peer into an environment of its own under .peers
    python -m benchmarks.peers [--peers vllm,openvino] [--workloads W1,W3] [--rounds 2] [--scale 0.25]
    python -m benchmarks.peers --append FILE    # another chunk into the same results file

Each engine runs in a process of its own, stays loaded, and works only when it is its turn. Loading and a warm-up are
not timed; decoding is greedy, the end of sequence ignored and the number of tokens checked. Writes a results file
(JSON, and a Markdown table beside it) to benchmarks/results with hardware, versions, settings, and the share of the
machine that other processes took during each run. ``--agreement`` compares greedy tokens instead of speed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.agreement import agreement, reference_contender, text_items
from benchmarks.peers.catalogue import ROOT, THREADS, Contender, ours, peers
from benchmarks.peers.harness import Harness, Plan
from benchmarks.peers.process import PeerError
from benchmarks.peers.report import WORKLOADS, markdown
from benchmarks.peers.results import MismatchError, add_chunk, new_report, open_report, write_report

MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(MODEL), help="the GGUF file that install_peers.sh was given")
    parser.add_argument("--folder", type=Path, default=ROOT / ".peers", help="where the peers are installed")
    parser.add_argument(
        "--ours", default="", metavar="A,B", help="only our precisions whose name has one of these in it"
    )
    parser.add_argument("--peers", metavar="A,B", help="only peers whose name has one of these in it; 'none' for none")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), metavar="W1,W2")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="share of each workload's rows")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--peer-timeout", type=float, default=240.0, metavar="S", help="seconds a run may take")
    parser.add_argument("--load-timeout", type=float, default=300.0, metavar="S", help="seconds loading may take")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VALUE", help="a setting of our engine")
    parser.add_argument("--agreement", type=int, metavar="N", help="compare greedy tokens on N prompts of text")
    parser.add_argument("--append", type=Path, metavar="FILE", help="results file to add to (made where missing)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    options.workloads = tuple(options.workloads.split(","))
    if unknown := sorted(set(options.workloads) - set(WORKLOADS)):
        parser.error(f"no workload {unknown[0]}; there are {', '.join(WORKLOADS)}")
    return options


def choose(contenders: list[Contender], names: str | None) -> list[Contender]:
    """Those whose name has one of the comma-separated words in it, in any case of letters.

    Raises:
        SystemExit: a word is in no name.
    """
    if names == "none":
        return []
    words = [word for word in (names or "").lower().split(",") if word]
    for word in words:
        if not any(word in one.name.lower() for one in contenders):
            raise SystemExit(f"nothing is called {word!r}; there are {', '.join(one.name for one in contenders)}")
    return [one for one in contenders if not words or any(word in one.name.lower() for word in words)]


def engine_settings(pairs: list[str]) -> dict[str, Any]:
    """``max_num_seqs=128`` as JSON values, or as text where that is none."""
    settings: dict[str, Any] = {}
    for name, _, value in (pair.partition("=") for pair in pairs):
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; 1 if nothing could be measured."""
    options = parse(arguments)
    contenders = [
        *choose(ours(options.model, options.threads, engine_settings(options.engine)), options.ours),
        *choose(peers(options.folder.resolve(), options.threads), options.peers),
    ]
    plan = Plan(options.workloads, options.rounds, options.scale, options.peer_timeout, options.load_timeout)
    try:
        report = open_report(options.append, new_report(options.model, options.threads, options.scale))
        if options.agreement:
            items = text_items(options.model, options.agreement)
            reference = reference_contender(options.folder.resolve(), options.threads)
            report["agreement"] = agreement(contenders, reference, items, plan, _say)
        else:
            harness = Harness(contenders, plan, _say)
            harness.run()
            add_chunk(report, options.rounds, harness.describe, harness.runs)
    except (MismatchError, PeerError) as error:
        _say(str(error))
        return 1
    path = write_report(report, options.append)
    print(json.dumps(report, indent=1) if options.json else markdown(report))
    _say(str(path))
    return 0 if options.agreement or any("error" not in run for run in report["runs"]) else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
