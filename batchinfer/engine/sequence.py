"""A request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchinfer.engine.block_pool import BlockHash
    from batchinfer.engine.constraint import TokenConstraint
    from batchinfer.engine.logit_rules import LogitRules
    from batchinfer.engine.logprobs import AnswerScores, PromptReader
    from batchinfer.engine.pooling import Pooler
    from batchinfer.engine.speculation import NgramIndex
    from batchinfer.engine.stop import StopChecker
    from batchinfer.models.lora_file import LoraFile
    from batchinfer.sampling_params import SamplingParams

PENDING = -1
"""Stands at the end of ``token_ids`` for a token that the device has sampled and the host does not know yet."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of one row, prompt and answer, and how far they have been computed.

    ``token_ids`` grows by one a sampled token. KV of ``token_ids[:num_computed_tokens]`` is in the blocks of
    ``block_table``, which is only ever appended to while the sequence runs and emptied when it stops; the end that a
    failed step appended is cut.
    """

    request_id: str
    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    """Tokens to generate at most: what was asked for, or less where less fits."""
    seed: int
    arrival: int
    """Rank by age, 0 the oldest."""
    root: BlockHash
    stop: StopChecker
    clamped_max_tokens: int | None = None
    rules: LogitRules | None = None
    """What the row wants changed in its logits; None for most rows."""
    constraint: TokenConstraint | None = None
    """What says, token after token, which may come next; None where all may."""
    max_tokens_if_truncated: int | None = None
    """Tokens to generate at most, once ``max_tokens`` has cut JSON off; None where that is the end."""
    was_lengthened: bool = False
    scores: AnswerScores | None = None
    prompt_scores: PromptReader | None = None
    """Log-probabilities, where the row asks for them."""
    pooler: Pooler | None = None
    """What takes in the prompt's hidden states, where the row is embedded."""
    is_prefill_only: bool = False
    """Whether it ends with its prompt, whose last token is followed by none."""
    adapter: LoraFile | None = None
    """What changes the model for this row; ``root`` keeps its prefixes apart."""
    is_beam: bool = False
    """Whether it is a step of a beam search, whose length says nothing of answers."""

    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the KV cache when they were first needed."""
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of the first full blocks of ``token_ids``, as many as were needed so far."""
    guesses: NgramIndex | None = None
    """What the next tokens are guessed from, once that was tried."""
    num_preemptions: int = 0
    num_cuts: int = 0
    """How often ``block_table`` was not appended to but cut or emptied: copies of it are then void."""
    device_ns: int = 0
    arrived_ns: int = 0
    first_token_ns: int = 0
    """Readings of the clock, see :class:`~batchinfer.engine.latency.Latency`; 0 before."""

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Answer so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is still missing; 1 while the sequence decodes."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that may still be generated."""
        return self.max_tokens - self.num_output_tokens

    @property
    def first_unread(self) -> int | None:
        """First position whose logits or hidden state are wanted and still missing; None where there is none.

        From there on the tokens must be computed, whatever the cache holds.
        """
        if self.prompt_scores is not None:
            return self.prompt_scores.first_missing
        return None if self.pooler is None else self.pooler.first_missing

    @property
    def max_kv_tokens(self) -> int:
        """Most tokens whose KV is ever kept: the last sampled token is never computed."""
        return self.num_prompt_tokens + max(self.max_tokens, 1) - 1

    def append(self, token_id: int) -> bool:
        """Add a generated token; True if the row ends with it (finish reason ``stop``).

        A constraint after which nothing may follow ends it, too, whatever ``min_tokens`` and ``ignore_eos`` say.
        """
        self.token_ids.append(token_id)
        if self.rules is not None:
            self.rules.append(token_id)
        is_over = self.constraint is not None and self.constraint.accept(token_id)
        return self.stop.append(token_id) or is_over

    def lengthen(self) -> bool:
        """Where JSON is cut off, allow twice the tokens, once; False if the answer ends here.

        The same tokens would come again if the row began anew: a draw depends on seed and position alone.
        """
        most, constraint = self.max_tokens_if_truncated, self.constraint
        if most is None or most <= self.max_tokens or constraint is None or constraint.is_complete:
            return False
        self.max_tokens, self.max_tokens_if_truncated, self.was_lengthened = most, None, True
        return True

    @property
    def output_token_ids(self) -> list[int]:
        """The answer's tokens."""
        return self.token_ids[self.num_prompt_tokens :]
