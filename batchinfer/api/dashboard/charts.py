"""Charts as inline SVG: geometry in attributes, colours in the style sheet, so that no inline style is needed.

Each chart is one image to a screen reader, with a sentence that says what it shows; the pages give the same figures as
tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from batchinfer.api.dashboard.words import count, duration, percent, words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    from batchinfer.jobs.history import Span

WIDTH, HEIGHT = 640.0, 170.0
LEFT, RIGHT, TOP, BOTTOM = 6.0, 6.0, 22.0, 20.0
WIDE = 1120.0
"""Width of a timeline, which has the page for itself."""
MAX_LANES = 24
"""Lanes of a timeline; shards of a larger job share them."""
LANE = 16.0
SPLIT_HEIGHT = 14.0


def bars(values: Sequence[float], labels: Sequence[str], *, title: str, show: Callable[[float], str] = count) -> Markup:
    """A bar for each value, from the left; ``labels`` say in words what each stands for."""
    top = max(values, default=0) or 1.0
    step = (WIDTH - LEFT - RIGHT) / max(1, len(values))
    base, tall = HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP
    parts = [_line(LEFT, base, WIDTH - RIGHT, base, "axis"), _text(LEFT, 13, show(max(values, default=0)), "start")]
    for index, value in enumerate(values):
        height = tall * value / top
        label = f"{labels[index]}: {show(value)}"
        parts.append(_bar(LEFT + index * step, base - height, (max(step - 1.5, 0.5), height), "bar", label))
    if labels:
        parts += [_text(LEFT, HEIGHT - 5, labels[0], "start"), _text(WIDTH - RIGHT, HEIGHT - 5, labels[-1], "end")]
    best = f"{title}, {labels[0]} to {labels[-1]}, at most {show(max(values))}" if values else f"{title}: nothing yet"
    return _svg(WIDTH, HEIGHT, best, parts)


def area(values: Sequence[float], labels: Sequence[str], *, title: str, show: Callable[[float], str] = count) -> Markup:
    """A line over filled ground: for what only grows."""
    top = max(values, default=0) or 1.0
    base, tall = HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP
    step = (WIDTH - LEFT - RIGHT) / max(1, len(values) - 1)
    points = [(LEFT + index * step, base - tall * value / top) for index, value in enumerate(values)]
    parts = [_line(LEFT, base, WIDTH - RIGHT, base, "axis"), _text(LEFT, 13, show(max(values, default=0)), "start")]
    if points:
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        ground = f"{LEFT:.1f},{base:.1f} {line} {points[-1][0]:.1f},{base:.1f}"
        parts.append(Markup('<polygon class="ground" points="{}"/>').format(ground))
        parts.append(Markup('<polyline class="line" points="{}"/>').format(line))
        parts += [_text(LEFT, HEIGHT - 5, labels[0], "start"), _text(WIDTH - RIGHT, HEIGHT - 5, labels[-1], "end")]
    sentence = f"{title}, {show(values[-1])} in the end" if values else f"{title}: nothing yet"
    return _svg(WIDTH, HEIGHT, sentence, parts)


def timeline(spans: Sequence[Span], *, now: datetime, title: str) -> Markup:
    """A lane a shard (or group of shards) and a bar an attempt, coloured by how it ended."""
    if not spans:
        return _svg(WIDE, 40, f"{title}: nothing has run yet", [_text(LEFT, 24, "nothing has run yet", "start")])
    start = min(span.started_at for span in spans)
    end = max(span.ended_at or now for span in spans)
    length = max((end - start).total_seconds(), 1e-3)
    shards = sorted({span.shard_index for span in spans})
    per_lane = -(-len(shards) // MAX_LANES)
    lanes = {shard: rank // per_lane for rank, shard in enumerate(shards)}
    num_lanes = max(lanes.values()) + 1
    left = 72.0
    scale = (WIDE - left - RIGHT) / length
    height = num_lanes * LANE + BOTTOM + 4
    parts = []
    for lane in range(num_lanes):
        first, last = shards[lane * per_lane], shards[min((lane + 1) * per_lane, len(shards)) - 1]
        name = f"shard {first}" if first == last else f"{first}-{last}"
        parts.append(_text(LEFT, lane * LANE + 12, name, "start"))
        parts.append(_line(left, (lane + 1) * LANE, WIDE - RIGHT, (lane + 1) * LANE, "grid"))
    for span in spans:
        x = left + scale * (span.started_at - start).total_seconds()
        wide = scale * ((span.ended_at or now) - span.started_at).total_seconds()
        label = (
            f"shard {span.shard_index}, attempt {span.attempt_id} on {span.worker_id}: {words(span.state)}, "
            f"{count(span.done_rows)} rows in {duration(((span.ended_at or now) - span.started_at).total_seconds())}"
        )
        parts.append(_bar(x, lanes[span.shard_index] * LANE + 3, (max(wide, 2), LANE - 6), f"span {span.state}", label))
    parts += [_text(left, height - 5, "0 s", "start"), _text(WIDE - RIGHT, height - 5, duration(length), "end")]
    sentence = f"{title}: {count(len(spans))} attempts at {count(len(shards))} shards in {duration(length)}"
    return _svg(WIDE, height, sentence, parts)


def split(shares: Mapping[str, float], *, title: str) -> Markup:
    """One bar cut by shares between 0 and 1; names and figures are the legend's business."""
    parts, x = [], 0.0
    for number, (name, share) in enumerate(shares.items()):
        wide = WIDTH * max(0.0, min(share, 1.0))
        if wide > 0:
            parts.append(_bar(x, 0, (wide, SPLIT_HEIGHT), f"part part-{number % 8}", f"{words(name)} {percent(share)}"))
        x += wide
    figures = ", ".join(f"{words(name)} {percent(share)}" for name, share in shares.items() if share > 0)
    return _svg(WIDTH, SPLIT_HEIGHT, f"{title}: {figures or 'nothing yet'}", parts, fill=True)


def _svg(width: float, height: float, sentence: str, parts: Sequence[Markup], *, fill: bool = False) -> Markup:
    ratio = Markup(' preserveAspectRatio="none"') if fill else Markup("")
    return Markup('<svg class="chart{}" viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}"{}>{}</svg>').format(
        " fill" if fill else "", width, height, sentence, ratio, Markup("").join(parts)
    )


def _bar(x: float, y: float, size: tuple[float, float], kind: str, label: str) -> Markup:
    return Markup(
        '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="1.5"><title>{}</title></rect>'
    ).format(kind, x, y, *size, label)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(kind, x1, y1, x2, y2)


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, text)
