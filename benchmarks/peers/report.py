"""From runs to medians and ratios, and the tables of a results file."""

from __future__ import annotations

from statistics import median
from typing import Any

WORKLOADS = ("W1", "W2", "W3", "W4")
DISTURBED = "\\*"

Report = dict[str, Any]


def speeds(report: Report, engine: str, workload: str, chunk: int | None = None) -> list[float]:
    """Output tokens a second of the runs that succeeded, of one chunk or of all."""
    return [
        run["tokens_per_second"]
        for run in report["runs"]
        if run["engine"] == engine
        and run["workload"] == workload
        and "error" not in run
        and chunk in {None, run["chunk"]}
    ]


def ratio(report: Report, ours: str, peer: str, workload: str) -> float | None:
    """How many times as fast as the peer, from runs of the same chunk only; the median where several have both."""
    ratios = []
    for chunk in range(len(report["chunks"])):
        mine, its = speeds(report, ours, workload, chunk), speeds(report, peer, workload, chunk)
        if mine and its:
            ratios.append(median(mine) / median(its))
    return median(ratios) if ratios else None


def rivals(report: Report, ours: str) -> list[str]:
    """The peers that one of our precisions is to be compared with: for bfloat16 only those that compute in it."""
    own = report["engines"][ours]
    return [
        name
        for name, about in report["engines"].items()
        if not about["is_ours"] and about["is_equal"] and (own["precision"] != "bf16" or about["precision"] == "bf16")
    ]


def best(report: Report, ours: str, workload: str) -> tuple[float, str] | None:
    """The least of the ratios, and the peer it is against."""
    found = [
        (value, peer) for peer in rivals(report, ours) if (value := ratio(report, ours, peer, workload)) is not None
    ]
    return min(found) if found else None


def markdown(report: Report) -> str:
    """Both tables, and under them what they were measured on."""
    return "\n".join([*_speed_table(report), "", *_ratio_table(report), "", *_conditions(report), ""])


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _measured(report: Report) -> list[str]:
    return [name for name in WORKLOADS if any(run["workload"] == name for run in report["runs"])]


def _speed_table(report: Report) -> list[str]:
    workloads = _measured(report)
    lines = [
        _row("output tokens/s, median", "precision", *workloads, "peak RSS, MB", "loading, s"),
        "|" + "---|" * (len(workloads) + 4),
    ]
    for name, about in report["engines"].items():
        cells = [_speed(report, name, workload) for workload in workloads]
        label = name if about["is_equal"] else f"{name} (lower quality)"
        if about.get("error") and not any(run["engine"] == name for run in report["runs"]):
            lines.append(
                _row(label, about["precision"], about["error"].replace("|", "/"), *[""] * (len(workloads) + 1))
            )
            continue
        memory = f"{about['peak_rss_mb']:,}" if about.get("peak_rss_mb") else ""
        lines.append(_row(label, about["precision"], *cells, memory, about.get("load_seconds", "")))
    return lines


def _speed(report: Report, engine: str, workload: str) -> str:
    runs = [run for run in report["runs"] if run["engine"] == engine and run["workload"] == workload]
    if found := speeds(report, engine, workload):
        mark = DISTURBED if any(run.get("is_disturbed") for run in runs) else ""
        return f"{median(found):,.1f}{mark}"
    return str(runs[0]["error"]).replace("|", "/") if runs else ""


def _ratio_table(report: Report) -> list[str]:
    workloads = _measured(report)
    lines = [_row("times as fast as", *workloads), "|" + "---|" * (len(workloads) + 1)]
    for ours, about in report["engines"].items():
        if not about["is_ours"] or not any(speeds(report, ours, workload) for workload in workloads):
            continue
        for peer in rivals(report, ours):
            ratios = [ratio(report, ours, peer, workload) for workload in workloads]
            if any(value is not None for value in ratios):
                lines.append(_row(f"{ours} / {peer}", *["" if value is None else f"{value:.2f}" for value in ratios]))
        found = [best(report, ours, workload) for workload in workloads]
        if any(found):
            lines.append(_row(f"**{ours} / best peer**", *[f"**{one[0]:.2f}**" if one else "" for one in found]))
    return lines


def _conditions(report: Report) -> list[str]:
    versions = {
        f"{package} {number}"
        for about in report["engines"].values()
        for package, number in about.get("versions", {}).items()
    }
    others = [run["others_percent"] for run in report["runs"] if "error" not in run]
    rounds = ", ".join(str(chunk["rounds"]) for chunk in report["chunks"])
    lines = [
        (
            f"{report['cpu']}, {report['cores']} cores, {report['threads']} threads, {report['memory_mb']:,} MB of memory; "
            f"{report['model']}; Python {report['python']}; {', '.join(sorted(versions))}. Measured {report['at']}; "
            f"{rounds} interleaved rounds a chunk, {report['scale']:.0%} of each workload's rows. Ratios are from one "
            "chunk's runs."
        ),
    ]
    if others:
        lines.append(
            f"Other processes took {median(others):.1f} % of the machine in the median run and {max(others):.1f} % in the "
            f"worst; {DISTURBED} marks figures with a run above 5 %."
        )
    if agreement := report.get("agreement"):
        told = "; ".join(
            f"{name} {min(lengths)}-{max(lengths)}" for name, lengths in agreement["agreed_tokens"].items()
        )
        lines.append(
            f"Tokens equal to transformers' in float32 before the first other one, of {agreement['max_tokens']}, least and "
            f"most of {agreement['prompts']} prompts of text: {told}."
        )
    return lines
