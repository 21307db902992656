"""Runs the model on a GPU: what only decodes as captured graphs in padded sizes, anything else kernel by kernel."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from batchinfer.engine.attention_backend import bytes_per_block
from batchinfer.engine.attention_groups import Span
from batchinfer.engine.gpu.decode_batch import DecodeBatch, PlanRoom
from batchinfer.engine.gpu.graphs import CudaGraphs
from batchinfer.engine.gpu.memory import CudaMemory, profile_memory
from batchinfer.engine.gpu.padding import padded_size, padded_sizes
from batchinfer.engine.gpu.seats import Seats
from batchinfer.engine.gpu.transfer import is_queued, upload
from batchinfer.engine.head_output import HeadOutput
from batchinfer.engine.model_runner import ModelRunner, cache_dtype, kv_dtype, layer_shapes, spans_of
from batchinfer.engine.sequence import PENDING
from batchinfer.engine.triton_attention import NO_SLOT, PlanKind, TritonAttention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchinfer.engine.config import EngineConfig
    from batchinfer.engine.gpu.graphs import GraphBackend
    from batchinfer.engine.gpu.memory import DeviceMemory, MemoryProfile
    from batchinfer.engine.kv_cache import LayerShape
    from batchinfer.engine.scheduler import ScheduledSequence
    from batchinfer.engine.sequence import Sequence as Running
    from batchinfer.engine.triton_attention import TritonContext
    from batchinfer.models.fused.spec import LayerAttention
    from batchinfer.models.load import LoadedModel

_log = logging.getLogger(__name__)


class GpuRunner(ModelRunner):
    """A model with its KV cache on a GPU, under the Triton attention.

    :meth:`execute` queues work and waits for nothing, unless the model's own modules do. Token ids may end with
    :data:`~batchinfer.engine.sequence.PENDING`: the token that :meth:`keep` was given for the sequence stands there.

    Steps in which every sequence has one token are whole-model graphs, captured at the start for each size of
    :func:`~batchinfer.engine.gpu.padding.padded_sizes`; steps with prompts, adapters or scored tokens run eagerly.

    Raises:
        ModelError: as :class:`ModelRunner`, or the memory is too small; the message has the numbers.
    """

    is_queueing = True
    default_batched_tokens = 8192
    _attention: TritonAttention

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        *,
        owns_model: bool = False,
        graphs: GraphBackend | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """``graphs`` and ``memory`` are CUDA's on a CUDA device; elsewhere nothing is captured or measured without."""
        if is_queued(loaded.device):
            if loaded.device.index is not None:
                torch.cuda.set_device(loaded.device)  # Triton and graphs use the device that is current
            graphs, memory = graphs or CudaGraphs(loaded.device), memory or CudaMemory(loaded.device)
        self._is_measured = memory is not None and config.num_kv_blocks is None and config.kv_cache_bytes is None
        super().__init__(loaded, config, owns_model=owns_model)
        self.max_unproven = None  # all of the cache is taken from the start
        layers = self._layers
        self._kinds = sorted(
            {PlanKind(layer.num_heads // layer.num_kv_heads, layer.sliding_window) for layer in layers},
            key=lambda kind: (kind.group_size, kind.sliding_window or 0),
        )
        self._config = config
        self._max_num_seqs = config.max_num_seqs_on(loaded.device.type)
        self._max_model_len = loaded.max_model_len
        if is_queued(loaded.device):  # else fewer rows would round differently in float32
            self.min_rows = 1
        wants_graphs = graphs is not None and not config.enforce_eager
        self._sizes = padded_sizes(self._max_num_seqs, self.min_rows) if wants_graphs else []
        self._outputs: HeadOutput | None = None
        self._replays: dict[int, Callable[[], HeadOutput]] = {}
        if memory is not None and self._is_measured:
            block_bytes = bytes_per_block(
                layer_shapes(layers), config.block_size, cache_dtype(loaded, config), loaded.device,
                kv_dtype=kv_dtype(config), backend=config.attention_backend,
            )  # fmt: skip
            self.memory = self._profile(memory, layers, block_bytes)
            self.num_blocks = self.memory.num_blocks(block_bytes, config.block_size, loaded.max_model_len)
            self._attention.allocate(self.num_blocks)
        self._make_tables()
        if graphs is not None and self._sizes:
            self._capture(graphs)

    memory: MemoryProfile | None = None
    """What was measured before the cache was made; None where its size was given."""

    @property
    def captured_sizes(self) -> list[int]:
        """Batch sizes that run as graphs, ascending."""
        return sorted(self._replays)

    @torch.inference_mode()
    def execute(
        self,
        scheduled: Sequence[ScheduledSequence],
        kept: Sequence[int] = (),
        scored: Sequence[int] = (),
        hidden: Sequence[int] = (),
    ) -> HeadOutput:
        """Queue the scheduled tokens; see :meth:`ModelRunner.execute`."""
        self._seats.seat([part.sequence for part in scheduled])
        if not scored and not hidden and all(map(_is_plain_decode, scheduled)):
            output = self._replay(scheduled, kept)
            if output is not None:
                return output
        count = sum(part.samples and not part.sequence.is_prefill_only for part in scheduled)
        output = super().execute(scheduled, range(count), scored, hidden)
        if len(kept) == count:
            return output
        # all were kept, and some are chosen by numbers on the device: a list of numbers would be waited for
        places = [*kept, *range(count, count + len(scored))]
        return replace(output, kept=places, logits=output.logits.index_select(0, self._row(places)))

    @torch.inference_mode()
    def keep(self, sequences: Sequence[Running], tokens: torch.Tensor) -> None:
        """Remember the ``tokens [n]`` (int64, on the device) that sequences of the last step have sampled."""
        if sequences:
            self._seats.keep(sequences, tokens)

    def _replay(self, scheduled: Sequence[ScheduledSequence], kept: Sequence[int]) -> HeadOutput | None:
        """Run a captured batch; None if none is large enough, or its plan has no room for this step."""
        count = len(scheduled)
        size = padded_size(self._sizes, count)
        if size is None or size not in self._replays:
            return None
        rows = self._seats.rows(part.sequence for part in scheduled)
        tokens = [_coded(part.sequence.token_ids[part.start], row) for part, row in zip(scheduled, rows, strict=True)]
        if not self._batch.fill(size, tokens, spans_of(scheduled), rows):
            return None
        output = self._replays[size]()
        self._num_padding += size - count
        logits = output.logits[:count]
        if len(kept) < count:
            logits = logits.index_select(0, self._row(list(kept)))
        return HeadOutput(output.best[:count], output.best_index[:count], kept, logits)

    def _token_ids(self, scheduled: Sequence[ScheduledSequence], values: list[int]) -> torch.Tensor:
        end = 0
        has_pending = False
        for part in scheduled:
            end += part.num_new_tokens
            if values[end - 1] == PENDING:
                values[end - 1] = _coded(PENDING, self._seats.rows([part.sequence])[0])
                has_pending = True
        ids = self._row(values)
        if not has_pending:
            return ids
        return torch.where(ids < 0, self._seats.sampled.index_select(0, (-1 - ids).clamp_(min=0)), ids)

    def _context(self, scheduled: Sequence[ScheduledSequence], spans: list[Span], num_rows: int) -> TritonContext:
        rows = self._seats.rows(part.sequence for part in scheduled)
        return self._attention.context(spans, num_rows, self._seats.tables, rows)

    def _row(self, values: list[int]) -> torch.Tensor:
        return upload(values, torch.int64, self._device)

    def _first_num_blocks(
        self, layers: Sequence[LayerShape], loaded: LoadedModel, config: EngineConfig, dtype: torch.dtype
    ) -> int:
        return 1 if self._is_measured else super()._first_num_blocks(layers, loaded, config, dtype)

    def _make_tables(self) -> None:
        """Seats and input buffers for the cache as it is."""
        attention, most = self._attention, self._max_num_seqs
        max_blocks = -(-self._max_model_len // attention.block_size) + 1
        self._seats = Seats(most, max_blocks, attention.trash_block, self._device)
        if self._sizes:
            self._batch = DecodeBatch(self._sizes[-1], self._kinds, attention, self._seats, self._max_model_len)

    def _profile(self, memory: DeviceMemory, layers: Sequence[LayerAttention], block_bytes: int) -> MemoryProfile:
        """Measure with a cache of one block, in which all sequences read and none writes."""
        self._make_tables()
        largest_graph = None
        if self._sizes:
            size = self._sizes[-1]
            self._batch.fill(size, [], [], [])
            largest_graph = self._decode_step(size)
        found = profile_memory(memory, self._config.gpu_memory_utilization, self._largest_step, largest_graph)
        # a plan has room for more partial results in a larger cache; a mixed step and a graph can each have so many
        kv_tokens = max(0, found.for_cache) // block_bytes * self._attention.block_size
        room = PlanRoom.of(self._max_num_seqs, self._max_model_len, kv_tokens, self._attention.split)
        widest = max(layer.num_heads * (layer.head_dim + 1) for layer in layers)
        partials = room.partials * widest * torch.float32.itemsize
        found = replace(found, step=found.step + partials, graphs=found.graphs + (partials if self._sizes else 0))
        _log.info("measured, in bytes: %s, %d for the KV cache", found, found.for_cache)
        return found

    @torch.inference_mode()
    def _largest_step(self) -> None:
        """As many prompts as a step can have, all of their logits kept."""
        num_tokens = self._config.max_num_batched_tokens or self.default_batched_tokens
        count = min(self._max_num_seqs, num_tokens)
        spans, row = [], 0
        for i in range(count):
            length = min(num_tokens // count + (i < num_tokens % count), self._max_model_len)
            spans.append(Span(row, 0, length, [0] * -(-length // self._attention.block_size)))
            row += length
        context = self._attention.context(spans, row)
        context.slots.fill_(NO_SLOT)
        tokens, positions = (self._row(values) for values in ([0] * row, [p for s in spans for p in range(s.context)]))
        sampling = self._row([span.row + span.num_queries - 1 for span in spans])
        self._forward(tokens, positions, sampling, context, range(count))

    def _decode_step(self, size: int) -> Callable[[], HeadOutput]:
        """A step on the persistent buffers, in and out: what is captured."""
        context, batch = self._batch.context(size), self._batch

        @torch.inference_mode()
        def run() -> HeadOutput:
            ids, positions = batch.token_ids(size), batch.positions(size)
            output = self._forward(ids, positions, batch.sampling[:size], context, range(size))
            return self._into_outputs(output, size)

        return run

    def _into_outputs(self, output: HeadOutput, size: int) -> HeadOutput:
        """Copy results to where they stay: the graphs' shared pool is then free for the next graph."""
        if self._outputs is None:  # the first size is the largest
            best, index, logits = map(torch.empty_like, (output.best, output.best_index, output.logits))
            self._outputs = HeadOutput(best, index, range(size), logits)
        stays = self._outputs
        kept = HeadOutput(stays.best[:size], stays.best_index[:size], range(size), stays.logits[:size])
        kept.best.copy_(output.best[:size])
        kept.best_index.copy_(output.best_index[:size])
        kept.logits.copy_(output.logits[:size])
        return kept

    def _capture(self, graphs: GraphBackend) -> None:
        """Capture all sizes, the largest first; a model that cannot be captured runs eagerly, and the log says why."""
        for size in reversed(self._sizes):
            self._batch.fill(size, [], [], [])
            try:
                self._replays[size] = graphs.capture(self._decode_step(size))
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                self._replays.clear()
                _log.warning(
                    "the model cannot be captured as a CUDA graph and runs kernel by kernel, which is slower for small "
                    "batches; enforce_eager says so from the start: %s", error,
                )  # fmt: skip
                return
        _log.info("captured decode batches of %s rows", ", ".join(map(str, self._sizes)))


def _is_plain_decode(part: ScheduledSequence) -> bool:
    """Whether a part is one token behind which one is sampled."""
    sequence = part.sequence
    return part.num_new_tokens == 1 and part.samples and not sequence.is_prefill_only and sequence.adapter is None


def _coded(token_id: int, row: int) -> int:
    """A token id as the buffers have it: of a pending token the seat where it lies."""
    return -1 - row if token_id == PENDING else token_id
