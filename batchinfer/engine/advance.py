"""How a sequence goes on from a sampled token: to its next, to its end, or over tokens that need no sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchinfer.types import ErrorCode, FinishReason, RowError

if TYPE_CHECKING:
    from batchinfer.engine.sequence import Sequence

Outcome = FinishReason | RowError | None
"""How a sequence ends; None while it goes on."""


def advance(sequence: Sequence, token: int | RowError) -> Outcome:
    """Add a sampled token, and those that its constraint forces after it."""
    constraint = sequence.constraint
    if isinstance(token, RowError):
        fault = None if constraint is None else constraint.fault
        return token if fault is None else RowError(ErrorCode.ENGINE_ERROR, fault)
    if sequence.max_tokens == 0:  # only the prompt was wanted
        return FinishReason.LENGTH
    try:
        outcome = _append(sequence, token)
        while outcome is None and constraint is not None and (forced := constraint.forced()):
            for forced_token in forced:
                outcome = _append(sequence, forced_token)
                if outcome is not None:
                    break
    except Exception as error:  # noqa: BLE001 -- text of one row must not break its neighbours
        return RowError(ErrorCode.ENGINE_ERROR, f"the token could not be added: {type(error).__name__}: {error}")
    return outcome


def _append(sequence: Sequence, token: int) -> FinishReason | None:
    if sequence.append(token):
        return FinishReason.STOP
    if sequence.num_remaining_tokens == 0 and not sequence.lengthen():
        return FinishReason.LENGTH
    return None
