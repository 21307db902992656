"""How far unfinished answers have come, and going on from there instead of from zero.

What follows a row's tokens depends on those tokens, its seed and its parameters alone, so an answer that goes on in
another engine has the bytes that it would have had without the cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchinfer.engine.logprobs import TokenScore
from batchinfer.types import SampleProgress

if TYPE_CHECKING:
    from batchinfer.engine.sequence import Sequence

NOTHING = SampleProgress()


def progress_of(sequence: Sequence, *, has_ended: bool) -> SampleProgress:
    """The tokens of one answer so far. One that has ended lacks its last: it is computed again, and ends again."""
    token_ids, scores = sequence.output_token_ids, sequence.scores
    if has_ended:
        token_ids = token_ids[:-1]
    if not token_ids:
        return NOTHING
    if scores is None:
        return SampleProgress(tuple(token_ids))
    if scores.num_top is not None:
        kept = [(s.token_id, s.logprob, s.rank, s.top) for s in scores.tokens[: len(token_ids)]]
        return SampleProgress(tuple(token_ids), tuple(kept))
    # only the sum of all was kept, which cannot be taken apart again
    return NOTHING if has_ended else SampleProgress(tuple(token_ids), cumulative=scores.cumulative)


def go_on(sequence: Sequence, progress: SampleProgress, vocab_size: int) -> bool:
    """Give a new sequence the tokens it had; False if they cannot have been its own, and it must be made anew."""
    if not progress.token_ids:
        return True
    if len(progress.token_ids) >= sequence.max_tokens:
        return False
    scores = sequence.scores
    if scores is not None:
        if scores.num_top is None:
            if progress.cumulative is None:
                return False
            scores.cumulative = progress.cumulative
        elif len(progress.scores) != len(progress.token_ids):
            return False
        for token_id, logprob, rank, top in progress.scores if scores.num_top is not None else ():
            scores.append(TokenScore(token_id, logprob, rank, tuple((token, value) for token, value in top)))
    for token_id in progress.token_ids:
        if not 0 <= token_id < vocab_size or sequence.append(token_id):
            return False
    sequence.num_preemptions = 1  # what it finds in the cache is its own, and no hit
    return True
