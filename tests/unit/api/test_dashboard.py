"""What pages are made of: words, charts, and that nothing in them can run."""

import re
import threading
import xml.etree.ElementTree as ET
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.api.dashboard import charts, words
from batchinfer.api.dashboard.kept_series import LEAST_SECONDS, MAX_KEPT, SHARE, KeptSeries
from batchinfer.jobs.history import Span

NOW = datetime(2026, 3, 29, 12, tzinfo=UTC)
SVG_TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=20)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "—"), (0, "0"), (0.25, "0.2"), (99.5, "99.5"), (1234, "1,234"), (1234.5, "1,234"), (98_765_432, "98.8 M")],
)
def test_counts(value, text):
    assert words.count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "—"), (0.04, "0.0 s"), (9.94, "9.9 s"), (59, "59 s"), (60, "1 min"), (3600, "1 h"), (7500, "2 h 5 min"),
     (90061, "1 d 1 h"), (86400, "1 d")],
)  # fmt: skip
def test_durations(seconds, text):
    assert words.duration(seconds) == text


def test_shares_say_100_only_when_all_is_done():
    assert [words.percent(share) for share in (None, 0, 0.5, 0.9999, 1)] == ["—", "0 %", "50 %", "99 %", "100 %"]


def test_money_and_moments():
    assert words.usd(Decimal("0.000012345")) == "$0.000012"
    assert words.ago(NOW - timedelta(minutes=3), NOW) == "3 min ago"
    assert words.ago(NOW + timedelta(seconds=5), NOW) == "in 5 s"
    assert str(words.moment(NOW)) == '<time datetime="2026-03-29T12:00:00+00:00">2026-03-29 12:00:00</time>'


@given(st.lists(st.floats(0, 1e15), max_size=60), SVG_TEXT)
def test_bars_are_as_tall_as_their_values(values, title):
    """The tallest bar is the largest value; all others are in proportion, and any title is only text."""
    svg = ET.fromstring(str(charts.bars(values, [str(n) for n in range(len(values))], title=title)))
    heights = [float(rect.get("height")) for rect in svg.iter("rect")]
    assert len(heights) == len(values)
    full = charts.HEIGHT - charts.BOTTOM - charts.TOP
    for value, height in zip(values, heights, strict=True):
        assert height == pytest.approx(full * value / (max(values) or 1), abs=0.06)
    assert svg.get("aria-label").startswith(title)


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 1000), st.integers(0, 1000)), min_size=1, max_size=50))
def test_a_timeline_has_a_bar_for_each_attempt_inside_its_picture(attempts):
    spans = [
        Span(
            number,
            shard,
            "w<1>",
            "run",
            "committed",
            NOW + timedelta(seconds=a),
            NOW + timedelta(seconds=a + b),
            1,
            None,
        )
        for number, (shard, a, b) in enumerate(attempts)
    ]
    svg = ET.fromstring(str(charts.timeline(spans, now=NOW, title="t")))
    bars = list(svg.iter("rect"))
    assert len(bars) == len(spans)
    _, _, width, height = map(float, svg.get("viewBox").split())
    lanes = {float(bar.get("y")) for bar in bars}
    assert len(lanes) <= charts.MAX_LANES
    for bar in bars:
        assert float(bar.get("x")) + float(bar.get("width")) <= width - charts.RIGHT + 2.2
        assert 0 <= float(bar.get("y")) < height


def test_a_split_covers_its_shares():
    svg = ET.fromstring(str(charts.split({"gemm": 0.5, "attention": 0.25, "none": 0.0}, title="time")))
    assert [float(rect.get("width")) for rect in svg.iter("rect")] == [320.0, 160.0]


def test_pages_forbid_what_is_not_theirs(client):
    """No inline script, no other host, no frame; and forms keep their origin, or they would be refused."""
    page = client.get("/", headers={"Accept": "text/html"})
    assert page.status_code == 200
    policy = dict(part.strip().split(" ", 1) for part in page.headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["form-action"] == "'self'"
    assert page.headers["Referrer-Policy"] == "same-origin"
    assert not re.search(r"\son\w+=|<script>|style=", page.text)
    for path in re.findall(r'(?:href|src)="(/assets/[^"]+)"', page.text):
        assert client.get(path).status_code == 200


def test_another_sites_form_is_refused(client, service, tmp_path):
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    form = {"inputs": str(tmp_path / "p.parquet"), "model": "org/name"}
    refused = client.post("/submit", data=form, headers={"Origin": "https://evil.example"})
    assert refused.status_code == 403
    assert service.list_jobs().data == []
    made = client.post("/submit", data=form, headers={"Origin": "http://127.0.0.1:8000"}, follow_redirects=False)
    assert (made.status_code, made.headers["location"]) == (303, f"/jobs/{service.list_jobs().data[0].id}")


def test_a_forecasts_figures_have_their_units():
    assert [words.figure(1.5, "device_seconds"), words.figure(0.0012, "cost_usd")] == ["1.5 s", "$0.0012"]
    assert [words.figure(1234.6, "prompt_tokens"), words.figure(None, "cost_usd")] == ["1,235", "—"]
    assert [words.figure_name(what) for what in ("cost_usd", "device_seconds")] == ["Cost", "Device time"]


class Sums:
    """Sums that take ``seconds`` of a clock each."""

    def __init__(self, seconds):
        self.now, self.number, self._seconds = 100.0, 0, seconds

    def clock(self):
        return self.now

    def __call__(self):
        self.now += self._seconds
        self.number += 1
        return [self.number]


def test_many_that_look_cost_one_sum():
    sums = Sums(0.01)
    kept = KeptSeries(sums.clock)
    assert [kept.get("a", sums) for _ in range(50)] == [[1]] * 50
    sums.now += LEAST_SECONDS - 0.001
    assert kept.get("a", sums) == [1]
    sums.now += 0.002
    assert kept.get("a", sums) == [2]
    assert kept.get("b", sums) == [3]


def test_a_slow_sum_serves_longer():
    sums = Sums(2.0)
    kept = KeptSeries(sums.clock)
    kept.get("a", sums)
    sums.now += 2.0 * SHARE - 0.001
    assert kept.get("a", sums) == [1]


def test_only_so_many_are_kept_and_a_failed_sum_is_not():
    sums = Sums(0.0)
    kept = KeptSeries(sums.clock)
    with pytest.raises(ZeroDivisionError):
        kept.get(0, lambda: 1 / 0)
    for number in range(MAX_KEPT + 1):
        kept.get(number, sums)
    assert kept.get(MAX_KEPT, sums) == [MAX_KEPT + 1]
    assert kept.get(0, sums) == [MAX_KEPT + 2], "the one that nobody looked at for longest is gone"


def test_a_sum_that_takes_long_keeps_only_those_who_ask_for_it():
    kept, begun, release = KeptSeries(), threading.Event(), threading.Event()
    seen, made = [], []

    def slow():
        made.append(1)
        begun.set()
        release.wait(30)
        return [len(made)]

    threads = [threading.Thread(target=lambda: seen.append(kept.get("slow", slow))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(30)
    assert kept.get("quick", lambda: [7]) == [7]
    assert seen == []
    release.set()
    for thread in threads:
        thread.join(30)
    assert seen == [[1]] * 3
