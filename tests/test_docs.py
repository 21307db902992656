"""The README's commands are run, its links lead somewhere, and the generated pages are up to date."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BIN = Path(sys.executable).parent
MODEL = ".models/SmolLM2-135M-Instruct.Q4_1.gguf"
SERVERS = ("batchinfer worker", "batchinfer serve")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language):
    return [text for kind, text in FENCE.findall(README) if kind == language]


def shell_lines():
    """Commands of the README's shell blocks; a backslash joins lines, a comment is not a command."""
    lines = "\n".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return [line.split(" #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


@pytest.fixture
def checkout(tmp_path):
    """A folder that looks like a checkout, whose results vanish with the test."""
    model = ROOT / MODEL
    assert model.exists(), f"{model} is missing: run `make model`"
    (tmp_path / ".models").symlink_to(model.parent)
    (tmp_path / "examples").mkdir()
    for name in ("prompts.parquet", "json_answers.py", "stages.yaml"):
        (tmp_path / "examples" / name).write_bytes((ROOT / "examples" / name).read_bytes())
    return tmp_path


@pytest.fixture
def environment(checkout):
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("BATCHINFER_") or key == "BATCHINFER_KERNEL_CACHE"
    }
    return clean | {"PATH": f"{BIN}:{os.environ['PATH']}", "BATCHINFER_HOME": str(checkout / "home")}


def run(line, checkout, environment):
    return subprocess.run(
        line, shell=True, cwd=checkout, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_readme_is_short():
    assert len(README.splitlines()) < 150


def test_readme_names_only_targets_and_files_that_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in shell_lines():
        if line.startswith("make "):
            assert line.split()[1] in targets, line
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link


@pytest.mark.real_model
@pytest.mark.timeout(600)
def test_readme_commands_run(checkout, environment):
    """Every `batchinfer` line of the README, in order, as a reader would paste it; servers run until the end."""
    servers = []
    try:
        for line in shell_lines():
            if line.startswith(SERVERS):
                servers.append(
                    subprocess.Popen(
                        shlex.split(line),
                        cwd=checkout,
                        env=environment,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
                )
                time.sleep(0.5)
            elif line.startswith("batchinfer "):
                done = run(line, checkout, environment)
                # 3: the job ended and has error rows, as the example's two bad rows ask for
                assert done.returncode in (0, 3), f"{line}\n{done.stdout}\n{done.stderr}"
            elif line.startswith("export "):
                name, _, value = line.removeprefix("export ").partition("=")
                # the team's services are not here; the same lines run embedded
                assert name.startswith("BATCHINFER_")
                assert value
            else:
                assert line.startswith(("make ", "git clone", "cd ", "curl ")), (
                    f"nobody checks this README line: {line}"
                )
    finally:
        for server in servers:
            server.send_signal(signal.SIGTERM)
        codes = [server.wait(timeout=60) for server in servers]
    assert codes == [0] * len(servers)


@pytest.mark.real_model
@pytest.mark.timeout(600)
def test_readme_python_runs(checkout, environment):
    for block in blocks("python"):
        done = subprocess.run(
            [sys.executable, "-c", block],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "Paris" in done.stdout


def test_generated_pages_are_up_to_date():
    """`make docs` writes what is committed."""
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_example_prompts_are_what_the_script_makes():
    """64 rows; messages where they are not null, else the prompt; one over-long row and one empty row."""
    import pyarrow.parquet as pq

    rows = pq.read_table(ROOT / "examples" / "prompts.parquet").to_pylist()
    assert len(rows) == 64
    assert {"prompt", "messages"} <= set(rows[0])
    assert sum(row["messages"] is None and row["prompt"] == "" for row in rows) == 1
    assert sum(row["messages"] is None and len(row["prompt"]) > 30_000 for row in rows) == 1
    assert all((row["messages"] is None) != (row["prompt"] is None) for row in rows)
