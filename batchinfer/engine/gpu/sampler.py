"""Samples on the device, and tells the host later: one copy a step, however many rows there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchinfer.engine.gpu.transfer import empty_on_host, mark, upload
from batchinfer.engine.logprobs import packed_score, unpacked_score
from batchinfer.engine.sampler import draw, no_candidate
from batchinfer.types import RowError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.engine.head_output import HeadOutput
    from batchinfer.engine.logprobs import TokenScore
    from batchinfer.engine.sampler import Sampler, SamplingRow

ROW_MULTIPLE = 16
"""The kernels read rows of logits that begin at multiples of so many numbers."""


class Sampled:
    """Tokens of a step, on the device now and on the host when they have arrived."""

    def __init__(
        self,
        tokens: torch.Tensor,
        best: torch.Tensor,
        errors: dict[int, RowError],
        scores: Sequence[tuple[int, int, torch.Tensor]],
    ) -> None:
        """``scores`` are row, likeliest tokens wanted, and bits of :func:`~batchinfer.engine.logprobs.packed_score`."""
        self.tokens = tokens
        """int64 ``[num_rows]``; -1 where none could be chosen."""
        self._errors = errors
        self._scores = [(row, num_top, len(bits)) for row, num_top, bits in scores]
        packed = torch.cat([tokens.int(), best.view(torch.int32), *(bits for _, _, bits in scores)])
        self._host = empty_on_host(packed.shape, torch.int32, packed.device)
        self._host.copy_(packed, non_blocking=True)
        self._copied = mark(packed.device)

    def collect(self) -> tuple[list[int | RowError], dict[int, TokenScore]]:
        """Wait for the tokens; the scores of those rows that asked for them."""
        self._copied.synchronize()
        count = len(self.tokens)
        best = self._host[count : 2 * count].view(torch.float32).tolist()
        tokens: list[int | RowError] = [
            token if token >= 0 else self._errors.get(row) or no_candidate(best[row])
            for row, token in enumerate(self._host[:count].tolist())
        ]
        found = {}
        at = 2 * count
        for row, num_top, size in self._scores:
            if isinstance(token := tokens[row], int):
                found[row] = unpacked_score(self._host[at : at + size], token, num_top)
            at += size
        return tokens, found


class DeviceSampler:
    """The sampler's choices without a look at them: greedy and drawn rows stay on the device.

    Rows whose logits are changed first (bias, penalties, masks, ``min_tokens``) or filtered by ``typical_p`` go the
    way of :class:`~batchinfer.engine.sampler.Sampler`, which waits for the device.
    """

    def __init__(self, sampler: Sampler, device: torch.device, *, uses_kernels: bool | None = None) -> None:
        """``uses_kernels`` draws and scores with the Triton kernels; None: on a CUDA device."""
        self._sampler = sampler
        self._device = device
        self._uses_kernels = device.type == "cuda" if uses_kernels is None else uses_kernels

    @torch.inference_mode()
    def launch(self, head: HeadOutput, rows: Sequence[SamplingRow], num_top: dict[int, int]) -> Sampled:
        """Queue the choice of a token for each row of ``head``; ``num_top`` has the rows whose scores are wanted."""
        is_finite = head.best.isfinite()
        tokens = torch.where(is_finite, head.best_index, -1)
        place_of = {row: place for place, row in enumerate(head.kept)}
        drawn, changed = [], []
        for row in head.kept:
            if rows[row].changes_logits or rows[row].params.typical_p < 1:
                changed.append(row)
            elif not rows[row].params.is_greedy:
                drawn.append(row)
        if drawn:
            logits = self._lines(head, [place_of[row] for row in drawn])
            chosen = self._draw(logits, [rows[row] for row in drawn])
            tokens.index_copy_(0, self._index(drawn), chosen)
            tokens = torch.where(is_finite, tokens, -1)
        errors: dict[int, RowError] = {}
        if changed:
            logits = self._lines(head, [place_of[row] for row in changed])
            found = self._sampler.sample(logits, [rows[row] for row in changed])
            errors = {row: token for row, token in zip(changed, found, strict=True) if isinstance(token, RowError)}
            chosen = self._index([-1 if isinstance(token, RowError) else token for token in found])
            tokens.index_copy_(0, self._index(changed), chosen)
        return Sampled(tokens, head.best, errors, self._scores(head, place_of, tokens, num_top))

    def _draw(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        if not (self._uses_kernels and logits.stride(0) % ROW_MULTIPLE == 0):
            return draw(logits, rows)
        from batchinfer_kernels.sampler import SamplingRows, sample  # noqa: PLC0415 -- needs Triton

        params = [row.params for row in rows]
        wanted = SamplingRows(
            upload([p.temperature for p in params], torch.float32, self._device),
            upload([max(0, p.top_k) for p in params], torch.int32, self._device),
            upload([p.top_p for p in params], torch.float64, self._device),
            upload([p.min_p for p in params], torch.float64, self._device),
            upload([row.seed for row in rows], torch.int64, self._device),
            upload([row.position for row in rows], torch.int32, self._device),
        )
        return sample(logits, wanted)[0].long()

    def _scores(
        self, head: HeadOutput, place_of: dict[int, int], tokens: torch.Tensor, num_top: dict[int, int]
    ) -> list[tuple[int, int, torch.Tensor]]:
        """Row, likeliest tokens wanted, and packed score of each row that is scored."""
        if not num_top:
            return []
        rows = list(num_top)
        if not (self._uses_kernels and head.logits.stride(0) % ROW_MULTIPLE == 0):
            return [
                (row, count, packed_score(head.logits[place_of[row]], tokens[row : row + 1], count))
                for row, count in num_top.items()
            ]
        from batchinfer_kernels.logprobs import token_logprobs  # noqa: PLC0415 -- needs Triton

        logits = self._lines(head, [place_of[row] for row in rows])
        chosen = tokens.index_select(0, self._index(rows))
        most = min(max(num_top.values()), logits.shape[1])
        logprobs, ids, values = token_logprobs(logits, chosen.int(), most)
        ranks = (logits > logits.gather(1, chosen.clamp(min=0)[:, None])).sum(dim=1, dtype=torch.int32) + 1
        packed = torch.cat([logprobs.view(torch.int32)[:, None], ranks[:, None], ids, values.view(torch.int32)], dim=1)
        return [(row, count, packed[i]) for i, (row, count) in enumerate(num_top.items())]

    def _lines(self, head: HeadOutput, places: list[int]) -> torch.Tensor:
        """Some rows of the logits that were kept; all of them without a copy."""
        return head.logits if len(places) == len(head.logits) else head.logits.index_select(0, self._index(places))

    def _index(self, values: list[int]) -> torch.Tensor:
        return upload(values, torch.int64, self._device)
