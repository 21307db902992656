"""The simulator's small runs: invariants hold, and each goal is reached that does not depend on the clock."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from simulate import Device, Limits, simulate
from simulated_workloads import MAKERS

BLOCK = 16
ROOMY = Limits(max_num_seqs=32, max_num_batched_tokens=512, num_blocks=4096)
TIGHT = Limits(max_num_seqs=32, max_num_batched_tokens=512, num_blocks=600)


def blocks_in_a_trie(prompts):
    """Tokens that a cache of all prompts would give: each shareable block seen before, one token always computed."""
    seen, found = set(), 0
    for prompt in prompts:
        prefixes = [tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)]
        shareable = prefixes[: (len(prompt) - 1) // BLOCK]
        found += BLOCK * next((i for i, prefix in enumerate(shareable) if prefix not in seen), len(shareable))
        seen.update(prefixes)
    return found


@pytest.mark.parametrize("name", ["W1", "template", "few-shot", "turns", "adversarial"])
def test_a_workload_says_itself_what_a_trie_would_give(name):
    jobs = list(MAKERS[name](400))
    said = sum(min(job.shared, len(job.prompt) - 1) // BLOCK * BLOCK for job in jobs)
    assert said == blocks_in_a_trie(job.prompt for job in jobs)


@pytest.mark.parametrize("limits", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("name", ["W1", "W2", "template", "few-shot", "turns", "ragged", "adversarial"])
def test_what_is_shared_is_computed_once_and_nobody_is_preempted(name, limits):
    """In a tight pool the few-shot examples alone are four times what it holds, and the window knows 160 rows ahead."""
    report = simulate(name, MAKERS[name](400), limits, Device())
    assert report.requests == 400
    assert report.figures["reuse"] >= (0.97 if limits is ROOMY else 0.93)
    assert report.preemptions == 0


def test_several_jobs_mixed_are_reused_as_if_they_were_sorted():
    report = simulate("mixed", MAKERS["mixed"](1500), ROOMY, Device())
    assert report.figures["reuse"] >= 0.97
    assert report.preemptions == 0
    assert report.figures["tail"] <= 0.05
    assert report.figures["padding"] <= 0.04
