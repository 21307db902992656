"""What ends a model: the greedy head, sampling, log-probabilities, changes of logits."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch

from batchinfer.engine.philox import uniform
from batchinfer_kernels.lm_head import HeadWeights, lm_head_argmax_reference, lm_head_reduce_reference
from batchinfer_kernels.logit_changes import Entries, LogitChanges, change_logits_reference
from batchinfer_kernels.logprobs import token_logprobs_reference
from batchinfer_kernels.reference import quantize_rows
from batchinfer_kernels.sampler import SamplingRows
from benchmarks.gpu.case import BF16, F32, FLOATS, I32, NAMES, Call, Case, Work, excess, num_bytes, op, randn, rounded

if TYPE_CHECKING:
    from typing import Any

    from benchmarks.gpu.case import Sizes

WEIGHT = 2.0**40
"""Of the likeliest token, as the sampler counts."""
MASS = 1e-4
"""Share of the probability by which a draw may miss its token: exponentials that differ in the last bit, and tokens at the
edge of a filter that they let in or out."""


def head_cases(sizes: Sizes) -> list[Case]:
    """All of them, for a decode step's rows."""
    shape = f"{sizes.rows} x {sizes.vocab}"
    found = []
    for dtype in FLOATS:
        kind = NAMES[dtype]
        found += [
            Case("lm_head_argmax", f"{kind} {shape} x {sizes.hidden}", dtype, partial(_argmax, sizes, dtype)),
            Case("lm_head_reduce", f"{kind} 8 largest {shape} x {sizes.hidden}", dtype, partial(_reduce, sizes, dtype)),
            Case("sample", f"{kind} greedy {shape}", dtype, partial(_sample, sizes, dtype, 0.0, 0, 1.0, 0.0)),
            Case("sample", f"{kind} top-k, top-p, min-p {shape}", dtype, partial(_sample, sizes, dtype, 0.8, 50, 0.9, 0.02)),
            Case("token_logprobs", f"{kind} {sizes.num_top} largest, {shape}", dtype, partial(_logprobs, sizes, dtype)),
        ]  # fmt: skip
    return [
        *found,
        Case(
            "lm_head_reduce",
            f"w8a8 8 largest {shape} x {sizes.hidden}",
            torch.int8,
            partial(_reduce, sizes, torch.int8),
        ),
        Case("sample", f"bf16 temperature {shape}", BF16, partial(_sample, sizes, BF16, 0.8, 0, 1.0, 0.0)),
        Case("change_logits", f"f32 {shape}", F32, partial(_changes, sizes)),
    ]


def _argmax(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Call:
    m, n, k = sizes.rows, sizes.vocab, sizes.hidden
    x, w = randn(device, m, k, dtype=dtype), randn(device, n, k, dtype=dtype, scale=k**-0.5, seed=1)

    def error(actual: Any, expected: Any) -> float:
        """Two tokens whose logits differ by less than a sum's order may cost are equally good."""
        (tokens, logprobs), (_, best) = actual, expected
        logits = (x.float() * w.float()[tokens.long().clamp(0, n - 1)]).sum(dim=1)
        highest = (x.float() @ w.float().T).max(dim=1).values
        return max(excess(logits, highest, 1e-5, 1e-3), excess(logprobs, best, 1e-4, 2e-3))

    def torchs() -> torch.Tensor:
        return (x @ w.T).argmax(dim=1)

    unit = None if dtype == F32 else "bf16"
    work = Work(num_bytes(x, w) + 8 * m, 2.0 * m * n * k, unit)
    return Call(
        partial(op("lm_head_argmax"), x, w),
        partial(lm_head_argmax_reference, x, w),
        error,
        work,
        ("mm, argmax", torchs),
    )


def _reduce(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Call:
    """The largest eight and the log-sum-exp: of values, since equally good tokens may change places."""
    m, n, k = sizes.rows, sizes.vocab, sizes.hidden
    x, w = randn(device, m, k), randn(device, n, k, scale=k**-0.5, seed=1)
    x_scale = w_scale = None
    if dtype == torch.int8:
        (x, x_scale), (w, w_scale) = quantize_rows(x), quantize_rows(w)
    x, w = x.to(dtype), w.to(dtype)

    def values() -> tuple[torch.Tensor, ...]:
        found, _ = lm_head_reduce_reference(x, HeadWeights(w, w_scale), x_scale=x_scale, top_k=8)
        return found.best, found.token, found.logprob, found.top_values

    def error(actual: Any, expected: Any) -> float:
        return max(excess(actual[i], expected[i], 1e-4, 2e-3) for i in (0, 2, 3))

    def torchs() -> tuple[torch.Tensor, ...]:
        logits = x.to(BF16) @ w.to(BF16).T if dtype == torch.int8 else x @ w.T
        return logits.float().logsumexp(dim=1), *logits.topk(8, dim=1)

    unit = {F32: None, torch.int8: "int8"}.get(dtype, "bf16")
    work = Work(num_bytes(x, w) + 8 * m * 9, 2.0 * m * n * k, unit)
    return Call(
        partial(op("lm_head_reduce"), x, w, x_scale, w_scale, None, 1.0, None, 8), values, error, work,
        ("mm, logsumexp, topk", torchs),
    )  # fmt: skip


def _sample(
    sizes: Sizes, dtype: torch.dtype, temperature: float, top_k: int, top_p: float, min_p: float, device: torch.device
) -> Call:
    m, n = sizes.rows, sizes.vocab
    logits = randn(device, m, n, scale=3.0).to(dtype)

    def column(value: float, kind: torch.dtype) -> torch.Tensor:
        return torch.full((m,), value, dtype=kind, device=device)

    rows = SamplingRows(
        column(temperature, F32), column(top_k, I32), column(top_p, torch.float64), column(min_p, torch.float64),
        torch.arange(m, device=device) * 7919, torch.arange(m, dtype=I32, device=device),
    )  # fmt: skip
    run = partial(op("sample"), logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.position)
    expected = partial(_shares, logits.double(), rows)

    def error(actual: Any, shares: Any) -> float:
        tokens, logprobs = actual
        begin, end, place, exact = shares
        at = tokens.long().clamp(0, n - 1)[:, None]
        exact_of, begins, ends = (x.gather(1, at)[:, 0] for x in (exact, begin, end))
        missed = torch.maximum(begins - place, place - ends).clamp_min(0) / MASS
        return max(
            float(missed.max()), excess(logprobs, exact_of, 1e-4, 1e-4), 0.0 if (tokens >= 0).all() else math.inf
        )

    def torchs() -> torch.Tensor:
        if not temperature:
            return logits.argmax(dim=1)
        return torch.multinomial(torch.softmax(logits.float() / temperature, dim=1), 1)

    return Call(
        run,
        expected,
        error,
        Work(num_bytes(logits) + 8 * m),
        ("argmax" if not temperature else "softmax, multinomial", torchs),
    )


def _shares(x: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, ...]:
    """Where each token's share of the kept probability begins and ends, the number drawn, and log-probabilities.

    All in float64, by sorting: ``[num_rows, vocab]`` but for the number. A greedy row's best token has all.
    """
    n = x.shape[1]
    exact = torch.log_softmax(x, dim=1)
    relative = x - x.max(dim=1, keepdim=True).values
    temperature = rows.temperature.double()[:, None]
    if not bool(temperature.any()):
        best = torch.zeros_like(x).scatter(1, x.argmax(dim=1, keepdim=True), 1.0)
        return torch.where(best > 0, 0.0, 2.0), torch.where(best > 0, 1.0, 3.0), torch.full((len(x),), 0.5).to(x), exact
    weights = (WEIGHT * torch.exp(relative / temperature)).round()
    top_k = int(rows.top_k[0])
    if 0 < top_k < n:
        least = x.sort(dim=1, descending=True).values[:, top_k - 1 : top_k]
        weights = weights.where(x >= least, 0.0)
    if float(rows.top_p[0]) < 1:
        order = weights.sort(dim=1, descending=True).values
        reached = order.cumsum(dim=1) >= order.sum(dim=1, keepdim=True) * rows.top_p[:, None]
        last = order.gather(1, reached.int().argmax(dim=1, keepdim=True))
        weights = weights.where(weights >= last, 0.0)
    weights = weights.where(weights >= rows.min_p[:, None] * WEIGHT, 0.0)
    shares = weights / weights.sum(dim=1, keepdim=True)
    end = shares.cumsum(dim=1)
    place = uniform(rows.seed.cpu(), rows.position.long().cpu()).to(x)
    # a token that was filtered out has no place at all
    return torch.where(shares > 0, end - shares, 2.0), torch.where(shares > 0, end, 3.0), place, exact


def _logprobs(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Call:
    m, n, top = sizes.rows, sizes.vocab, sizes.num_top
    logits = randn(device, m, n, scale=3.0).to(dtype)
    tokens = torch.arange(m, dtype=I32, device=device)

    def error(actual: Any, expected: Any) -> float:
        (chosen, ids, largest), (exact, exact_ids, exact_largest) = actual, expected
        ties = torch.equal(ids, exact_ids)
        return max(
            excess(chosen, exact, 1e-4, 1e-4), excess(largest, exact_largest, 1e-4, 1e-4), 0.0 if ties else math.inf
        )

    def torchs() -> object:
        return torch.log_softmax(logits.float(), dim=1).topk(top, dim=1)

    run = partial(op("token_logprobs"), logits, tokens, top)
    expected = partial(token_logprobs_reference, logits, tokens, top)
    return Call(run, expected, error, Work(num_bytes(logits) + m * (8 + 8 * top)), ("log_softmax, topk", torchs))


def _changes(sizes: Sizes, device: torch.device) -> Call:
    m, n = sizes.rows, sizes.vocab
    logits = randn(device, m, n, scale=3.0)
    first = logits.clone()
    generator = torch.Generator().manual_seed(0)
    many = min(n // 2, 1000)

    def entries(dtype: torch.dtype) -> Entries:
        ids = torch.cat([torch.randperm(n, generator=generator)[:many] for _ in range(m)]).int()
        starts = torch.arange(m + 1, dtype=I32) * many
        values = (ids % 3).to(dtype)
        return Entries(starts.to(device), ids.to(device), values.to(device))

    mask = torch.randint(-(2**31), 2**31, (m, -(-n // 32)), generator=generator).int().to(device)
    penalties = [torch.full((m,), value, device=device) for value in (1.5, 0.5, 0.25)]
    rows = torch.randperm(m, generator=generator).int().to(device)
    bias, seen = entries(F32), entries(I32)
    changes = LogitChanges(rows, bias, seen, *penalties, mask)

    def run() -> torch.Tensor:
        op("change_logits")(
            logits, rows, [bias.starts, bias.ids, bias.values], [seen.starts, seen.ids, seen.values], penalties, mask
        )
        return logits

    def expected() -> torch.Tensor:
        change_logits_reference(first, changes)
        return first

    barred = num_bytes(logits) // 2  # half of the mask's bits
    return Call(run, expected, rounded(), Work(num_bytes(mask) + barred + 2 * 12 * m * many))
