"""What some rows want changed in their logits before a token is drawn: bias, penalties, tokens that must not come."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchinfer_kernels.jit import jit

BLOCK = 1024
"""Entries or logits a program changes at once; a power of two."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Lists of token ids, one a changed row: those of the i-th are ``ids[starts[i] : starts[i + 1]]``, no id twice.

    ``starts`` int32 ``[num_changed + 1]``, ``ids`` int32 and ``values`` as long: float32 biases, or int32 counts.
    """

    starts: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """The changed rows, and what each asks for; what nobody asks for is None.

    ``rows`` int32 ``[num_changed]``, each once. ``bias`` is added (-inf bars a token). ``seen`` are the tokens of the
    prompt and the answer with how often each was *generated*: a repetition penalty is for all of them, frequency and
    presence penalties for those generated (vLLM's rules); ``repetition``, ``frequency`` and ``presence`` are float32
    ``[num_changed]`` (1, 0 and 0: off). ``mask`` int32 ``[num_changed, >= vocab / 32]`` has a bit for each token that may
    come, the lowest bit first.
    """

    rows: torch.Tensor
    bias: Entries | None = None
    seen: Entries | None = None
    repetition: torch.Tensor | None = None
    frequency: torch.Tensor | None = None
    presence: torch.Tensor | None = None
    mask: torch.Tensor | None = None


# one program owns one changed row's entries
@jit()
def _bias_kernel(
    logits_ptr: tl.tensor, stride: tl.tensor, rows_ptr: tl.tensor, starts_ptr: tl.tensor, ids_ptr: tl.tensor, bias_ptr: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    i = tl.program_id(0)
    row_ptr = logits_ptr + tl.load(rows_ptr + i).to(tl.int64) * stride
    end = tl.load(starts_ptr + i + 1)
    for start in range(tl.load(starts_ptr + i), end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        place = row_ptr + tl.load(ids_ptr + at, mask=at < end, other=0)
        x = tl.load(place, mask=at < end, other=0.0) + tl.load(bias_ptr + at, mask=at < end, other=0.0)
        tl.store(place, x, mask=at < end)


# one program owns one changed row's seen tokens
@jit()
def _penalty_kernel(
    logits_ptr: tl.tensor, stride: tl.tensor, rows_ptr: tl.tensor, starts_ptr: tl.tensor, ids_ptr: tl.tensor, counts_ptr: tl.tensor,
    repetition_ptr: tl.tensor, frequency_ptr: tl.tensor, presence_ptr: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    i = tl.program_id(0)
    row_ptr = logits_ptr + tl.load(rows_ptr + i).to(tl.int64) * stride
    repetition, frequency = tl.load(repetition_ptr + i), tl.load(frequency_ptr + i)
    presence = tl.load(presence_ptr + i)
    end = tl.load(starts_ptr + i + 1)
    for start in range(tl.load(starts_ptr + i), end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        place = row_ptr + tl.load(ids_ptr + at, mask=at < end, other=0)
        count = tl.load(counts_ptr + at, mask=at < end, other=0).to(tl.float32)
        x = tl.load(place, mask=at < end, other=0.0)
        # a factor that makes a token less likely whatever its logit's sign; then differences
        x = tl.where(x < 0.0, x * repetition, tl.div_rn(x, repetition))
        x -= frequency * count
        x -= tl.where(count > 0.0, presence, 0.0)
        tl.store(place, x, mask=at < end)


# program (i, j) owns the j-th stretch of the i-th changed row
@jit()
def _mask_kernel(
    logits_ptr: tl.tensor, stride: tl.tensor, rows_ptr: tl.tensor, mask_ptr: tl.tensor, mask_stride: tl.tensor, n: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    i = tl.program_id(0)
    row_ptr = logits_ptr + tl.load(rows_ptr + i).to(tl.int64) * stride
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(mask_ptr + i.to(tl.int64) * mask_stride + at // 32, mask=at < n, other=0)
    is_barred = ((word >> (at % 32)) & 1) == 0
    tl.store(row_ptr + at, tl.full((BLOCK,), float("-inf"), tl.float32), mask=(at < n) & is_barred)


def _check(logits: torch.Tensor, changes: LogitChanges) -> None:
    if logits.dtype != torch.float32 or logits.ndim != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits are {logits.dtype} at strides {logits.stride()}: they must be float32 rows")
    if changes.seen is not None and None in (changes.repetition, changes.frequency, changes.presence):
        raise ValueError("seen tokens need all three penalties; 1, 0 and 0 are off")
    words = triton.cdiv(logits.shape[1], 32)
    if changes.mask is not None and (changes.mask.dtype != torch.int32 or changes.mask.shape[1] < words):
        raise ValueError(
            f"the mask is {tuple(changes.mask.shape)} {changes.mask.dtype}; rows must be {words} int32 words"
        )


def change_logits(logits: torch.Tensor, changes: LogitChanges) -> None:
    """Change rows of float32 ``logits [num_rows, vocab]`` in place: bias, then penalties, then the mask.

    The order of the CPU's sampler. Costs what is changed: 12 bytes an entry, and a pass over masked rows. Log-probabilities
    of the model itself need a copy made before.
    """
    _check(logits, changes)
    num_changed = len(changes.rows)
    if not num_changed:
        return
    stride, rows = logits.stride(0), changes.rows
    if changes.bias is not None:
        bias = changes.bias
        _bias_kernel[(num_changed,)](logits, stride, rows, bias.starts, bias.ids, bias.values, BLOCK, num_warps=4)
    if changes.seen is not None:
        seen = changes.seen
        _penalty_kernel[(num_changed,)](
            logits, stride, rows, seen.starts, seen.ids, seen.values, changes.repetition, changes.frequency,
            changes.presence, BLOCK, num_warps=4,
        )  # fmt: skip
    if changes.mask is not None:
        n = logits.shape[1]
        _mask_kernel[num_changed, triton.cdiv(n, BLOCK)](
            logits, stride, rows, changes.mask, changes.mask.stride(0), n, BLOCK, num_warps=4
        )


def change_logits_reference(logits: torch.Tensor, changes: LogitChanges) -> None:
    """:func:`change_logits` in plain torch, row by row."""
    for i, row in enumerate(changes.rows.tolist()):
        line = logits[row]
        if changes.bias is not None:
            ids, values = _entries(changes.bias, i)
            line[ids] += values
        if changes.seen is not None:
            assert changes.repetition is not None
            assert changes.frequency is not None
            assert changes.presence is not None
            ids, counts = _entries(changes.seen, i)
            x = torch.where(line[ids] < 0, line[ids] * changes.repetition[i], line[ids] / changes.repetition[i])
            line[ids] = x - changes.frequency[i] * counts - changes.presence[i] * (counts > 0)
        if changes.mask is not None:
            bits = (changes.mask[i, :, None] >> torch.arange(32)) & 1
            line.masked_fill_(bits.flatten()[: len(line)] == 0, float("-inf"))


def _entries(entries: Entries, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    own = slice(int(entries.starts[i]), int(entries.starts[i + 1]))
    return entries.ids[own].long(), entries.values[own]
