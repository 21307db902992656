"""The commands of the page on money are run as a reader would paste them."""

import pytest

from tests.test_docs import FENCE, ROOT, checkout, environment, run

__all__ = ["checkout", "environment"]


@pytest.mark.real_model
@pytest.mark.timeout(300)
def test_the_page_runs(checkout, environment):
    blocks = [text for kind, text in FENCE.findall((ROOT / "docs" / "cost.md").read_text()) if kind == "bash"]
    assert len(blocks) == 4
    for text in blocks:
        (checkout / "block.sh").write_text(text)
        done = run("bash -e block.sh", checkout, environment)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        if "forecast" in text:
            assert "completion_tokens" in done.stdout
    assert (checkout / "usage.parquet").exists()
