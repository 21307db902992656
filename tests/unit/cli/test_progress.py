"""Progress: a bar on a terminal, a line every few seconds in a pipe, a document a change for machines."""

import io
import json
import sys
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from batchinfer.cli.progress import BarDisplay, JsonLineDisplay, LineDisplay, choose_display, progress_line
from batchinfer.jobs.views import CostSoFar, JobView, Progress, RowCounts, TokenUsage


def job(done=0, *, total=100, state="in_progress", errored=0, speed=None, eta=None):
    return JobView(
        id="job_1",
        tenant="default",
        name=None,
        tags={},
        model="m",
        state=state,
        outcome=None,
        error=None,
        inputs=["/i.parquet"],
        output="/o",
        rows=RowCounts(
            total=total,
            remaining=None if total is None else total - done,
            succeeded=done - errored,
            errored=errored,
            expired=0,
            cancelled=0,
            skipped=0,
            deduplicated=0,
        ),
        usage=TokenUsage(prompt_tokens=0, cached_tokens=0, completion_tokens=0),
        progress=Progress(fraction=None, rows_per_second=None, tokens_per_second=speed, eta_seconds=eta),
        cost=CostSoFar(
            metered_usd=Decimal("0.25"), overhead_usd=Decimal("0.05"), list_usd=None, budget_usd=None
        ),
        reuse=None,
        warnings=[],
        priority=0,
        deadline=None,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        started_at=None,
        finished_at=None,
    )  # fmt: skip


def test_a_line_has_rows_speed_time_and_cost():
    line = progress_line(job(40, errored=2, speed=1234.5, eta=200))
    assert line == "in_progress  40/100 rows  2 errored  1,234 tokens/s  ETA 3m20s  $0.30"


def test_a_job_whose_rows_are_not_counted_yet_has_no_numbers_made_up():
    assert progress_line(job(0, total=None, state="validating")) == "validating  $0.30"


def test_plain_lines_come_at_once_on_a_new_state_and_else_every_five_seconds():
    now, lines = [0.0], []
    display = LineDisplay(lines.append, lambda: now[0])
    for second in range(12):
        now[0] = float(second)
        display.update(job(second, state="queued" if second == 0 else "in_progress"))
    display.update(job(12, state="completed"))
    display.close()
    assert [line.split()[:3] for line in lines] == [
        ["job_1", "queued", "0/100"],
        ["job_1", "in_progress", "1/100"],
        ["job_1", "in_progress", "6/100"],
        ["job_1", "in_progress", "11/100"],
        ["job_1", "completed", "12/100"],
    ]


def test_json_lines_come_when_something_changed(capsys):
    display = JsonLineDisplay()
    for done in (0, 0, 5, 5):
        display.update(job(done))
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [document["rows"]["succeeded"] for document in documents] == [0, 5]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_shows_the_same_numbers(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    display = choose_display()
    assert isinstance(display, BarDisplay)
    display.update(job(40, speed=50.0))
    display.close()
    assert "40/100 rows" in terminal.getvalue()
    assert "50 tokens/s" in terminal.getvalue()


@pytest.mark.parametrize(("as_json", "kind"), [(False, LineDisplay), (True, JsonLineDisplay)])
def test_without_a_terminal_there_is_no_bar(monkeypatch, as_json, kind):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(choose_display(as_json_lines=as_json), kind)
