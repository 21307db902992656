"""The harness and its peers' protocol, with a peer that has no model."""

import sys

import psutil
import pytest

from benchmarks.peers.agreement import agreement
from benchmarks.peers.catalogue import Contender
from benchmarks.peers.harness import Harness, Plan
from benchmarks.peers.process import PeerError, PeerProcess
from benchmarks.workloads import Item, make

COMMAND = (sys.executable, "-m", "tests.unit.benchmarks.fake_peer")


def contender(name="fake", **settings):
    return Contender(name, "int8", COMMAND, settings)


def started(fail=None, timeout_s=60.0):
    process = PeerProcess(contender(fail=fail), timeout_s=timeout_s, load_timeout_s=60.0)
    process.load()
    return process


def test_a_run_gives_tokens_in_order_and_what_it_took():
    with started() as process:
        measured = process.run([Item([1, 5], 3), Item([9], 1)])
    assert measured.token_ids == [[6, 7, 8], [10]]
    assert measured.num_tokens == 4
    assert measured.seconds > 0
    assert process.versions == {"pytest": pytest.__version__, "no-such-package": "unknown"}


def test_the_peak_is_the_systems_own_count():
    with started() as process:
        process.run([Item([1], 1)])
        now = psutil.Process(process._popen.pid).memory_info().rss >> 20
        assert 0 < now <= process.peak_rss_mb + 1


@pytest.mark.parametrize(
    ("fail", "message"),
    [("run", "ValueError: cannot"), ("exit", "exit code 9: out of memory"), ("count", "2 in 1 rows, asked for 3")],
)
def test_a_failure_says_what_happened(fail, message):
    with started(fail) as process:
        process.run([Item([1], 3)])
        with pytest.raises(PeerError, match=message):
            process.run([Item([1], 3)])


def test_one_that_hangs_is_given_up_and_ended():
    with started("hang", timeout_s=1.0) as process:
        process.run([Item([1], 1)])
        with pytest.raises(PeerError, match="took longer than 1 s"):
            process.run([Item([1], 1)])
        pid = process._popen.pid
    assert not psutil.pid_exists(pid)


def test_a_program_that_is_not_there_is_no_crash_of_the_harness():
    broken = Contender("broken", "int8", (sys.executable, "-c", "raise SystemExit('no such library')"), {})
    with (
        PeerProcess(broken, timeout_s=60, load_timeout_s=60) as process,
        pytest.raises(PeerError, match="no such library"),
    ):
        process.load()


def test_rounds_are_interleaved_and_failures_leave_the_others_alone():
    """Every contender meets every workload in every round, in turn; who fails a workload is not asked again."""
    said = []
    absent = Contender("absent", "int8", COMMAND, {}, missing="not installed: do this")
    members = [contender("a"), contender("b", fail="exit"), contender("c", fail="load"), absent]
    harness = Harness(members, Plan(("W3", "W4"), rounds=2, scale=0.02), said.append)
    harness.run()
    told = [(run["round"], run["workload"], run["engine"], "error" in run) for run in harness.runs]
    assert told == [
        (0, "W3", "a", False), (0, "W3", "b", True), (0, "W4", "a", False), (0, "W4", "b", True),
        (1, "W3", "a", False), (1, "W4", "a", False),
    ]  # fmt: skip
    assert [run["tokens"] for run in harness.runs if run["engine"] == "a"] == [
        sum(item.max_tokens for item in make(name, 0.02, turn)) for turn in (0, 1) for name in ("W3", "W4")
    ]
    assert harness.describe["c"]["error"] == "does not start: OSError: no weights"
    assert harness.describe["absent"]["error"] == "not installed: do this"
    assert harness.describe["a"]["peak_rss_mb"] > 0


def test_agreement_counts_tokens_before_the_first_other_one():
    """The fake counts up from the prompt's last token, whoever asks: all of them agree with it."""
    said = []
    items = [Item([3], 4), Item([8], 2)]
    found = agreement([contender("a"), contender("b", fail="load")], contender(), items, Plan((), 1), said.append)
    assert found["agreed_tokens"] == {"a": [4, 2]}
    assert any("no weights" in line for line in said)
