"""The results file: made anew, or grown by another chunk of runs."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.peers.report import Report, markdown

FOLDER = Path(__file__).resolve().parents[1] / "results"
MUST_AGREE = ("cpu", "cores", "model", "threads", "scale")


class MismatchError(Exception):
    """A chunk cannot join a results file that was measured otherwise."""


def new_report(model: str, threads: int, scale: float) -> Report:
    """An empty report of this machine."""
    return {
        **machine(), "model": Path(model).name, "threads": threads, "scale": scale,
        "chunks": [], "engines": {}, "runs": [],
    }  # fmt: skip


def open_report(path: Path | None, fresh: Report) -> Report:
    """The report to grow: what lies at ``path``, or ``fresh``.

    Raises:
        MismatchError: the file was measured on another machine or with other settings.
    """
    if path is None or not path.exists():
        return fresh
    report: Report = json.loads(path.read_text())
    for name in MUST_AGREE:
        if report.get(name) != fresh[name]:
            raise MismatchError(
                f"{path} has {name} {report.get(name)!r} and this run has {fresh[name]!r}: write to another file"
            )
    return report


def add_chunk(report: Report, rounds: int, engines: dict[str, dict[str, Any]], runs: list[dict[str, Any]]) -> None:
    """Add the runs of one start of the harness; figures of one chunk are compared with one another only."""
    number = len(report["chunks"])
    report["chunks"].append({"at": datetime.now(UTC).isoformat(timespec="seconds"), "rounds": rounds})
    report["runs"] += [{"chunk": number, **run} for run in runs]
    for name, about in engines.items():
        before = report["engines"].get(name, {})
        peak = max(before.get("peak_rss_mb", 0), about.get("peak_rss_mb", 0))
        # an engine that was not there now may have been measured before
        report["engines"][name] = before if about.get("error") and "versions" in before else about
        if peak:
            report["engines"][name]["peak_rss_mb"] = peak


def write_report(report: Report, path: Path | None) -> Path:
    """Write the JSON file and the Markdown table beside it; return the JSON file's path."""
    if path is None:
        path = FOLDER / f"peers-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(path)
    path.with_suffix(".md").write_text(markdown(report))
    return path
