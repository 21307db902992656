"""What a model costs on this machine: times of whole steps and of attention over shared prefixes. No torch.

Measured once for a machine and model and kept in a cache folder, a file each; nothing here changes an answer, only how
soon it comes. Files that are damaged, of another version or of something else are ignored and made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from batchinfer.engine.speculation import StepCosts, break_even

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from collections.abc import Sequence as Sequence_

VERSION = 2
"""Raised when something else is measured, so that older files are made anew."""
FOLDER = "calibration"
DISTURBED_SECONDS = 600
"""What was measured beside other work is good for so long: it is better than nothing, and wrong once that work is done."""
MAX_FILES = 64
"""The least recently written go when there are more."""
GAIN = 0.03
"""A larger step must give so much more tokens a second, or it is not worth what it delays."""
DEFAULT_BATCHED_TOKENS = 512
"""The token budget of a step where nothing was measured, and the least one: smaller steps were never faster, and a gain that
other processes' work hid while it was measured would slow prompts down for good."""
LEAST_CHUNK = 64
"""Prompt tokens that a step has room for, whatever decodes."""
SHORT = 3
"""A run that takes less than so small a part of the time there is, is made twice: the first of a size makes its pages."""
NEVER = 2**30
"""More tokens than any group has."""

Point = tuple[int, int]
"""Tokens in a step, and its time in nanoseconds."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Attention of ``num_tokens`` decoding rows over a prefix they share: read together and by each for itself."""

    prefix: int
    """Tokens of it."""
    num_tokens: int
    together_ns: int
    alone_ns: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured; all of it in ascending order."""

    prefill: tuple[Point, ...] = ()
    """Steps of prompts alone."""
    decode: tuple[Point, ...] = ()
    """Steps of decoding rows, of which each token is sampled."""
    shared: tuple[SharedPrefix, ...] = ()

    def batched_tokens(self, max_num_seqs: int) -> int:
        """The token budget of a step: where it stops to gain, and at least a chunk of a prompt beside all that decode."""
        return max(knee(self.prefill), DEFAULT_BATCHED_TOKENS, max_num_seqs + LEAST_CHUNK)

    def least_shared(self) -> dict[int, int]:
        """Tokens of shared prefixes to the tokens that must share one so that reading it together wins."""
        found: dict[int, int] = {}
        for case in sorted(self.shared, key=lambda case: (case.prefix, -case.num_tokens)):
            least = found.setdefault(case.prefix, NEVER)
            is_unbroken = all(c.together_ns < c.alone_ns for c in self.shared if _is_from(c, case))
            found[case.prefix] = min(least, case.num_tokens) if is_unbroken else least
        return found

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Read what ``asdict`` gave.

        Raises:
            ValueError: it is something else.
        """
        try:
            shared = tuple(SharedPrefix(**{k: _positive(v) for k, v in case.items()}) for case in data["shared"])
            return cls(_points(data["prefill"]), _points(data["decode"]), shared)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no calibration: {error!r}") from error


def _is_from(case: SharedPrefix, least: SharedPrefix) -> bool:
    return case.prefix == least.prefix and case.num_tokens >= least.num_tokens


def _points(data: Any) -> tuple[Point, ...]:
    points = tuple((_positive(tokens), _positive(ns)) for tokens, ns in data)
    if any(one[0] >= two[0] for one, two in itertools.pairwise(points)):
        raise ValueError("points are out of order")
    return points


def _positive(value: Any) -> int:
    if type(value) is not int or value <= 0:
        raise ValueError(f"{value!r} is no positive integer")
    return value


def knee(points: Sequence_[Point], gain: float = GAIN) -> int:
    """The least tokens from which on tokens a second grow by less than ``gain``; 0 without points."""
    rates = [tokens / ns for tokens, ns in points]
    for at, (tokens, _) in enumerate(points):
        larger = rates[at + 1 :]
        if not larger or max(larger) < rates[at] * (1 + gain):
            return tokens
    return 0


def measure_curve(
    run: Callable[[int], object], sizes: Sequence_[int], seconds: float, clock: Callable[[], int]
) -> tuple[Point, ...]:
    """Times of ``run(size)`` for sizes that double, until time runs out or nothing is gained.

    The first size is always measured; a further one is not begun if it would take longer than is left, by how the last
    two grew. Of short runs the better of two counts.
    """
    points: list[Point] = []
    run(sizes[0])  # pages and pools of threads are made
    budget = round(seconds * 1e9)
    end = clock() + budget
    for size in sizes:
        growth = points[-1][1] / points[-2][1] if len(points) > 1 else 1.0
        if points and clock() + points[-1][1] * max(1.0, growth) > end:
            break
        best = _timed(run, size, clock)
        if best < budget // SHORT:
            best = min(best, _timed(run, size, clock))
        points.append((size, best))
        if len(points) > 2 and knee(points) <= points[-3][0]:  # two doublings without a gain
            break
    return tuple(points)


def _timed(run: Callable[[int], object], size: int, clock: Callable[[], int]) -> int:
    started = clock()
    run(size)
    return max(1, clock() - started)


def describe(calibration: Calibration, max_num_seqs: int = 0) -> str:
    """What a calibration decides, for people."""
    shared = [
        f"{prefix} tokens " + ("never" if least == NEVER else f"from {least} rows on")
        for prefix, least in calibration.least_shared().items()
    ]
    groups = ", ".join(shared) or "not measured"
    is_known = len(calibration.decode) > 1
    most = f"{break_even(StepCosts(calibration.decode))} rows" if is_known else "unknown"
    return (
        f"{calibration.batched_tokens(max_num_seqs)} tokens a step; shared prefixes read together: {groups}; "
        f"guessing may pay up to a batch of {most}"
    )


class CalibrationStore:
    """The folder of calibrations."""

    def __init__(self, cache_dir: Path) -> None:
        self._folder = cache_dir / FOLDER

    def load(self, key: Mapping[str, str]) -> Calibration | None:
        """What was measured for a machine and model; None if nothing was, or the file is of no use."""
        try:
            data = json.loads(self._path(key).read_text(encoding="utf-8"))
            if data["version"] != VERSION or data["key"] != dict(key):
                return None
            if data.get("disturbed") and time.time() - self._path(key).stat().st_mtime > DISTURBED_SECONDS:
                return None
            return Calibration.from_dict(data["calibration"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def save(self, key: Mapping[str, str], calibration: Calibration, *, is_disturbed: bool = False) -> None:
        """Keep it, for a while if it was disturbed; where that fails the next start measures again."""
        kept = {"version": VERSION, "key": dict(key), "disturbed": is_disturbed, "calibration": asdict(calibration)}
        text = json.dumps(kept, indent=1)
        path = self._path(key)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=".draft-")
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            Path(draft).replace(path)
            for old in self._files()[MAX_FILES:]:
                old.unlink(missing_ok=True)

    def all(self) -> Iterator[tuple[dict[str, str], Calibration]]:
        """What is kept, the latest first."""
        for path in self._files():
            try:
                data = json.loads(path.read_text(encoding="utf-8"))
                if data["version"] == VERSION:
                    yield dict(data["key"]), Calibration.from_dict(data["calibration"])
            except (OSError, ValueError, TypeError, KeyError):
                continue

    def _files(self) -> list[Path]:
        try:
            return sorted(self._folder.glob("*.json"), key=lambda path: -path.stat().st_mtime_ns)
        except OSError:  # one went meanwhile
            return []

    def _path(self, key: Mapping[str, str]) -> Path:
        digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:32]
        return self._folder / f"{digest}.json"
