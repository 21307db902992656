"""Counters of an engine's life: what it did, how full it was, where its time went."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Self


@dataclass(slots=True)
class EngineStats:
    """A snapshot. Counts are since the engine started; ``*_ns`` are integer nanoseconds.

    ``step_ns`` is the time of all steps that computed something, and equals the sum of ``device_ns`` over all
    completions plus ``unfinished_device_ns``.
    """

    num_waiting: int = 0
    """Requests not yet admitted."""
    num_running: int = 0
    """Sequences that hold blocks."""
    steps: int = 0
    """Steps that computed something; a watchdog's sign of life."""
    failed_steps: int = 0
    """Steps that raised and were rolled back."""
    preemptions: int = 0
    """Sequences evicted to be recomputed, since the pool was full."""
    misestimates: int = 0
    """Answers longer than the estimate with which they were let in. Only many at a time lead to a preemption."""

    prompt_tokens: int = 0
    """Prompt tokens of admitted requests, each prompt once."""
    cached_tokens: int = 0
    """Of these, found in the KV cache."""
    prefill_tokens: int = 0
    """Prompt tokens computed, and tokens computed again after a preemption."""
    decode_tokens: int = 0
    """Tokens computed one a sequence and step, to get the next one."""
    completion_tokens: int = 0
    """Tokens sampled for finished and unfinished rows."""
    batched_tokens_limit: int = 0
    """The token budget of a step now: below the configured one after the memory ran out."""

    succeeded: int = 0
    """Rows finished with an answer."""
    errored: int = 0
    """Rows finished with an error."""
    cancelled: int = 0
    """Rows aborted."""

    num_blocks: int = 0
    """KV cache blocks in the pool."""
    used_blocks: int = 0
    """Blocks held by sequences now."""
    peak_used_blocks: int = 0
    """Most blocks held at once."""
    sequence_steps: int = 0
    """Sum over steps of the sequences computed; divided by ``steps``, the mean batch size."""

    step_ns: int = 0
    """Time of the steps, all of it charged to rows."""
    schedule_ns: int = 0
    """Part of ``step_ns`` that chose what to run."""
    model_ns: int = 0
    """Part of ``step_ns`` in the model's forward pass."""
    sample_ns: int = 0
    """Part of ``step_ns`` that chose tokens from logits."""
    unfinished_device_ns: int = 0
    """Charged to rows that are not finished yet."""

    kernels: str = ""
    """What attention runs in: a kernel variant's name or ``torch``."""
    layers: str = ""
    """What the model runs in: ``fused`` layers or ``transformers``."""
    recipe: str = ""
    """How the model is quantised; empty if it is not."""
    kv_cache_dtype: str = ""
    """Precision of keys and values in the cache."""

    @property
    def mean_batch_size(self) -> float:
        """Sequences computed a step, on average."""
        return self.sequence_steps / self.steps if self.steps else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens found in the KV cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Field name to value, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Read what :meth:`to_dict` gave; fields of a newer version are dropped."""
        return cls(**{field.name: data[field.name] for field in fields(cls) if field.name in data})
