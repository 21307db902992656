"""What a job costs over the bare engine: ``batchinfer run`` on a Parquet file beside the engine on the same prompts.

The job's time is from its submission to its end as its record has them, reading, planning, checkpoints, merging and
manifest included, less the loading of the model, which the record has as a cost of its own.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from batchinfer.engine.others_load import OthersLoad
from benchmarks.machine import num_cores
from benchmarks.peers.catalogue import ADAPTERS, Contender, threads
from benchmarks.peers.harness import WARM_UP
from benchmarks.peers.process import PeerProcess
from benchmarks.workloads import Item, make

if TYPE_CHECKING:
    from collections.abc import Callable

BARE, WHOLE = "bare engine", "batchinfer run"
USD_PER_HOUR = 3600
"""Makes a dollar a second, so that the record's costs are seconds."""
TIMEOUT_S = 1800.0
PROGRAM = (sys.executable, "-c", "from batchinfer.cli.main import main; main()")


def texts(model: str, rows: int, turn: int) -> tuple[list[str], list[Item]]:
    """Prompts like W3's, as text and as the token ids that the text has."""
    from batchinfer.engine.config import EngineConfig
    from batchinfer.models.load import load_model

    tokenizer = load_model(EngineConfig(model), "sdpa").tokenizer
    items = [item for part in range(-(-rows // 64)) for item in make("W3", turn=1000 * turn + part)][:rows]
    written = [tokenizer.decode(item.prompt_token_ids) for item in items]
    return written, [
        Item(list(tokenizer.encode(text)), item.max_tokens) for text, item in zip(written, items, strict=True)
    ]


def job_seconds(printed: dict[str, Any]) -> float:
    """From submission to the end, less loading; of what ``run --json`` printed at a dollar a second."""
    job = printed["job"]
    whole = datetime.fromisoformat(job["finished_at"]) - datetime.fromisoformat(job["created_at"])
    return whole.total_seconds() - float(printed["cost"]["overhead_usd"].get("load", 0))


def compare(settings: dict[str, str], *, rows: int, rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Both in turn, round after round; ``settings`` are the engine's model, dtype and quantization.

    Raises:
        PeerError: the bare engine failed.
        RuntimeError: the job failed, or did other work than the bare engine.
    """
    bare = Contender(
        BARE, "", (sys.executable, "-m", f"{ADAPTERS}.ours"), settings,
        {**threads(num_cores()), "GOMP_SPINCOUNT": "2000"}, is_ours=True,
    )  # fmt: skip
    results: list[dict[str, Any]] = []
    with PeerProcess(bare, timeout_s=TIMEOUT_S, load_timeout_s=TIMEOUT_S) as engine:
        engine.load()
        engine.run(WARM_UP)
        for turn in range(rounds):
            prompts, items = texts(settings["model"], rows, turn)
            ran = engine.run(items)
            num_prompt_tokens = sum(len(item.prompt_token_ids) for item in items)
            pair = [
                _entry(BARE, ran.seconds, ran.num_tokens, num_prompt_tokens, ran.others_percent),
                run_job(settings, prompts, items[0].max_tokens),
            ]
            if len({(entry["tokens"], entry["prompt_tokens"]) for entry in pair}) > 1:
                raise RuntimeError(f"the job did other work than the bare engine: {pair}")
            for entry in pair:
                results.append({"round": turn, **entry})
                say(f"{entry['engine']:<16}{entry['tokens_per_second']:>9.1f} tokens/s{entry['seconds']:>9.1f} s")
    return results


def overhead_percent(results: list[dict[str, Any]]) -> float:
    """How much longer the job took than the bare engine, median seconds against median seconds."""
    bare, whole = (float(median(one["seconds"] for one in results if one["engine"] == name)) for name in (BARE, WHOLE))
    return round(100 * (whole / bare - 1), 1)


def run_job(settings: dict[str, str], prompts: list[str], max_tokens: int) -> dict[str, Any]:
    """Run the prompts as a job in a home of its own; return a result entry.

    Raises:
        RuntimeError: the job failed; the message has what it said.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "prompts.parquet"
        pq.write_table(pa.table({"prompt": pa.array(prompts, pa.large_string())}), source)
        command = [
            *PROGRAM, "run", str(source), "--model", str(Path(settings["model"]).resolve()), "--output", f"{folder}/results",
            "--max-tokens", str(max_tokens), "--ignore-eos", "--temperature", "0",
            "--dtype", settings["dtype"], "--quantization", settings["quantization"], "--no-verify", "--json",
        ]  # fmt: skip
        environment = {
            **os.environ,
            "BATCHINFER_HOME": f"{folder}/home",
            "BATCHINFER_USD_PER_HOUR": str(USD_PER_HOUR),
            **threads(num_cores()),
        }
        with OthersLoad(own=_waited_for) as others:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
    if done.returncode:
        raise RuntimeError(f"batchinfer run ended with {done.returncode}: {done.stderr[-1000:]}")
    printed = json.loads(done.stdout)
    usage = printed["job"]["usage"]
    return _entry(WHOLE, job_seconds(printed), usage["completion_tokens"], usage["prompt_tokens"], others.percent)


def _waited_for() -> float:
    """CPU seconds of the programs that this one has started and that have ended, with all that they started."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def _entry(engine: str, seconds: float, tokens: int, prompt_tokens: int, others: float) -> dict[str, Any]:
    return {
        "engine": engine, "workload": "W3, rows of Parquet", "seconds": round(seconds, 3), "tokens": tokens,
        "prompt_tokens": prompt_tokens, "tokens_per_second": round(tokens / seconds, 1), "others_percent": others,
    }  # fmt: skip
