"""What people read, and what `cut` and `awk` read."""

import io
import sys

import pytest

from batchinfer.cli.console import count, duration, one_line, print_fields, print_table, rate, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"), (-3, "0s"), (0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (3599, "59m59s"), (3600, "1h00m"),
        (86399, "23h59m"), (86400, "1d00h"), (90061, "1d01h"),
    ],
)  # fmt: skip
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_numbers():
    assert (count(None), count(1234567)) == ("-", "1,234,567")
    assert (rate(None), rate(0.26), rate(9.96), rate(1234.4)) == ("-", "0.3", "10.0", "1,234")
    assert (size(1023), size(1536), size(5 * 2**30), size(3 * 2**40)) == ("1023 B", "1.5 KiB", "5.0 GiB", "3.0 TiB")


def test_text_of_strangers_stays_on_one_line():
    """A prompt may hold line breaks, tabs and escape sequences; none may reach the terminal."""
    assert one_line("a\nb\tc\x1b[31md\u2028e") == "a b c [31md e"
    assert one_line("abcdefghij", 5) == "abcd…"
    assert one_line("abcde", 5) == "abcde"


def test_a_piped_table_is_tab_separated(capsys):
    print_table(("A", "B"), [("1", "x\ty"), ("2", "[bold]z")])
    assert capsys.readouterr().out == "A\tB\n1\tx y\n2\t[bold]z\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_table_on_a_terminal_is_aligned_and_shows_markup_as_it_is(monkeypatch):
    terminal = Terminal()
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stdout", terminal)
    print_table(("JOB", "NAME"), [("long-id-1", "[red]x[/red]")])
    text = terminal.getvalue()
    assert "[red]x[/red]" in text
    assert "\t" not in text
    head, row = text.splitlines()[:2]
    assert head.index("NAME") == row.index("[red]x")


def test_fields_without_a_value_are_left_out(capsys):
    print_fields([("state", "queued"), ("error", ""), ("n", "1")])
    assert capsys.readouterr().out == "state  queued\nn      1\n"
