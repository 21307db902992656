"""Proof, from the manifest and the files alone, that every input row has exactly one outcome."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was found. ``problems`` is empty if and only if the output is whole; each is one sentence."""

    output: str
    job_id: str
    num_files: int
    num_rows: int
    counts: dict[str, int]
    input_checked: bool
    """Whether the input was still there, unchanged, and its columns were compared row by row."""
    problems: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(output: str, *, check_input: bool = True) -> VerifyReport:
    """Verify an output folder or ``.parquet`` file, streaming in bounded memory.

    Raises:
        NotFoundError: there is no manifest.
    """
    raise NotImplementedError
