"""Changes logits in place, for many rows at once and only where a row asks for it.

Each element is changed by itself, so that nothing depends on the batch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.engine.logit_rules import LogitRules


def apply_rules(logits: torch.Tensor, rules: Sequence[LogitRules | None]) -> None:
    """Bias, penalties, allowed ids and bad words, in this order. ``logits [len(rules), vocab_size]``, float32."""
    ruled = [(i, rule) for i, rule in enumerate(rules) if rule is not None]
    _add_bias(logits, [(i, rule) for i, rule in ruled if len(rule.bias_ids)])
    _penalize(logits, [(i, rule) for i, rule in ruled if rule.counts is not None])
    for i, rule in ruled:
        if len(rule.allowed):
            _keep(logits[i], torch.from_numpy(rule.allowed).to(logits.device))
    bar(logits, [(i, token) for i, rule in ruled for token in rule.barred()])


def bar(logits: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Set the logits of pairs of row and token to -inf; tokens beyond the vocabulary are ignored."""
    known = [(i, token) for i, token in pairs if 0 <= token < logits.shape[1]]
    if known:
        rows, tokens = torch.tensor(known, device=logits.device).T
        logits.index_put_((rows, tokens), logits.new_tensor(-math.inf))


def keep_masked(line: torch.Tensor, mask: torch.Tensor) -> None:
    """Set the logits ``[vocab_size]`` of tokens whose bit is not set to -inf; bits that are missing are not set."""
    if line.device.type == "cpu":
        known = torch.from_numpy(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little"))[: line.shape[0]]
    else:
        words = mask.to(line.device)
        known = ((words[:, None] >> torch.arange(32, device=line.device, dtype=words.dtype)) & 1).flatten()
    is_barred = torch.ones(line.shape[0], dtype=torch.bool, device=line.device)
    is_barred[: len(known)] = known[: line.shape[0]] == 0
    line.masked_fill_(is_barred, -math.inf)


def _keep(line: torch.Tensor, token_ids: torch.Tensor) -> None:
    kept = line[token_ids]
    line.fill_(-math.inf)
    line[token_ids] = kept


def _add_bias(logits: torch.Tensor, ruled: Sequence[tuple[int, LogitRules]]) -> None:
    if ruled:
        rows, ids = _places(logits, [(i, rule.bias_ids) for i, rule in ruled])
        bias = torch.from_numpy(np.concatenate([rule.bias for _, rule in ruled])).to(logits.device)
        logits[rows, ids] += bias


def _penalize(logits: torch.Tensor, ruled: Sequence[tuple[int, LogitRules]]) -> None:
    """Repetition first, as a factor that makes a seen token less likely whatever its logit's sign; then differences."""
    tables = [(i, rule.params, rule.counts) for i, rule in ruled if rule.counts is not None and len(rule.counts.ids)]
    if not tables:
        return
    rows, ids = _places(logits, [(i, table.ids) for i, _, table in tables])
    lengths = [len(table.ids) for _, _, table in tables]

    def spread(values: list[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), lengths)).to(logits.device)

    counts = torch.from_numpy(np.concatenate([table.counts for _, _, table in tables])).to(logits)
    values = logits[rows, ids]
    repetition = spread([params.repetition_penalty for _, params, _ in tables])
    values = torch.where(values < 0, values * repetition, values / repetition)
    values -= spread([params.frequency_penalty for _, params, _ in tables]) * counts
    values -= spread([params.presence_penalty for _, params, _ in tables]) * (counts > 0)
    logits[rows, ids] = values


def _places(logits: torch.Tensor, ids: Sequence[tuple[int, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each id, one after the other."""
    rows = np.repeat([i for i, _ in ids], [len(own) for _, own in ids])
    columns = np.concatenate([own for _, own in ids])
    return torch.from_numpy(rows).to(logits.device), torch.from_numpy(columns).to(logits.device)
