"""Looking at an input before it runs: a stratified sample of its rows, tokenised."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from batchinfer.types import ErrorCode, RowError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchinfer.dataset.prompt import RowInput, RowReader
    from batchinfer.dataset.source import InputSource
    from batchinfer.jobs.token_process import Encoder
    from batchinfer.types import Request

NUM_STRATA = 32
"""The input is cut into so many equal ranges, and each gives the same number of rows, one after the other."""
SAMPLE_ROWS = 512
ENCODE_ROWS = 128
"""Rows tokenised at once."""


@dataclass(slots=True)
class Stratum:
    """What the sampled rows of one range are like."""

    num_rows: int = 0
    num_errors: int = 0
    prompt_tokens: int = 0
    max_tokens: int = 0
    """Sum of the rows' limits: rows may have limits of their own."""


@dataclass(slots=True)
class Survey:
    """A sample of an input. ``is_whole``: every row was looked at."""

    num_rows: int
    is_whole: bool
    strata: list[Stratum] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def sampled_rows(self) -> int:
        """Rows looked at."""
        return sum(one.num_rows for one in self.strata)

    @property
    def runnable_share(self) -> float:
        """Share of rows that will run."""
        rows = self.sampled_rows
        return (rows - sum(one.num_errors for one in self.strata)) / rows if rows else 0.0

    @property
    def mean_max_tokens(self) -> float:
        """Most answer tokens of a row that runs, on the average."""
        runnable = self.sampled_rows - sum(one.num_errors for one in self.strata)
        return sum(one.max_tokens for one in self.strata) / runnable if runnable else 0.0

    def draw_prompt_tokens(self) -> Callable[[Random], float]:
        """A draw of the prompt tokens of all rows: a bootstrap over the strata.

        Rows beside each other are alike, so a stratum and not a row is what is drawn again.
        """
        means = [one.prompt_tokens / one.num_rows for one in self.strata if one.num_rows]
        if self.is_whole or not means:
            total = float(sum(one.prompt_tokens for one in self.strata))
            return lambda _random: total
        # the bootstrap's spread is that of n, a sample's that of n - 1
        center, stretch = math.fsum(means) / len(means), math.sqrt(len(means) / max(1, len(means) - 1))

        def draw(random: Random) -> float:
            mean = math.fsum(random.choices(means, k=len(means))) / len(means)
            return max(0.0, center + (mean - center) * stretch) * self.num_rows

        return draw


def survey_rows(source: InputSource, reader: RowReader, encoder: Encoder, *, sample_rows: int = SAMPLE_ROWS) -> Survey:
    """Sample and tokenise. The same input gives the same sample.

    Raises:
        InputError: the input cannot be read.
    """
    ranges = list(sample_ranges(source.num_rows, sample_rows))
    survey = Survey(source.num_rows, is_whole=source.num_rows <= sample_rows)
    for start, end in ranges:
        stratum = Stratum()
        for rows in _batches(source, reader, start, end):
            _look_at(rows, encoder, stratum, survey.errors)
        survey.strata.append(stratum)
    return survey


def sample_ranges(num_rows: int, sample_rows: int) -> Iterator[tuple[int, int]]:
    """Row ranges of the sample: one in each stratum, at a place that only the number of rows decides."""
    if num_rows <= sample_rows:
        if num_rows:
            yield 0, num_rows
        return
    num_strata = min(NUM_STRATA, sample_rows)
    random, size = Random(num_rows), sample_rows // num_strata  # noqa: S311 -- no secret
    for index in range(num_strata):
        first, last = index * num_rows // num_strata, (index + 1) * num_rows // num_strata
        start = first + random.randrange(max(1, last - first - size + 1))
        yield start, min(start + size, last)


def _batches(source: InputSource, reader: RowReader, start: int, end: int) -> Iterator[list[RowInput]]:
    for first, batch in source.iter_batches(start, end, reader.columns, ENCODE_ROWS):
        yield reader.read(batch, first)


def _look_at(rows: list[RowInput], encoder: Encoder, stratum: Stratum, errors: dict[str, int]) -> None:
    stratum.num_rows += len(rows)
    for found in encode_rows(rows, encoder):
        if isinstance(found, str):
            errors[found] = errors.get(found, 0) + 1
            stratum.num_errors += 1
            continue
        stratum.prompt_tokens += len(found.tokens)
        stratum.max_tokens += found.max_tokens


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """A row that can run: its request, prompt and the most answer tokens that it may have, over all samples."""

    request: Request
    tokens: list[int]
    max_tokens: int


def encode_rows(rows: list[RowInput], encoder: Encoder) -> Iterator[EncodedRow | str]:
    """Each row tokenised, or the code that says why it will not run."""
    requests = [row.request for row in rows if row.request is not None]
    for row in rows:
        if row.request is None:
            yield str(row.error.code) if row.error is not None else "skipped"
    for request, tokens in zip(requests, encoder.encode(requests), strict=True):
        if isinstance(tokens, RowError):
            yield str(tokens.code)
            continue
        params, room = request.params, sys.maxsize
        if encoder.max_model_len is not None:
            room = encoder.max_model_len - len(tokens)
        if room < min(1, params.max_tokens):
            yield str(ErrorCode.CONTEXT_LENGTH_EXCEEDED)
        else:
            yield EncodedRow(request, tokens, min(params.max_tokens, room) * params.num_sequences)
