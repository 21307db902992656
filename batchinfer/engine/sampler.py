"""From logits to token ids: greedy or drawn, each row by itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from batchinfer.engine.logit_changes import apply_rules, bar, keep_masked
from batchinfer.engine.philox import uniform
from batchinfer.types import ErrorCode, RowError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from batchinfer.engine.constraint import TokenConstraint
    from batchinfer.engine.head_output import HeadOutput
    from batchinfer.engine.logit_rules import LogitRules
    from batchinfer.engine.sequence import Sequence as Running
    from batchinfer.sampling_params import SamplingParams

SLICE_ELEMENTS = 1 << 21
"""Logits worked on at a time: 8 MiB in float32, so that 1,024 rows of 150,000 never need a copy of their own."""

WEIGHT_BITS = 40
"""A token's weight is its probability relative to the best token's, in units of 2**-40, as an integer: sums of integers
are exact in any order, so a draw cannot depend on how the hardware adds. Less likely tokens than that are never drawn."""

NUCLEUS_CANDIDATES = 1024
"""Top-p looks at so many tokens first, and sorts the whole vocabulary only where they do not hold the mass."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row that samples in this step.

    ``seed`` is the row's own, already derived where the request had none (0 <= seed < 2**63). ``position`` is the
    number of tokens the row has generated so far. The draw depends on the row's logits, ``seed`` and ``position`` only.
    """

    params: SamplingParams
    seed: int
    position: int
    rules: LogitRules | None = None
    constraint: TokenConstraint | None = None
    is_scored: bool = False
    """Whether the log-probability of its token is wanted."""

    @classmethod
    def of(cls, sequence: Running) -> SamplingRow:
        """What a sequence asks of its next token."""
        return cls(
            sequence.params,
            sequence.seed,
            sequence.num_output_tokens,
            sequence.rules,
            sequence.constraint,
            sequence.scores is not None,
        )

    @property
    def changes_logits(self) -> bool:
        """Whether its logits are changed before a token is chosen."""
        return self.rules is not None or self.constraint is not None or self.position < self.params.min_tokens

    @property
    def needs_logits(self) -> bool:
        """Whether more than the largest logit decides; if not, the head's own argmax is the token."""
        return not self.params.is_greedy or self.changes_logits or self.is_scored


class Sampler:
    """Samples the next token of each row; holds no state between calls.

    The logits of a row that asks for it are changed first: bias, repetition penalty, frequency and presence penalty,
    then what must not come (allowed ids, bad words, end tokens before ``min_tokens``, the mask). Filters apply in the
    order of transformers: temperature, top-k, top-p, min-p, typical-p. Candidates whose logits tie with the last one
    kept are kept too. ``eos_token_ids`` and a row's stop ids are barred until it has ``min_tokens`` tokens.
    """

    def __init__(self, eos_token_ids: Collection[int] = ()) -> None:
        self._eos_token_ids = tuple(eos_token_ids)

    def choose(self, head: HeadOutput, rows: Sequence[SamplingRow]) -> list[int | RowError]:
        """The next token of each row of ``head``: its best, or for rows whose logits were kept what they say."""
        best = zip(head.best_index.tolist(), head.best.tolist(), strict=True)
        tokens = [token if math.isfinite(value) else no_candidate(value) for token, value in best]
        if head.kept:
            sampled = self.sample(head.logits, [rows[i] for i in head.kept])
            for i, token in zip(head.kept, sampled, strict=True):
                tokens[i] = token
        return tokens

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int | RowError]:
        """Sample one token a row from ``logits [len(rows), vocab_size]`` (any float dtype; not modified).

        A row without a finite largest logit gets a :class:`RowError` (``engine_error``) in its place.
        """
        tokens: list[int | RowError] = []
        for start, stop in _slices(len(rows), logits.shape[1]):
            tokens += self._sample_slice(logits[start:stop], rows[start:stop])
        return tokens

    def _sample_slice(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int | RowError]:
        changed = [i for i, row in enumerate(rows) if row.changes_logits]
        as_they_are = set(range(len(rows))).difference(changed)
        tokens = _choose(logits.float(), rows, as_they_are)
        if changed:
            own = logits[changed].float()  # a copy of these rows alone
            theirs = [rows[i] for i in changed]
            self._change(own, theirs)
            for i, token in zip(changed, _choose(own, theirs, set(range(len(theirs)))), strict=True):
                tokens[i] = token
        return tokens

    def _change(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        """Change the rows' logits in place, as the rows ask."""
        apply_rules(logits, [row.rules for row in rows])
        early = [(i, row) for i, row in enumerate(rows) if row.position < row.params.min_tokens]
        bar(logits, [(i, token) for i, row in early for token in (*self._eos_token_ids, *row.params.stop_token_ids)])
        for i, row in enumerate(rows):
            mask = None if row.constraint is None else row.constraint.mask()
            if mask is not None:
                keep_masked(logits[i], mask)


def _choose(logits: torch.Tensor, rows: Sequence[SamplingRow], chosen: Collection[int]) -> list[int | RowError]:
    """The likeliest token of each row, or, for those of the ``chosen`` that are not greedy, a drawn one."""
    best, best_ids = logits.max(dim=1)
    best_values, tokens = best.tolist(), best_ids.tolist()
    finite = [math.isfinite(value) for value in best_values]
    drawn = [i for i, row in enumerate(rows) if i in chosen and finite[i] and not row.params.is_greedy]
    if drawn:
        relative = logits[drawn] - best[drawn, None]
        for i, token in zip(drawn, _draw(relative, [rows[i] for i in drawn]).tolist(), strict=True):
            tokens[i] = token
    return [token if ok else no_candidate(value) for token, ok, value in zip(tokens, finite, best_values, strict=True)]


def _slices(num_rows: int, vocab_size: int) -> Iterator[tuple[int, int]]:
    step = max(1, SLICE_ELEMENTS // max(1, vocab_size))
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def no_candidate(best: float) -> RowError:
    """The error of a row whose largest logit is not finite."""
    message = f"the model's logits for this row have no finite maximum ({best}): no token can be chosen"
    if best == -math.inf:
        message += (
            "; what the row rules out together (guide or schema, bad_words, allowed_token_ids, logit_bias) leaves none:"
            " loosen one of them"
        )
    return RowError(ErrorCode.ENGINE_ERROR, message)


@torch.inference_mode()
def draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Draw a token a row of ``logits [len(rows), vocab_size]``, whose largest are finite; int64, where the logits are."""
    drawn = []
    for start, stop in _slices(len(rows), logits.shape[1]):
        part = logits[start:stop].float()
        drawn.append(_draw(part - part.amax(dim=1, keepdim=True), rows[start:stop]))
    return torch.cat(drawn)


def _draw(relative: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Draw one token a row. ``relative [n, vocab_size]``: float32 logits minus the row's largest, so at most 0."""
    cumulative = _weights(relative, [row.params for row in rows]).cumsum(dim=1)
    total = cumulative[:, -1:]
    seeds = torch.tensor([row.seed for row in rows], dtype=torch.int64)
    positions = torch.tensor([row.position for row in rows], dtype=torch.int64)
    target = (uniform(seeds, positions).to(relative.device)[:, None] * total).long().minimum(total - 1)
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _weights(relative: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Integer weights ``[n, vocab_size]`` (see :data:`WEIGHT_BITS`), 0 for tokens that a filter leaves out."""

    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=relative.device)[:, None]

    # so small a temperature is greedy, and must not become 0 / 0 in float32
    temperature = column([max(row.temperature, 1e-30) for row in params], torch.float32)
    weights = (torch.exp(relative / temperature) * 2.0**WEIGHT_BITS).round_().long()
    _keep_top_k(weights, relative, [row.top_k for row in params])
    _keep_top_p(weights, [row.top_p for row in params])
    if any(row.min_p > 0 for row in params):
        least = column([row.min_p * 2.0**WEIGHT_BITS for row in params], torch.float64)
        weights.masked_fill_(weights < least, 0)
    for i, row in enumerate(params):
        if row.typical_p < 1:
            _keep_typical(weights[i], row.typical_p)
    return weights


def _keep_top_k(weights: torch.Tensor, logits: torch.Tensor, top_k: list[int]) -> None:
    """Zero, in place, the weights of tokens whose logit is below the row's k-th largest."""
    chosen = [i for i, k in enumerate(top_k) if 0 < k < weights.shape[1]]
    if not chosen:
        return
    limits = torch.tensor([top_k[i] for i in chosen], device=weights.device)[:, None]
    candidates = logits[chosen]
    threshold = candidates.topk(int(limits.max()), dim=1).values.gather(1, limits - 1)
    weights[chosen] = weights[chosen].masked_fill_(candidates < threshold, 0)


def _keep_top_p(weights: torch.Tensor, top_p: list[float]) -> None:
    """Zero, in place, the weights outside the smallest set of likeliest tokens that holds the share ``top_p``."""
    chosen = [i for i, p in enumerate(top_p) if p < 1]
    if not chosen:
        return
    candidates = weights[chosen]
    mass = candidates.sum(dim=1) * torch.tensor([top_p[i] for i in chosen], dtype=torch.float64, device=weights.device)
    top = candidates.topk(min(NUCLEUS_CANDIDATES, weights.shape[1]), dim=1).values
    if bool((top.sum(dim=1) < mass).any()):
        top = candidates.sort(dim=1, descending=True).values
    before = top.cumsum(dim=1) - top
    num_kept = (before < mass[:, None]).sum(dim=1, keepdim=True)
    threshold = top.gather(1, num_kept - 1)
    weights[chosen] = candidates.masked_fill_(candidates < threshold, 0)


def _keep_typical(weights: torch.Tensor, mass: float) -> None:
    """Zero, in place, the weights ``[vocab_size]`` of the tokens whose surprise is farthest from the entropy.

    Kept is the smallest set that holds the share ``mass``, nearest first (Meister et al., "Locally typical sampling").
    A row at a time, so that no sum depends on the batch.
    """
    possible = weights.nonzero().squeeze(1)
    probability = weights[possible].double() / weights.sum().double()
    surprise = -probability.log()
    distance = (surprise - (surprise * probability).sum()).abs()
    order = distance.argsort(stable=True)
    before = probability[order].cumsum(0) - probability[order]
    limit = distance[order[int((before < mass).sum()) - 1]]
    weights[possible[distance > limit]] = 0
