"""A worker process a GPU: which GPUs each sees, which signals it gets, when it is started again."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from click.testing import CliRunner

from batchinfer.cli.main import cli
from batchinfer.errors import UserError
from batchinfer_workers.gpu_workers import gpu_groups, run_gpu_workers

CHILD = """
import json, os, signal, sys, time
folder, visible = sys.argv[1], os.environ["CUDA_VISIBLE_DEVICES"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with open(os.path.join(folder, "started"), "a") as file:
    print(json.dumps([visible, os.environ.get("BATCHINFER_METRICS_PORT"), sys.argv[2:], os.getpid()]), file=file)
with open(os.path.join(folder, "started")) as file:
    starts = [line for line in file if json.loads(line)[0] == visible]
if visible == os.environ.get("FAILS") and len(starts) == 1:
    sys.exit(int(os.environ["CODE"]))
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("wanted", "size", "visible", "groups"),
    [
        ("all", 1, None, ["0", "1", "2", "3"]),
        ("all", 2, None, ["0,1", "2,3"]),
        ("all", 1, "5,7", ["5", "7"]),
        ("0,2", 1, None, ["0", "2"]),
        (" 3, 1 ", 2, None, ["3,1"]),
        ("GPU-8f2a,GPU-77c1", 1, None, ["GPU-8f2a", "GPU-77c1"]),
    ],
)
def test_each_worker_sees_its_own_gpus(wanted, size, visible, groups):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpu_groups(wanted, size, environment=environment, count=lambda: 4) == groups


@pytest.mark.parametrize(
    ("wanted", "size", "count", "sentence"),
    [
        ("all", 1, 0, "no GPU is visible"),
        (",", 1, 4, "no GPU is visible"),
        ("0,1,0", 1, 4, "GPU 0 twice"),
        ("all", 3, 4, "4 GPUs do not divide into groups of 3"),
    ],
)
def test_gpus_that_cannot_be_shared_out_are_refused(wanted, size, count, sentence):
    with pytest.raises(UserError, match=sentence):
        gpu_groups(wanted, size, environment={}, count=lambda: count)


def starts(folder):
    path = folder / "started"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(folder, groups, stop_at, monkeypatch=None, **environment):
    """Run workers until ``stop_at`` of them have started, then stop them as a person does."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def stop():
        deadline = time.monotonic() + 60
        while len(starts(folder)) < stop_at and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    if stop_at:
        threading.Thread(target=stop).start()
    program = [sys.executable, "-S", "-c", CHILD, str(folder)]
    return run_gpu_workers(groups, ["--pool", "a"], metrics_port=9100, program=program, restart_seconds=0.1)


def test_workers_have_their_environment_and_end_with_the_command(tmp_path):
    code = run(tmp_path, ["0,1", "2,3"], 2)
    assert code == 0
    found = sorted(starts(tmp_path))
    assert [start[:3] for start in found] == [["0,1", "9100", ["--pool", "a"]], ["2,3", "9101", ["--pool", "a"]]]
    for *_, pid in found:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_worker_that_fails_is_started_again_alone(tmp_path, monkeypatch):
    code = run(tmp_path, ["4", "6"], 3, monkeypatch, FAILS="6", CODE="1")
    assert code == 0
    assert sorted(start[0] for start in starts(tmp_path)) == ["4", "6", "6"]


def test_a_signal_that_comes_while_a_worker_starts_reaches_it(tmp_path, monkeypatch):
    """It is sent before the process is known to anybody."""
    start = subprocess.Popen

    def signalled(*args, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return start(*args, **options)

    monkeypatch.setattr("batchinfer_workers.gpu_workers.subprocess.Popen", signalled)
    began = time.monotonic()
    run_gpu_workers(["0"], [], program=[sys.executable, "-S", "-c", CHILD, str(tmp_path)])
    assert time.monotonic() - began < 30, "the child sleeps for 60"


def test_a_worker_that_was_started_wrongly_ends_all(tmp_path, monkeypatch):
    code = run(tmp_path, ["4", "6"], 0, monkeypatch, FAILS="6", CODE="2")
    assert code == 2
    assert sorted(start[0] for start in starts(tmp_path)) == ["4", "6"]


def test_the_command_hands_its_flags_on(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "batchinfer_workers.gpu_workers.run_gpu_workers",
        lambda groups, arguments, **more: seen.append((groups, arguments, more)) or 0,
    )
    flags = [
        "worker", "--model", "a", "--model", "b", "--pool", "p", "--no-enable-prefix-caching", "--enforce-eager",
        "--tensor-parallel-size", "2", "--gpus", "0,1,2,3",
    ]  # fmt: skip
    result = CliRunner().invoke(cli, flags, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    ((groups, arguments, _),) = seen
    assert groups == ["0,1", "2,3"]
    assert arguments == [
        "--model", "a", "--model", "b", "--pool", "p", "--enforce-eager", "--no-enable-prefix-caching",
        "--tensor-parallel-size", "2",
    ]  # fmt: skip
