"""Two nights of a nightly data set in one minute: tonight everything is computed, tomorrow only what is new.

Run: python examples/nightly.py --model model.gguf

It works in a folder of its own (--folder to choose one), with a database of its own, and needs no server. Tonight's
input has twelve reviews; tomorrow's has ten of them, one that was edited, and two new ones.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

PRODUCTS = ["kettle", "lamp", "chair", "radio", "mug", "desk", "rug", "clock", "fan", "bag", "pen", "bowl"]
TONIGHT, TOMORROW = "2026-03-28", "2026-03-29"  # the second is a night of 23 hours in Berlin
COMMAND = [sys.executable, "-c", "from batchinfer.cli.main import main; main()"]


def write_inputs(folder: Path) -> None:
    """One folder a night, as a pipeline would leave them."""
    reviews = [f"The {product} works as it should." for product in PRODUCTS]
    changed = [*reviews[:10], "The pen broke on the second day.", "The new sofa is soft.", "The new shelf is crooked."]
    for day, texts in ((TONIGHT, reviews), (TOMORROW, changed)):
        where = folder / "in" / f"date={day}"
        where.mkdir(parents=True)
        pq.write_table(pa.table({"review": texts}), where / "reviews.parquet")


def batchinfer(*args: str) -> str:
    """Run a command and return what it prints."""
    print("$ batchinfer", *(f"'{arg}'" if " " in arg else arg for arg in args))
    done = subprocess.run([*COMMAND, *args], stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603 -- our own program
    return done.stdout


def run_night(day: str) -> str:
    """Trigger the schedule for a night, wait for its job, and return the job's id."""
    batchinfer("schedule", "trigger", "nightly", "--date", f"{day}T02:30")
    while True:
        listed = subprocess.check_output([*COMMAND, "schedule", "runs", "nightly", "--limit", "1", "--json"])  # noqa: S603 -- our own program
        page = json.loads(listed)
        run = page["data"][0]
        if run["state"] in {"failed", "skipped"}:
            sys.exit(f"the run has no job: {run['reason']}")
        if run["state"] == "done":
            return str(run["job_id"])
        time.sleep(0.5)


def main() -> None:
    """Two nights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a GGUF file, a safetensors folder or a hub id")
    parser.add_argument("--folder", type=Path, help="where to work (default: a new folder under /tmp)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="nightly-"))
    os.environ["BATCHINFER_HOME"] = str(folder / "home")
    write_inputs(folder)
    print(
        batchinfer(
            "schedule", "add", "nightly", "--cron", "30 2 * * *", "--tz", "Europe/Berlin",
            "--input", f"{folder}/in/date={{{{ logical_date }}}}/*.parquet",
            "--output", f"{folder}/out/date={{{{ logical_date }}}}",
            "--model", str(Path(options.model).absolute()) if Path(options.model).exists() else options.model,
            "--template", "Is this review good or bad? Answer in one word. {{ review }}",
            "--max-tokens", "8", "--missing-input", "wait:2h", "--reuse-results",
        )
    )  # fmt: skip
    worker = subprocess.Popen([*COMMAND, "worker"], stderr=subprocess.DEVNULL)  # noqa: S603 -- our own program
    try:
        for day in (TONIGHT, TOMORROW):
            job = run_night(day)
            print(batchinfer("status", job))
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait()
    print(batchinfer("schedule", "runs", "nightly"))
    print(f"results: {folder}/out")


if __name__ == "__main__":
    main()
