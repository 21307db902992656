"""The engine in a child process: answers cross, faults stay there, and nothing outlives or outwaits its time."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.child_process import SPIN_COUNT, child_environment
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.process import EngineProcess
from batchinfer.engine.wire import (
    completion_from_json,
    completion_to_json,
    read_message,
    request_from_json,
    request_to_json,
    write_message,
)
from batchinfer.errors import DeviceUnhealthyError, EngineDiedError, EngineError, EngineStalledError, ModelError
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Completion, ErrorCode, FinishReason, Request, RowError, RowStatus, Usage
from tests.fakes import answer

FACTORY = "tests.fakes:create_engine"
ROOT = Path(__file__).resolve().parents[2]


def request(request_id, prompt: str, **params) -> Request:
    return Request(str(request_id), SamplingParams(**params), prompt=prompt)


@pytest.fixture
def start():
    """Start engine processes that end with the test."""
    started = []

    def start(model="fake", stall_seconds=60.0, load_timeout_seconds=60.0, **config) -> EngineProcess:
        process = EngineProcess(
            FACTORY,
            EngineConfig(model, **config),
            stall_seconds=stall_seconds,
            load_timeout_seconds=load_timeout_seconds,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.close()


def drain(process: EngineProcess) -> dict[str, Completion]:
    """Everything that is unfinished, as it ends."""
    found = {}
    while process.num_unfinished:
        found.update({completion.request_id: completion for completion in process.poll(1)})
    return found


def fault(process: EngineProcess) -> EngineError:
    with pytest.raises(EngineError) as caught:
        drain(process)
    return caught.value


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_dead(pid: int, seconds=20) -> None:
    deadline = time.monotonic() + seconds
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)


def test_answers_come_back(start):
    process = start()
    process.submit([request(i, f"row {i} of many", max_tokens=3) for i in range(100)])
    found = drain(process)
    assert {i: c.text for i, c in found.items()} == {str(i): f"many of {i}" for i in range(100)}
    assert all(c.status is RowStatus.SUCCEEDED and c.finish_reason is FinishReason.LENGTH for c in found.values())
    assert process.stats()["succeeded"] == 100
    assert process.poll(0) == []


def test_the_three_forms_of_a_request_arrive(start):
    process = start()
    messages = [{"role": "user", "content": "a b", "extra": [1, None, {"k": 0.5}]}]
    process.submit([request(0, "x y"), Request("1", messages=messages), Request("2", prompt_token_ids=[5, 6])])
    assert {i: c.text for i, c in drain(process).items()} == {"0": "y x", "1": "b a", "2": "6 5"}


def test_an_error_row_keeps_its_code_and_costs_its_neighbours_nothing(start):
    process = start()
    process.submit([request(0, "fine"), request(1, "ERROR here"), request(2, "fine too")])
    found = drain(process)
    assert found["1"].error == RowError(ErrorCode.ENGINE_ERROR, "asked for an error")
    assert [found[i].text for i in "02"] == ["fine", "too fine"]


def test_a_lone_surrogate_crosses_both_ways(start):
    process = start()
    process.submit([request(0, "\ud83d \u0000 é")])
    assert drain(process)["0"].text == "é \u0000 \ud83d"


def test_megabytes_cross_both_ways_at_once(start):
    """Neither side waits for the other to read: far more than a pipe holds is under way in both directions."""
    process = start(max_num_seqs=8)
    text = "word " * 40_000
    process.submit([request(i, text, max_tokens=10**6) for i in range(60)])
    found = drain(process)
    assert len(found) == 60
    assert all(completion.text == answer(text) for completion in found.values())


def test_an_aborted_request_ends_cancelled_and_others_go_on(start):
    process = start(max_num_seqs=2)
    process.submit([request(0, "WAIT:1000000000"), request(1, "short"), request(2, "WAIT:1000000000")])
    assert [completion.request_id for completion in process.poll(30)] == ["1"]
    process.abort(["0", "2", "unknown"])
    found = drain(process)
    assert {i: c.status for i, c in found.items()} == {"0": RowStatus.CANCELLED, "2": RowStatus.CANCELLED}
    assert found["0"].device_ns > 0, "what it cost until then is known"


def test_an_id_in_use_is_refused_and_may_be_used_again_later(start):
    process = start()
    process.submit([request(0, "a")])
    with pytest.raises(ValueError, match="twice"):
        process.submit([request(0, "b")])
    drain(process)
    with pytest.raises(ValueError, match="twice"):
        process.submit([request(1, "b"), request(1, "c")])
    process.submit([request(0, "b")])
    assert drain(process)["0"].text == "b"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("CRASH", ["exit code 13", "crashing on 1"]),
        ("SEGFAULT", ["SIGSEGV", "tests/fakes.py"]),
        ("RAISE", ["the device is poisoned"]),
    ],
)
def test_a_fault_of_the_engine_is_an_error_that_says_how_it_ended(start, prompt, words):
    """The error has the exit code or signal, and the child's last words."""
    process = start()
    process.submit([request(1, prompt), request(2, "WAIT:5")])
    error = fault(process)
    assert isinstance(error, EngineDiedError)
    for word in words:
        assert word in str(error)
    assert not is_alive(process.pid)
    with pytest.raises(EngineDiedError):
        process.poll(0)


def test_completions_sent_before_a_crash_are_returned_first(start):
    process = start(max_num_seqs=1)
    process.submit([request(0, "first"), request(1, "CRASH")])
    deadline = time.monotonic() + 30
    while is_alive(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [completion.request_id for completion in process.poll(1)] == ["0"]
    with pytest.raises(EngineDiedError):
        process.poll(1)
    assert process.num_unfinished == 1


def test_a_killed_child_is_named_with_its_signal(start):
    process = start()
    process.submit([request(0, "WAIT:1000000000")])
    os.kill(process.pid, signal.SIGKILL)
    assert "SIGKILL" in str(fault(process))


def test_a_hanging_step_is_a_stall_and_the_child_is_killed(start):
    process = start(stall_seconds=0.5)
    process.submit([request(0, "HANG")])
    error = fault(process)
    assert isinstance(error, EngineStalledError)
    assert "1 requests unfinished" in str(error)
    assert not is_alive(process.pid)
    with pytest.raises(EngineStalledError):
        process.poll(0)


def test_steps_that_do_nothing_are_a_stall(start):
    """A loop that spins is alive in every way but one: no counter of its moves."""
    process = start(stall_seconds=0.7)
    process.submit([request(0, "SPIN")])
    assert isinstance(fault(process), EngineStalledError)


def test_steps_without_completions_are_no_stall(start):
    """A row that takes many times the stall limit, but goes on, is left alone."""
    process = start(stall_seconds=0.6)
    process.submit([request(0, "WAIT:1000000000")])
    end = time.monotonic() + 3 * 0.6
    while time.monotonic() < end:
        assert process.poll(0.1) == []
    assert process.stats()["steps"] > 1


def test_an_idle_engine_is_no_stall(start):
    process = start(stall_seconds=0.2)
    end = time.monotonic() + 1
    while time.monotonic() < end:
        assert process.poll(0.05) == []
    process.submit([request(0, "a b")])
    assert drain(process)["0"].text == "b a"


def test_a_missing_model_is_a_model_error_with_its_words(start):
    with pytest.raises(ModelError, match="no model at missing: give another") as caught:
        start("missing")
    assert caught.value.param == "model"


def test_a_failing_load_is_an_engine_error_in_one_line(start):
    with pytest.raises(EngineError, match=r"could not be loaded: RuntimeError: the weights are broken$"):
        start("broken")


def test_a_child_that_ends_while_loading_died(start):
    with pytest.raises(EngineDiedError, match=r"exit code 13; its last output: .*last words"):
        start("crashing")


def test_a_load_that_takes_too_long_is_given_up(start):
    with pytest.raises(EngineError, match="did not load within"):
        start("slow:600", load_timeout_seconds=0.5)


def test_load_time_is_measured(start):
    assert start("slow:0.2").load_ns > 200_000_000


def test_signals_for_the_parent_leave_the_child_working(start):
    """Ctrl-C and SIGTERM mean the worker; it still wants the answers that are under way."""
    process = start()
    process.submit([request(0, "SLEEP:0.3 x")])
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, number)
    assert os.getpgid(process.pid) != os.getpgid(0), "a terminal's Ctrl-C goes to the parent's group only"
    assert drain(process)["0"].status is RowStatus.SUCCEEDED


def test_the_child_outlives_the_thread_that_started_it(start):
    """A worker's thread may end; a death signal bound to the thread would take the engine with it."""
    found = []
    thread = threading.Thread(target=lambda: found.append(start()))
    thread.start()
    thread.join()
    found[0].submit([request(0, "a b")])
    assert drain(found[0])["0"].text == "b a"


@pytest.mark.parametrize("prompt", ["WAIT:1000000000", "HANG", ""])
def test_the_child_ends_with_its_parent(tmp_path, prompt):
    """Working, hanging or idle: a parent killed with SIGKILL leaves no engine behind."""
    program = f"""
import os, signal, time
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.process import EngineProcess
from batchinfer.types import Request
process = EngineProcess({FACTORY!r}, EngineConfig("fake"))
if {prompt!r}:
    process.submit([Request("0", prompt={prompt!r})])
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_until_dead(int(done.stdout))


def test_closing_ends_the_child_whatever_it_does(start):
    for prompt in (None, "WAIT:1000000000", "HANG"):
        process = start()
        if prompt:
            process.submit([request(0, prompt)])
        process.close(timeout=1)
        assert not is_alive(process.pid)
        process.close()
        with pytest.raises(EngineError, match="closed"):
            process.poll(0)
        with pytest.raises(EngineError, match="closed"):
            process.submit([request(1, "x")])


def test_threads_may_submit_while_another_polls(start):
    process = start()

    def submit(base: int) -> None:
        for i in range(50):
            process.submit([request(base + i, f"row {base + i}")])

    threads = [threading.Thread(target=submit, args=(base,)) for base in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    found = {}
    while len(found) < 150:
        found.update({completion.request_id: completion for completion in process.poll(1)})
    for thread in threads:
        thread.join()
    assert all(found[str(base + i)].text == f"{base + i} row" for base in (0, 1000, 2000) for i in range(50))


def test_no_descriptor_or_thread_is_left_behind():
    def in_use() -> tuple[int, int]:
        return sum(1 for _ in Path("/proc/self/fd").iterdir()), threading.active_count()

    before = in_use()
    for model in ("fake", "missing", "crashing"):
        with suppress(ModelError, EngineDiedError):
            EngineProcess(FACTORY, EngineConfig(model)).close()
    assert in_use() == before


def test_the_parent_never_imports_torch():
    program = "import sys; import batchinfer.engine.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


params = st.builds(
    SamplingParams,
    max_tokens=st.integers(5, 100),
    min_tokens=st.integers(0, 5),
    temperature=st.floats(0, 100),
    top_p=st.floats(0.001, 1),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers()).map(tuple),
    ignore_eos=st.booleans(),
)
texts = st.text(st.characters())  # lone surrogates included
requests = st.builds(Request, texts, params, st.none() | texts, st.none(), st.none() | st.lists(st.integers(0)))
completions = st.builds(
    Completion,
    texts,
    st.sampled_from(RowStatus),
    texts,
    st.lists(st.integers(0)).map(tuple),
    st.none() | st.sampled_from(FinishReason),
    st.none() | st.builds(RowError, st.sampled_from(ErrorCode), texts),
    st.builds(Usage, st.integers(0), st.integers(0), st.integers(0)),
    st.integers(0),
    st.none() | st.integers(0),
)


def over_a_pipe(message: dict) -> dict:
    read_fd, write_fd = os.pipe()
    with os.fdopen(read_fd, "rb") as reader:
        with os.fdopen(write_fd, "wb") as writer:
            write_message(writer, message)
        found = read_message(reader.read)
        assert read_message(reader.read) is None
    assert found is not None
    return found


@given(requests)
def test_any_request_survives_the_wire(sent):
    assert request_from_json(over_a_pipe(request_to_json(sent))) == sent


@given(completions)
def test_any_completion_survives_the_wire(sent):
    assert completion_from_json(over_a_pipe(completion_to_json(sent))) == sent


def test_idle_threads_of_the_engine_sleep_soon_unless_a_person_chose_otherwise():
    """OpenMP's default spins for milliseconds, which is ruinous on a machine that others use too."""
    assert child_environment({"A": "1"}) == {"A": "1", "GOMP_SPINCOUNT": SPIN_COUNT}
    for chosen in ({"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "active"}):
        assert child_environment(chosen) == chosen


@pytest.mark.parametrize(
    ("word", "kind", "code"), [("ASSERT", EngineDiedError, 70), ("ECC-ONCE", DeviceUnhealthyError, 71)]
)
def test_a_failed_device_ends_the_process_at_once_with_a_code_of_its_own(
    start, tmp_path, monkeypatch, word, kind, code
):
    monkeypatch.setenv("CRASH_FILE", str(tmp_path / "failed"))
    process = start()
    process.submit([request(0, word)])
    error = fault(process)
    assert type(error) is kind
    assert "device" in str(error)
    wait_until_dead(process.pid)
    assert process._child.exit_code == code
