"""The tables, the goals, and whether anything is wrong."""

from __future__ import annotations

from typing import Any

ENGINE_GOAL = 0.75
"""Share of the sequential roofline."""
PEER_GOAL = 3.0
"""Times transformers' continuous batching."""
HEADER = (
    "kernel | verdict | error/tolerance | us | least us | waits for | share | goal | torch | torch us | torch/ours",
    "---|---|---:|---:|---:|---|---:|---|---|---:|---:",
)

Result = dict[str, Any]


def _number(value: float | None, form: str, factor: float = 1.0) -> str:
    return "" if value is None else format(value * factor, form)


def line(result: Result) -> str:
    """A case's row of the table."""
    verdict = result["status"] if result["status"] in {"ok", "skipped", "unsupported"} else result["status"].upper()
    share, goal, seconds, peer = (result.get(name) for name in ("share", "goal", "seconds", "peer_seconds"))
    met = "" if goal is None else f"{goal:.0%}" + ("" if share is None else " met" if share >= goal else " MISSED")
    cells = [
        result["name"],
        verdict + (f": {result['detail']}" if result.get("detail") else ""),
        _number(result.get("error"), ".2g"),
        _number(seconds, ",.1f", 1e6),
        _number(result.get("least_seconds"), ",.1f", 1e6),
        result.get("waits_for", ""),
        _number(share, ".0%"),
        met,
        result.get("peer", "") + (f" ({result['peer_error']})" if result.get("peer_error") else ""),
        _number(peer, ",.1f", 1e6),
        _number(None if peer is None or seconds is None else peer / seconds, ".2f"),
    ]
    return " | ".join(cell.replace("|", "/") for cell in cells)


def engine_line(result: Result) -> str:
    """An engine's line."""
    head = f"{result['name']}: "
    if result["status"] != "ok":
        return head + f"{result['status'].upper()}: {result.get('detail', '')}"
    text = f"{result['tokens_per_second']:,.0f} output tokens/s in {result['seconds']:.1f} s"
    if result.get("is_cut"):
        text += " (cut short: the share is of what ran)"
    if result.get("share") is not None:
        met = "met" if result["share"] >= ENGINE_GOAL else "MISSED"
        text += f"; {result['share']:.0%} of the sequential roofline's {result['roofline']:,.0f} (goal {ENGINE_GOAL:.0%}: {met})"
    if result.get("times_peer") is not None:
        met = "met" if result["times_peer"] >= PEER_GOAL else "MISSED"
        text += f"; {result['times_peer']:.2f} times transformers' continuous batching (goal {PEER_GOAL:g}: {met})"
    return head + text


def exit_code(cases: list[Result], engines: list[Result]) -> int:
    """1 if a kernel is wrong or failed, or our engine did; what was skipped or is not for this device is no failure."""
    bad = {"wrong", "failed"}
    return int(any(r["status"] in bad for r in cases) or any(r["status"] in bad and not r["is_peer"] for r in engines))


def summary(cases: list[Result], engines: list[Result]) -> list[str]:
    """How many of each verdict, and the names of all that are not ok."""
    found: list[str] = []
    for status in ("ok", "wrong", "failed", "unsupported", "skipped"):
        names = [r["name"] for r in (*cases, *engines) if r["status"] == status]
        if names:
            found.append(f"{status}: {len(names)}" + ("" if status == "ok" else f" ({'; '.join(names)})"))
    missed = [r["name"] for r in cases if r.get("goal") and r.get("share") is not None and r["share"] < r["goal"]]
    return found + ([f"below its goal: {len(missed)} ({'; '.join(missed)})"] if missed else [])
