"""The engine host over real engine processes with the fake engine inside."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial

import psutil
import pytest

from batchinfer.engine.config import EngineConfig
from batchinfer.engine.process import EngineProcess
from batchinfer.errors import EngineError, ModelError
from batchinfer.types import Request, RowStatus
from batchinfer_workers.engine_host import EngineHost
from batchinfer_workers.engine_session import EngineSession, row_of
from tests.fakes import STEP_NS, answer

CONFIG = EngineConfig("fake", max_num_seqs=8)
never = bool  # bool() is False: not cancelled


@pytest.fixture
def closed():
    """(engine id, idle ns) of each engine that the host closed."""
    return []


@pytest.fixture
def host(closed):
    start = partial(EngineProcess, "tests.fakes:create_engine", stall_seconds=1.0)
    host = EngineHost(start, on_close=lambda engine_id, idle_ns: closed.append((engine_id, idle_ns)))
    yield host
    host.close()


def requests(*prompts: str) -> list[Request]:
    return [Request(str(row), prompt=prompt) for row, prompt in enumerate(prompts)]


def collect(session: EngineSession) -> dict[int, str]:
    found = {}
    while session.num_outstanding:
        for completion in session.poll(1.0):
            assert completion.status is RowStatus.SUCCEEDED, completion
            found[row_of(completion)] = completion.text
    return found


def wait_until(condition) -> None:
    give_up_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


def test_two_shards_with_the_same_row_indexes_share_one_engine(host):
    """Completions find the shard they belong to, though both have rows 0 and 1."""
    one = host.acquire(CONFIG, is_cancelled=never)
    two = host.acquire(CONFIG, is_cancelled=never)
    one.submit(requests("a b", "c d"))
    two.submit(requests("e f", "g h"))
    assert collect(two) == {0: "f e", 1: "h g"}
    assert collect(one) == {0: "b a", 1: "d c"}
    assert one.engine_id == two.engine_id
    assert one.load_ns > 0
    assert two.load_ns == 0, "a load is billed once"


def test_rows_of_two_shards_run_in_one_batch(host):
    """A shard that does not end holds up nobody: the other's rows join the batch that its row runs in."""
    one = host.acquire(CONFIG, is_cancelled=never)
    two = host.acquire(CONFIG, is_cancelled=never)
    one.submit(requests("WAIT:1000000000"))
    wait_until(lambda: host.stats().get("num_running") == 1)
    for _ in range(3):
        two.submit(requests("a b", "c d"))
        assert collect(two) == {0: "b a", 1: "d c"}
    assert one.num_outstanding == 1
    assert host.stats()["num_running"] == 1


def test_a_dead_engine_reaches_every_shard_and_the_next_one_gets_a_new_engine(host):
    """Each shard gets what the engine had finished, then the error; the host starts another engine."""
    one = host.acquire(CONFIG, is_cancelled=never)
    two = host.acquire(CONFIG, is_cancelled=never)
    one.submit(requests("a b"))
    assert collect(one) == {0: "b a"}
    one.submit(requests("CRASH now"))
    two.submit(requests("WAIT:1000000"))
    for session in (one, two):
        with pytest.raises(EngineError):
            while True:
                session.poll(1.0)
    host.release(one)
    host.release(two)
    three = host.acquire(CONFIG, is_cancelled=never)
    three.submit(requests("x y"))
    assert collect(three) == {0: "y x"}
    assert three.engine_id != one.engine_id


def test_a_hanging_engine_is_killed(host):
    """An engine that makes no step ends its shards' attempts with an error, and does not hold them for ever."""
    session = host.acquire(CONFIG, is_cancelled=never)
    session.submit(requests("HANG"))
    with pytest.raises(EngineError):
        while True:
            session.poll(1.0)


def test_a_killed_engine_is_noticed(host):
    session = host.acquire(CONFIG, is_cancelled=never)
    session.submit(requests("SPIN"))
    os.kill(host._engine.process.pid, signal.SIGKILL)
    with pytest.raises(EngineError):
        while True:
            session.poll(1.0)


def test_a_probe_is_alone_and_nobody_overtakes_it(host):
    """An exclusive session waits for the others to leave; one that asks later waits for it."""
    order = []
    first = host.acquire(CONFIG, is_cancelled=never)

    def take(name: str, exclusive: bool) -> None:
        session = host.acquire(CONFIG, is_cancelled=never, exclusive=exclusive)
        others = len(host._engine.sessions) - 1
        order.append((name, others))
        host.release(session)

    probe = threading.Thread(target=take, args=("probe", True))
    probe.start()
    wait_until(lambda: len(host._waiting) == 1)
    late = threading.Thread(target=take, args=("late", False))
    late.start()
    wait_until(lambda: len(host._waiting) == 2)
    assert order == []
    host.release(first)
    probe.join()
    late.join()
    assert order == [("probe", 0), ("late", 0)]


def test_another_model_waits_until_the_engine_is_free_and_replaces_it(host, closed):
    one = host.acquire(CONFIG, is_cancelled=never)
    got = []
    other = EngineConfig("other")
    thread = threading.Thread(target=lambda: got.append(host.acquire(other, is_cancelled=never)))
    thread.start()
    one.submit(requests("a b"))
    assert collect(one) == {0: "b a"}
    assert got == []
    host.release(one)
    thread.join()
    assert host.model == "other"
    assert [engine_id for engine_id, _ in closed] == [one.engine_id]


def test_a_model_that_cannot_be_loaded_says_so_each_time(host):
    """A load failure is told to who asked, and does not stick: a corrected model loads."""
    for _ in range(2):
        with pytest.raises(ModelError, match="missing"):
            host.acquire(EngineConfig("missing"), is_cancelled=never)
    assert host.acquire(CONFIG, is_cancelled=never) is not None


def test_waiting_for_an_engine_can_be_given_up():
    """Drain: a shard that waits for a slow load, or for another shard to leave, gets None at once; once the worker has
    closed, nobody waits for the model, and its process ends."""
    failures, children = [], psutil.Process().children
    others = set(children())
    start = partial(EngineProcess, "tests.fakes:create_engine")
    host = EngineHost(start, on_failure=failures.append)
    assert host.acquire(EngineConfig("slow:600"), is_cancelled=lambda: True) is None
    wait_until(lambda: set(children()) - others)
    host.close()
    wait_until(lambda: not set(children()) - others)
    assert not failures, "a load that was given up says nothing of the device"


def test_what_sessions_used_and_idle_time_are_told_apart(host, closed):
    """A session is charged its rows' device time; what is left of the engine's life is idle."""
    session = host.acquire(CONFIG, is_cancelled=never)
    session.submit(requests("a b", "WAIT:4 c"))
    collect(session)
    assert session.metered_ns == (1 + 5) * STEP_NS
    engine = host._engine
    host.release(session)
    host.close()
    ((engine_id, idle_ns),) = closed
    assert engine_id == session.engine_id
    assert engine.attributed_ns == 6 * STEP_NS
    assert idle_ns >= 0


def test_giving_a_session_back_aborts_its_rows(host):
    """After a drain or a cancel the engine computes nothing for the shard any more."""
    session = host.acquire(CONFIG, is_cancelled=never)
    session.submit(requests(*["WAIT:100000000"] * 20))
    host.release(session)
    other = host.acquire(CONFIG, is_cancelled=never)
    other.submit(requests("a b"))
    assert collect(other) == {0: "b a"}
    assert answer("a b") == "b a"
