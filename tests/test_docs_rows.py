"""The examples of the pages on what a row may ask for are run as a reader would paste them."""

import subprocess
import sys

import pytest

from tests.test_docs import FENCE, ROOT, checkout, environment, run

__all__ = ["checkout", "environment"]


@pytest.mark.real_model
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page",
    [
        "sampling",
        "logprobs",
        "samples",
        "structured_output",
        "tools",
        "reasoning",
        "chat",
        "convert",
        "tasks",
        "lora",
        "stages",
    ],
)
def test_the_page_runs(page, checkout, environment):
    blocks = FENCE.findall((ROOT / "docs" / f"{page}.md").read_text())
    assert blocks
    for language, text in blocks:
        if language == "bash":
            for line in text.strip().splitlines():
                done = run(line, checkout, environment)
                assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        else:
            assert language == "python"
            command = [sys.executable, "-c", text]
            done = subprocess.run(
                command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=120, check=False
            )
            assert done.returncode == 0, done.stderr
