"""Counters of an engine's life: what it did, how full it was, where its time went."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
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
    out_of_memory: int = 0
    """Of these, those that ran out of memory and were made smaller."""
    preemptions: int = 0
    """Sequences evicted to be recomputed, since the pool was full."""
    misestimates: int = 0
    """Answers longer than the estimate with which they were let in. Only many at a time lead to a preemption."""

    prompt_tokens: int = 0
    """Prompt tokens of admitted requests, each prompt once."""
    cached_tokens: int = 0
    """Of these, found in the KV cache."""
    ideal_cached_tokens: int = 0
    """Prompt tokens that a cache without end would have given, for all requests so far, in whole blocks."""
    padding_tokens: int = 0
    """Rows computed for nothing."""
    prefill_tokens: int = 0
    """Prompt tokens computed, tokens computed again after a preemption, and forced ones."""
    decode_tokens: int = 0
    """Tokens computed one a sequence and step, to get the next one."""
    guessed_tokens: int = 0
    """Tokens guessed and computed behind the known ones (speculation); not in ``decode_tokens``."""
    accepted_tokens: int = 0
    """Of these, the right ones: tokens that came without a step of their own."""
    completion_tokens: int = 0
    """Tokens generated for finished and unfinished rows."""
    forced_tokens: int = 0
    """Of these, tokens that a grammar left no choice of: computed together, not sampled."""
    batched_tokens_limit: int = 0
    """The token budget of a step now: below the configured one for some time after the memory ran out."""

    succeeded: int = 0
    """Rows finished with an answer."""
    errored: int = 0
    """Rows finished with an error."""
    cancelled: int = 0
    """Rows aborted."""

    max_num_seqs: int = 0
    """Sequences that a step has place for."""
    num_blocks: int = 0
    """KV cache blocks in the pool."""
    used_blocks: int = 0
    """Blocks held by sequences now."""
    peak_used_blocks: int = 0
    """Most blocks held at once."""
    sequence_steps: int = 0
    """Sum over steps of the sequences computed; divided by ``steps``, the mean batch size."""

    first_tokens: int = 0
    """Sequences that have a first token, ..."""
    first_token_ns: int = 0
    """... and how long they waited for it, from the moment the engine got them."""
    later_tokens: int = 0
    """Tokens after the first one, of sequences that have ended, ..."""
    later_token_ns: int = 0
    """... and the time from the first to the last of them."""

    step_ns: int = 0
    """Time of the steps, all of it charged to rows."""
    schedule_ns: int = 0
    """Part of ``step_ns`` that chose what to run."""
    model_ns: int = 0
    """Part of ``step_ns`` in the model's forward pass."""
    sample_ns: int = 0
    """Part of ``step_ns`` that chose tokens from logits."""
    gemm_ns: int = 0
    """Of ``profiled_ns``, in the layers' matrix products."""
    attention_ns: int = 0
    """Of ``profiled_ns``, in attention."""
    elementwise_ns: int = 0
    """Of ``profiled_ns``, in norms, activations, rotations, conversions and the cache's writes."""
    head_ns: int = 0
    """Of ``profiled_ns``, in the product with the vocabulary."""
    profiled_ns: int = 0
    """Time in the model of those steps that were timed in parts: one in 32, in fused layers only."""
    roofline_ns: int = 0
    """What the steps would have taken at the device's measured ceilings of computing and memory; 0 if these are not
    known. Sums of several engines are exact."""
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

    @property
    def tokens_per_second(self) -> float:
        """Tokens generated a second of steps."""
        return self.completion_tokens / (self.step_ns / 1e9) if self.step_ns else 0.0

    @property
    def occupancy(self) -> float:
        """Mean batch size over the largest."""
        return self.mean_batch_size / self.max_num_seqs if self.max_num_seqs else 0.0

    @property
    def reuse(self) -> float | None:
        """Cached prompt tokens over those that a cache without end would have given; None if nothing is shared."""
        return self.cached_tokens / self.ideal_cached_tokens if self.ideal_cached_tokens else None

    @property
    def padding(self) -> float:
        """Share of the computed rows that were padding."""
        rows = self.prefill_tokens + self.decode_tokens + self.padding_tokens
        return self.padding_tokens / rows if rows else 0.0

    @property
    def roofline_share(self) -> float | None:
        """Share of the physical limit that the steps reached; None if the device's ceilings are not known."""
        return self.roofline_ns / self.step_ns if self.roofline_ns and self.step_ns else None

    @property
    def time_split(self) -> dict[str, float]:
        """Shares of the steps' time, which sum to 1. The model's parts are from the steps that were timed.

        ``model`` is what was not taken apart; ``python`` everything outside of scheduling, model and sampler, and
        inside the model what lies between its parts.
        """
        if not self.step_ns:
            return {}
        split = {"schedule": self.schedule_ns / self.step_ns, "sampling": self.sample_ns / self.step_ns}
        model = self.model_ns / self.step_ns
        if self.profiled_ns:
            for kind in ("gemm", "attention", "elementwise", "head"):
                split[kind] = model * getattr(self, f"{kind}_ns") / self.profiled_ns
        else:
            split["model"] = model
        return split | {"python": max(0.0, 1 - sum(split.values()))}

    def report(self) -> dict[str, Any]:
        """The figures that say how well an engine was used, ready for JSON; shares are between 0 and 1."""
        names = (
            *("kernels", "layers", "recipe", "steps", "preemptions", "misestimates", "out_of_memory"),
            *("batched_tokens_limit", "guessed_tokens", "accepted_tokens"),
        )
        figures = {
            "tokens_per_second": self.tokens_per_second,
            "mean_batch_size": self.mean_batch_size,
            "occupancy": self.occupancy,
            "reuse": self.reuse,
            "padding": self.padding,
            "roofline_share": self.roofline_share,
        }
        return (
            {name: getattr(self, name) for name in names}
            | {name: None if value is None else round(value, 4) for name, value in figures.items()}
            | {"time_split": {kind: round(share, 4) for kind, share in self.time_split.items()}}
        )

    def since(self, earlier: EngineStats) -> EngineStats:
        """What was counted after an earlier snapshot; what is a state and no count stays as it is now."""
        counted = {name: getattr(self, name) - getattr(earlier, name) for name in _COUNTED}
        return replace(self, **counted)

    def to_dict(self) -> dict[str, Any]:
        """Field name to value, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Read what :meth:`to_dict` gave; fields of a newer version are dropped."""
        return cls(**{field.name: data[field.name] for field in fields(cls) if field.name in data})


_STATES = {"num_waiting", "num_running", "batched_tokens_limit", "max_num_seqs", "num_blocks", "used_blocks"}
_STATES |= {"peak_used_blocks", "unfinished_device_ns"}
_COUNTED = tuple(field.name for field in fields(EngineStats) if field.type == "int" and field.name not in _STATES)
