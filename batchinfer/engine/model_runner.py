"""Runs the model on a step's tokens: packs inputs, keeps the KV cache, gives the sampler what it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import torch

from batchinfer.engine.attention import ATTENTION_NAME, register_attention
from batchinfer.engine.attention_backend import bytes_per_block, choose_attention
from batchinfer.engine.attention_groups import Span
from batchinfer.engine.calibration import DEFAULT_BATCHED_TOKENS
from batchinfer.engine.forward_pass import choose_forward
from batchinfer.engine.kv_cache import LayerShape
from batchinfer.engine.native_attention import NativeAttention
from batchinfer.engine.probe import probe_layers
from batchinfer.errors import ModelError
from batchinfer.models.lora_store import LoraStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchinfer.engine.attention import PagedContext
    from batchinfer.engine.config import EngineConfig
    from batchinfer.engine.head_output import HeadOutput
    from batchinfer.engine.scheduler import ScheduledSequence
    from batchinfer.models.fused.adapted import AdapterGroup
    from batchinfer.models.fused.spec import LayerAttention
    from batchinfer.models.load import LoadedModel
    from batchinfer.models.lora_file import LoraFile
    from batchinfer.models.parallel.peers import Peers

MIN_ROWS = 4
"""Least rows of a matrix product: below it, fp32 linears on a CPU round differently than in a larger batch."""
DEFAULT_CPU_CACHE_BYTES = 1024**3
"""A cache on a CPU whose size was left open: some 46,000 tokens of a 135M model, resident only as far as it is used."""
UNPROVEN_SHARE = 1 / 16
"""Of such a cache the share that may grow to keep prompts that no second row has asked for: rows that share are neighbours
in the queue, so older ones are hardly ever found, and would make all of the cache resident."""
MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.85}
"""Share of the free memory a cache may take when its size was left open."""


class ModelRunner:
    """A loaded model with its KV cache. ``num_blocks`` is what was asked for, or what fits.

    Raises:
        ModelError: the model has layers that are not causal attention, or the cache does not fit.
    """

    is_queueing = False
    """Whether :meth:`execute` returns before the device has computed."""
    min_rows = MIN_ROWS
    default_batched_tokens = DEFAULT_BATCHED_TOKENS
    """The token budget of a step where none is asked for and nothing was measured."""

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, *, owns_model: bool = False, peers: Peers | None = None
    ) -> None:
        """With ``owns_model`` nobody else uses ``loaded.model``, and its weights may be taken apart.

        With ``peers`` it is a rank's share of a model, and every rank makes a runner and the same calls of it.
        """
        register_attention()
        loaded.model.set_attn_implementation(ATTENTION_NAME)
        self._device = loaded.device
        layers = self._layers = probe_layers(loaded.model, loaded.device, loaded.name)
        shapes = layer_shapes(layers)
        dtype = cache_dtype(loaded, config)
        self.block_size = config.block_size
        self.windows = [layer.sliding_window for layer in layers]
        """Tokens that each layer sees back; None: all."""
        self.num_blocks = self._first_num_blocks(shapes, loaded, config, dtype)
        if peers is not None:
            self.num_blocks = peers.least(self.num_blocks)
        self._num_heads = layers[0].num_heads
        self.max_unproven = (
            None if is_sized(config) or loaded.device.type != "cpu" else int(self.num_blocks * UNPROVEN_SHARE)
        )
        """See :class:`~batchinfer.engine.block_pool.BlockPool`; a cache whose size somebody chose may be filled."""
        self._attention = choose_attention(
            shapes,
            self.num_blocks,
            config.block_size,
            dtype,
            loaded.device,
            needs_compiler=config.quantization == "none",
            kv_dtype=kv_dtype(config),
            backend=config.attention_backend,
        )
        self._forward = choose_forward(
            loaded, layers, self._attention, config.quantization, owns_model=owns_model, peers=peers
        )
        slots = self._forward.adapters
        self.adapters = None if slots is None else LoraStore(slots, config.adapter_cache_bytes)
        """The LoRA adapters that rows may name; None if the model takes none."""
        self._num_padding = 0
        self._recipe = self._forward.recipe
        self._kv_cache = str(kv_dtype(config) or dtype).removeprefix("torch.")

    @property
    def about(self) -> dict[str, str]:
        """Fields of :class:`~batchinfer.engine.stats.EngineStats` that say what runs."""
        return {
            "kernels": self._attention.name,
            "layers": self._forward.name,
            "recipe": self._recipe,
            "kv_cache_dtype": self._kv_cache,
        }

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._device

    def share_prefixes(self, least: Mapping[int, int]) -> None:
        """Read shared prefixes together where so many tokens share them: by the prefix' tokens, as measured."""
        if isinstance(self._attention, NativeAttention):
            self._attention.share_prefixes(least)

    def shared_prefix_runs(self, prefix: int, rows: int) -> tuple[Callable[[], object], Callable[[], object]] | None:
        """One layer's attention of decoding rows that share a prefix: together, and alone. None if there is one way."""
        if not isinstance(self._attention, NativeAttention):
            return None
        return self._attention.shared_prefix_runs(prefix, rows, self._num_heads)

    def profile(self) -> dict[str, int]:
        """Fields of :class:`~batchinfer.engine.stats.EngineStats` that are counted here."""
        return self._forward.profile() | {"padding_tokens": self._num_padding}

    @torch.inference_mode()
    def execute(
        self,
        scheduled: Sequence[ScheduledSequence],
        kept: Sequence[int] = (),
        scored: Sequence[int] = (),
        hidden: Sequence[int] = (),
    ) -> HeadOutput:
        """Compute the scheduled tokens; return what those who sample need, in order.

        A part with guesses samples behind its own last token and behind each guess. ``kept`` are places among all that
        is sampled: the rows that need logits. ``scored`` are places among all tokens of
        the step: their logits follow as further rows, all of them kept; so are ``hidden``, for their hidden states.
        """
        spans = spans_of(scheduled)
        tokens = [
            t for s in scheduled for t in (*s.sequence.token_ids[s.start : s.start + s.num_new_tokens], *s.guesses)
        ]
        positions = [p for s in scheduled for p in range(s.start, s.start + s.num_new_tokens)]
        sampling = [
            row
            for span, s in zip(spans, scheduled, strict=True)
            if s.samples and not s.sequence.is_prefill_only
            for row in range(span.row + span.num_queries - 1 - len(s.guesses), span.row + span.num_queries)
        ]
        if scored:
            kept = [*kept, *range(len(sampling), len(sampling) + len(scored))]
        sampling += scored
        token_ids = self._token_ids(scheduled, self._padded(tokens))
        self._num_padding += len(token_ids) - len(tokens)
        output = self._forward(
            token_ids,
            self._row(self._padded(positions)),
            self._row(self._padded(sampling) if sampling else []),
            self._context(scheduled, spans, len(token_ids)),
            kept,
            hidden=self._row(list(hidden)) if hidden else None,
            groups=self._adapter_groups(scheduled, spans),
        )
        return output.first(len(sampling))

    def _first_num_blocks(
        self, layers: Sequence[LayerShape], loaded: LoadedModel, config: EngineConfig, dtype: torch.dtype
    ) -> int:
        """Blocks of the cache before the model has run."""
        return choose_num_blocks(layers, loaded, config, dtype)

    def _padded(self, values: list[int]) -> list[int]:
        """At least so many values as products need; padding is zeros, whose results are dropped."""
        return values + [0] * (self.min_rows - len(values))

    def _token_ids(self, scheduled: Sequence[ScheduledSequence], values: list[int]) -> torch.Tensor:
        del scheduled
        return self._row(values)

    def _context(self, scheduled: Sequence[ScheduledSequence], spans: list[Span], num_rows: int) -> PagedContext:
        del scheduled
        return self._attention.context(spans, num_rows)

    def _adapter_groups(self, scheduled: Sequence[ScheduledSequence], spans: Sequence[Span]) -> Sequence[AdapterGroup]:
        """The tokens that use adapters, by adapter."""
        rows: dict[LoraFile, list[int]] = {}
        for s, span in zip(scheduled, spans, strict=True):
            if s.sequence.adapter is not None:
                rows.setdefault(s.sequence.adapter, []).extend(range(span.row, span.row + span.num_queries))
        if not rows:
            return ()
        assert self.adapters is not None, "rows with adapters were refused before"
        return self.adapters.groups(rows)

    def _row(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def spans_of(scheduled: Sequence[ScheduledSequence]) -> list[Span]:
    """Where the parts of a step lie in its packed batch."""
    spans = []
    row = 0
    for s in scheduled:
        spans.append(Span(row, s.start, s.num_new_tokens, s.sequence.block_table))
        row += s.num_new_tokens
    return spans


def layer_shapes(layers: Sequence[LayerAttention]) -> list[LayerShape]:
    """What the layers keep of a token."""
    return [LayerShape(layer.num_kv_heads, layer.head_dim, layer.v_head_dim) for layer in layers]


def cache_dtype(loaded: LoadedModel, config: EngineConfig) -> torch.dtype:
    """Precision of queries, keys and values: the model's own, but bfloat16 beside INT8 weights if nothing was said."""
    is_open = config.dtype == "auto" and config.quantization != "none"
    return torch.bfloat16 if is_open and loaded.device.type == "cpu" else loaded.dtype


def kv_dtype(config: EngineConfig) -> torch.dtype | None:
    """Precision of keys and values where it is not that of attention."""
    return torch.int8 if config.kv_cache_dtype == "int8" else None


def is_sized(config: EngineConfig) -> bool:
    """Whether somebody said how large the cache is."""
    return config.num_kv_blocks is not None or config.kv_cache_bytes is not None


def choose_num_blocks(
    layers: Sequence[LayerShape], loaded: LoadedModel, config: EngineConfig, dtype: torch.dtype
) -> int:
    """Blocks of the cache: as configured, else what ``max_num_seqs`` full contexts need, within the memory there is.

    Raises:
        ModelError: not even one block fits.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    block_bytes = bytes_per_block(
        layers, config.block_size, dtype, loaded.device, kv_dtype=kv_dtype(config), backend=config.attention_backend
    )
    blocks_a_sequence = -(-loaded.max_model_len // config.block_size)
    size = config.kv_cache_bytes
    if size is None:
        size = _memory_for_cache(loaded.device, blocks_a_sequence * block_bytes, config.tensor_parallel_size)
    if (num_blocks := min(config.max_num_seqs_on(loaded.device.type) * blocks_a_sequence, size // block_bytes)) < 1:
        raise ModelError(f"a KV cache of {size} bytes holds no block of {block_bytes}; raise kv_cache_bytes")
    return num_blocks


def _memory_for_cache(device: torch.device, one_sequence: int, num_ranks: int) -> int:
    """Bytes for a cache whose size was left open; on a CPU more than the default only if one sequence needs more.

    ``num_ranks`` of such caches share a CPU's memory.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * MEMORY_SHARE["cuda"])
    available = int(psutil.virtual_memory().available * MEMORY_SHARE["cpu"])
    return min(max(DEFAULT_CPU_CACHE_BYTES // num_ranks, one_sequence), available // num_ranks)
