"""How one row is sampled. Field names are those of vLLM and the OpenAI API."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_TOKENS = 2**31 - 1
"""Far above any context; keeps sums of estimates within 64 bits."""


class SamplingParams(BaseModel):
    """Sampling of one row; immutable and validated (pydantic's ``ValidationError`` names the field at fault).

    ``temperature`` 0 is greedy and the default: a batch job should give the same data set twice. ``seed`` None means
    that a seed is derived from the job's seed and the row, so that an unseeded row is reproducible too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_tokens: Annotated[
        int, Field(ge=0, le=MAX_TOKENS, description="most tokens to generate; clamped to the context")
    ] = 256
    min_tokens: Annotated[
        int, Field(ge=0, le=MAX_TOKENS, description="tokens before EOS or a stop string may end the row")
    ] = 0
    temperature: Annotated[float, Field(ge=0, le=100, description="0 is greedy")] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1, description="nucleus mass; 1 is off")] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS, description="candidates kept; 0 or -1 is off")] = 0
    min_p: Annotated[float, Field(ge=0, le=1, description="least share of the best token's probability")] = 0.0
    seed: Annotated[int | None, Field(ge=0, lt=2**63, description="seed of this row's random numbers")] = None
    stop: Annotated[tuple[str, ...], Field(description="strings that end the row; cut from the output")] = ()
    stop_token_ids: Annotated[tuple[int, ...], Field(description="token ids that end the row")] = ()
    ignore_eos: Annotated[bool, Field(description="go on past the end-of-sequence token")] = False

    @model_validator(mode="before")
    @classmethod
    def _stop_may_be_one_string(cls, data: object) -> object:
        if isinstance(data, dict) and isinstance(data.get("stop"), str):
            return {**data, "stop": (data["stop"],)}
        if isinstance(data, dict) and data.get("stop") is None and "stop" in data:
            return {**data, "stop": ()}
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}")
        if any(not s or len(s) > MAX_STOP_LENGTH for s in self.stop):
            raise ValueError(f"a stop string must have 1 to {MAX_STOP_LENGTH} characters")
        return self

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def needs_logits(self) -> bool:
        """Whether the row's next token depends on more of the logits than which of them is the largest.

        False for a plainly greedy row: there the index of the largest logit is all that sampling needs.
        """
        return not self.is_greedy or self.min_tokens > 0
