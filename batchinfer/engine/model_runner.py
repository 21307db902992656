"""Runs the model on a step's tokens: packs inputs, keeps the KV cache, gives logits of the rows that sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil
import torch

from batchinfer.engine.attention import ATTENTION_NAME, AttentionOptions, register_attention
from batchinfer.engine.attention_backend import bytes_per_block, choose_attention
from batchinfer.engine.attention_groups import Span
from batchinfer.engine.kv_cache import LayerShape
from batchinfer.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.engine.config import EngineConfig
    from batchinfer.engine.scheduler import ScheduledSequence
    from batchinfer.models.load import LoadedModel

MIN_ROWS = 4
"""Least rows of a matrix product: below it, fp32 linears on a CPU round differently than in a larger batch."""
DEFAULT_CPU_CACHE_BYTES = 1024**3
"""A cache on a CPU whose size was left open: some 24,000 tokens of a 135M model, and all of it becomes resident."""
MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.85}
"""Share of the free memory a cache may take when its size was left open."""


class ModelRunner:
    """A loaded model with its KV cache. ``num_blocks`` is what was asked for, or what fits.

    Raises:
        ModelError: the model has layers that are not causal attention, or the cache does not fit.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        register_attention()
        self._model = loaded.model
        self._model.set_attn_implementation(ATTENTION_NAME)
        self._device = loaded.device
        layers = probe_layers(self._model, loaded.device, loaded.name)
        self.num_blocks = choose_num_blocks(layers, loaded, config)
        self._attention = choose_attention(layers, self.num_blocks, config.block_size, loaded.dtype, loaded.device)

    @property
    def kernels(self) -> str:
        """Which attention runs: a kernel variant or ``torch``."""
        return self._attention.name

    @torch.inference_mode()
    def execute(self, scheduled: Sequence[ScheduledSequence]) -> torch.Tensor:
        """Compute the scheduled tokens; return logits ``[num_sampling, vocab_size]`` of those who sample, in order."""
        spans = _spans(scheduled)
        tokens = [t for s in scheduled for t in s.sequence.token_ids[s.start : s.start + s.num_new_tokens]]
        positions = [p for s in scheduled for p in range(s.start, s.start + s.num_new_tokens)]
        sampling = [span.row + span.num_queries - 1 for span, s in zip(spans, scheduled, strict=True) if s.samples]
        inputs = self._row(_padded(tokens)).unsqueeze(0)
        logits = _forward(
            self._model,
            input_ids=inputs,
            position_ids=self._row(_padded(positions)).unsqueeze(0),
            logits_to_keep=self._row(_padded(sampling)),
            paged_context=self._attention.context(spans, inputs.shape[1]),
        )
        return logits[: len(sampling)]

    def _row(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _spans(scheduled: Sequence[ScheduledSequence]) -> list[Span]:
    spans = []
    row = 0
    for s in scheduled:
        spans.append(Span(row, s.start, s.num_new_tokens, s.sequence.block_table))
        row += s.num_new_tokens
    return spans


def _padded(values: list[int]) -> list[int]:
    """At least :data:`MIN_ROWS` values; padding is zeros, whose results are dropped."""
    return values + [0] * (MIN_ROWS - len(values))


def _forward(model: Any, **inputs: Any) -> torch.Tensor:
    logits: torch.Tensor = model(use_cache=False, **inputs).logits[0]
    return logits


class ProbeContext:
    """Notes what each layer asks for, and answers with zeros."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.num_calls = 0

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Note a layer; see :class:`~batchinfer.engine.attention.PagedContext`."""
        del options
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2])
        self.num_calls += 1
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


@torch.inference_mode()
def probe_layers(model: Any, device: torch.device, name: str) -> list[LayerShape]:
    """The KV of each layer, found by asking the layers themselves: true of any architecture.

    Raises:
        ModelError: a layer is no causal attention (recurrent, convolutional, chunked, bidirectional).
    """
    config = model.config.get_text_config()
    odd = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    probe = ProbeContext()
    inputs = torch.zeros(1, MIN_ROWS, dtype=torch.int64, device=device)
    positions = torch.arange(MIN_ROWS, device=device).unsqueeze(0)
    try:
        _forward(model, input_ids=inputs, position_ids=positions, logits_to_keep=1, paged_context=probe)
    except (TypeError, NotImplementedError) as error:
        raise ModelError(f"model {name} has attention this engine cannot run: {error}") from error
    wanted = list(range(config.num_hidden_layers))
    if odd or sorted(probe.shapes) != wanted or probe.num_calls != len(wanted):
        kinds = f": {', '.join(sorted(odd))}" if odd else ""
        raise ModelError(f"model {name} ({config.model_type}) has layers that are not causal attention{kinds}")
    return [probe.shapes[layer] for layer in wanted]


def choose_num_blocks(layers: Sequence[LayerShape], loaded: LoadedModel, config: EngineConfig) -> int:
    """Blocks of the cache: as configured, else what ``max_num_seqs`` full contexts need, within the memory there is.

    Raises:
        ModelError: not even one block fits.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    block_bytes = bytes_per_block(layers, config.block_size, loaded.dtype, loaded.device)
    blocks_a_sequence = -(-loaded.max_model_len // config.block_size)
    size = config.kv_cache_bytes
    if size is None:
        size = _memory_for_cache(loaded.device, blocks_a_sequence * block_bytes)
    if (num_blocks := min(config.max_num_seqs * blocks_a_sequence, size // block_bytes)) < 1:
        raise ModelError(f"a KV cache of {size} bytes holds no block of {block_bytes}; raise kv_cache_bytes")
    return num_blocks


def _memory_for_cache(device: torch.device, one_sequence: int) -> int:
    """Bytes for a cache whose size was left open; on a CPU more than the default only if one sequence needs more."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * MEMORY_SHARE["cuda"])
    available = int(psutil.virtual_memory().available * MEMORY_SHARE["cpu"])
    return min(max(DEFAULT_CPU_CACHE_BYTES, one_sequence), available)
