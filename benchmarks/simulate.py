"""Run the real scheduler and block pool, with a modelled device, on workloads of up to a million requests and more.

    python benchmarks/simulate.py [--workload mixed] [--requests 1000000] [--max-num-seqs 1024] [--json]

Nothing is computed but the schedule: a step's time comes from a cost model, answers' lengths from the workload. Checks
that no request is lost or ends twice, that the pool is whole, that limits hold, and prints what is reached beside the
goals. Ends with 1 if one is missed. Memory is bounded by the window, not by the number of requests.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from simulated_workloads import MAKERS, Job

from batchinfer.engine.block_pool import BlockPool, root_hash
from batchinfer.engine.lengths import LengthHistory
from batchinfer.engine.scheduler import Scheduler
from batchinfer.engine.sequence import Sequence
from batchinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from batchinfer.engine.scheduler import SchedulerOutput

WINDOW = 4
"""Requests known ahead, in full batches, as in ``Engine.generate``."""
CHECK_STEPS = 500
"""Steps between two looks at the whole pool."""
ROOT = root_hash()


@dataclass(frozen=True, slots=True)
class Device:
    """Milliseconds of a step. The default is near SmolLM2-135M in INT8 on two cores of Zen 4 (docs/performance.md)."""

    step_ms: float = 3.0
    token_ms: float = 0.38
    """A token in the layers."""
    sample_ms: float = 0.25
    """A row in the head and the sampler."""
    context_ms: float = 0.0004
    """A token of context that is read."""
    tile: int = 16
    """Rows that a matrix product computes at once; less is padded."""

    def padded(self, num_tokens: int) -> int:
        """Rows that are computed for so many tokens."""
        return -(-num_tokens // self.tile) * self.tile

    def milliseconds(self, output: SchedulerOutput, num_samples: int, context: int) -> float:
        """Time of a step."""
        layers = self.token_ms * self.padded(output.num_tokens)
        return self.step_ms + layers + self.sample_ms * num_samples + self.context_ms * context


@dataclass(frozen=True, slots=True)
class Limits:
    """The engine that is simulated."""

    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 2048
    num_blocks: int = 65_536
    block_size: int = 16


@dataclass(slots=True)
class Report:
    """What came of a run. Times of the device are modelled, those of the scheduler measured."""

    workload: str
    requests: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    ideal_cached_tokens: int = 0
    preemptions: int = 0
    misestimates: int = 0
    computed_rows: int = 0
    padded_rows: int = 0
    sequence_steps: int = 0
    device_seconds: float = 0.0
    tail_seconds: float = 0.0
    tail_tokens: int = 0
    scheduler_seconds: float = 0.0
    peak_rss_mb: int = 0
    goals: dict[str, dict[str, float | bool]] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, float]:
        """What the goals are about, as shares."""
        full_seconds = self.device_seconds - self.tail_seconds
        full_tokens = self.prompt_tokens - self.cached_tokens + self.completion_tokens - self.tail_tokens
        ideal_tail = self.tail_tokens * full_seconds / full_tokens if full_tokens > 0 else 0.0
        return {
            "reuse": self.cached_tokens / self.ideal_cached_tokens if self.ideal_cached_tokens else 1.0,
            "preemptions": self.preemptions,
            "padding": 1 - self.computed_rows / self.padded_rows,
            "tail": max(0.0, self.tail_seconds - ideal_tail) / self.device_seconds,
            "scheduler": self.scheduler_seconds / self.device_seconds,
        }


GOALS = {"reuse": 0.97, "preemptions": 0, "padding": 0.03, "tail": 0.05, "scheduler": 0.02}
"""At least for reuse, at most for the others."""


def simulate(name: str, jobs: Iterable[Job], limits: Limits, device: Device) -> Report:
    """Run all requests to their end.

    Raises:
        AssertionError: an invariant is broken: a request lost, a limit exceeded, a step without progress.
    """
    run = _Run(name, iter(jobs), limits, device)
    while run.feed():
        run.step()
    return run.end()


class _Run:
    """One simulation."""

    def __init__(self, name: str, jobs: Iterator[Job], limits: Limits, device: Device) -> None:
        self._jobs = jobs
        self._limits = limits
        self._device = device
        self._scheduler = Scheduler(
            BlockPool(limits.num_blocks, limits.block_size),
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            history=LengthHistory(warm_up=2 * limits.max_num_seqs),
        )
        self._wanted: dict[Sequence, int] = {}
        self._params: dict[tuple[int, bool], SamplingParams] = {}
        self._is_exhausted = False
        self._ended = 0
        self.report = Report(name)

    def feed(self) -> bool:
        """Keep the window full; whether there is anything left to do."""
        room = (WINDOW + 1) * self._limits.max_num_seqs - len(self._wanted)
        if not self._is_exhausted and room >= self._limits.max_num_seqs // 8:
            found = list(islice(self._jobs, room))
            self._is_exhausted = len(found) < room
            sequences = [self._sequence(job) for job in found]
            started = time.process_time()
            for sequence in sequences:
                self._scheduler.add(sequence)
            self.report.scheduler_seconds += time.process_time() - started
        return bool(self._wanted)

    def _sequence(self, job: Job) -> Sequence:
        report, size = self.report, self._limits.block_size
        report.requests += 1
        report.prompt_tokens += len(job.prompt)
        report.ideal_cached_tokens += min(job.shared, len(job.prompt) - 1) // size * size
        key = job.max_tokens, job.is_exact
        params = self._params.setdefault(key, SamplingParams(max_tokens=job.max_tokens, ignore_eos=job.is_exact))
        sequence = Sequence(
            str(report.requests), params, job.prompt, len(job.prompt), job.max_tokens, 0, report.requests, ROOT,
            None,  # type: ignore[arg-type]  # lengths are known, nothing is decoded
        )  # fmt: skip
        self._wanted[sequence] = job.num_output
        return sequence

    def step(self) -> None:
        """Schedule, model, and let rows end."""
        scheduler, report, limits = self._scheduler, self.report, self._limits
        is_tail = self._is_exhausted and not scheduler.waiting
        started = time.process_time()
        output = scheduler.schedule()
        scheduler.commit(output)
        report.scheduler_seconds += time.process_time() - started
        assert output.scheduled, f"nothing was scheduled in step {report.steps}: {output.stuck}"
        assert output.num_tokens <= limits.max_num_batched_tokens, "the token budget was exceeded"
        assert len(scheduler.running) <= limits.max_num_seqs, "too many sequences run"
        samples = context = 0
        ended = []
        for part in output.scheduled:
            sequence = part.sequence
            context += part.start + part.num_new_tokens
            if part.samples:
                samples += 1
                sequence.token_ids.append(7)
                if sequence.num_output_tokens >= self._wanted[sequence]:
                    ended.append(sequence)
        milliseconds = self._device.milliseconds(output, samples, context)
        started = time.process_time()
        for sequence in ended:
            scheduler.answered(sequence)
        report.scheduler_seconds += time.process_time() - started
        for sequence in ended:
            del self._wanted[sequence]
            report.completion_tokens += sequence.num_output_tokens
            report.cached_tokens += sequence.num_cached_tokens
        self._ended += len(ended)
        report.steps += 1
        report.sequence_steps += len(output.scheduled)
        report.computed_rows += output.num_tokens
        report.padded_rows += self._device.padded(output.num_tokens)
        report.device_seconds += milliseconds / 1000
        if is_tail:
            report.tail_seconds += milliseconds / 1000
            report.tail_tokens += output.num_tokens
        if report.steps % CHECK_STEPS == 0:
            self._check_integrity()

    def end(self) -> Report:
        """Check that nothing is left, and compare with the goals."""
        report = self.report
        self._check_integrity()
        assert self._ended == report.requests, f"{report.requests - self._ended} requests are lost"
        assert self._scheduler.pool.num_used == 0, "blocks are still held"
        report.preemptions = self._scheduler.num_preemptions
        report.misestimates = self._scheduler.num_misestimates
        report.peak_rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        for name, value in report.figures.items():
            is_met = value >= GOALS[name] if name == "reuse" else value <= GOALS[name]
            report.goals[name] = {"value": round(value, 5), "goal": GOALS[name], "is_met": is_met}
        return report

    def _check_integrity(self) -> None:
        scheduler = self._scheduler
        assert {*scheduler.running, *scheduler.waiting} == self._wanted.keys(), "a sequence is lost"
        scheduler.pool.check_integrity([sequence.block_table for sequence in scheduler.running])


def to_dict(report: Report) -> dict[str, Any]:
    """The report as JSON data."""
    names = [name for name in Report.__slots__ if name != "goals"]  # type: ignore[attr-defined]
    mean = report.sequence_steps / report.steps
    return {name: getattr(report, name) for name in names} | {"mean_batch_size": mean, "goals": report.goals}


def print_report(report: Report, seconds: float) -> None:
    """Print for people."""
    print(f"{report.workload}: {report.requests:,} requests in {seconds:.0f} s, peak memory {report.peak_rss_mb} MB")
    tokens = f"{report.prompt_tokens:,} prompt tokens, {report.completion_tokens:,} generated"
    print(f"  {tokens}, {report.steps:,} steps of {report.sequence_steps / report.steps:.0f} sequences")
    cost = report.scheduler_seconds * 1e6 / report.sequence_steps
    print(f"  device {report.device_seconds:,.0f} s (modelled); scheduler {cost:.2f} us a sequence and step (CPU time)")
    print(f"  misestimates {report.misestimates:,}")
    for name, goal in report.goals.items():
        sign = ">=" if name == "reuse" else "<="
        print(
            f"  {name:<12}{goal['value']:>10.4f}  goal {sign} {goal['goal']:<6}{'' if goal['is_met'] else '  MISSED'}"
        )


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", choices=sorted(MAKERS))
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--num-blocks", type=int, default=65_536)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    limits = Limits(options.max_num_seqs, options.max_num_batched_tokens, options.num_blocks)
    is_met = True
    for name in options.workload or ["mixed"]:
        started = time.perf_counter()
        report = simulate(name, MAKERS[name](options.requests), limits, Device())
        if options.json:
            print(json.dumps(to_dict(report)), flush=True)
        else:
            print_report(report, time.perf_counter() - started)
        is_met &= all(goal["is_met"] for goal in report.goals.values())
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
