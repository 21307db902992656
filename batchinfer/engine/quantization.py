"""Quantises a loaded model's projections as the config asks, calibrating on the built-in text where that is needed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from batchinfer.engine.attention_groups import Span
from batchinfer.engine.kv_cache import LayerShape
from batchinfer.engine.native_attention import BLOCK_MULTIPLE, NativeAttention
from batchinfer.models.fused.calibration import MAX_TOKENS, Calibration
from batchinfer.models.fused.calibration_texts import TEXTS
from batchinfer.models.fused.convert import pack
from batchinfer.models.fused.int8 import DEFAULT_SCHEME, W8A8Maker, weight_only
from batchinfer.models.fused.store import QuantizedStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.models.fused.convert import LinearMaker
    from batchinfer.models.fused.int8 import Scheme
    from batchinfer.models.fused.layer import StepContext
    from batchinfer.models.fused.spec import DecoderSpec, LayerAttention
    from batchinfer.models.load import LoadedModel
    from batchinfer_kernels.cpu import Ops

MIN_TOKENS = 256
"""Fewer tokens of text are no calibration."""
_log = logging.getLogger(__name__)


def linears(
    quantization: str, loaded: LoadedModel, spec: DecoderSpec, ops: Ops, scheme: Scheme = DEFAULT_SCHEME
) -> LinearMaker:
    """What makes the decoder's linears under one of :data:`~batchinfer.engine.config.QUANTIZATIONS`."""
    if quantization == "int8":
        return _w8a8(loaded, spec, ops, scheme)
    if quantization == "int8-weight-only":
        return weight_only(ops)
    return pack(ops, loaded.dtype)


def _w8a8(loaded: LoadedModel, spec: DecoderSpec, ops: Ops, scheme: Scheme) -> LinearMaker:
    store = None
    if loaded.cache_dir is not None and loaded.revision:
        precision = str(loaded.dtype).removeprefix("torch.")
        store = QuantizedStore(loaded.cache_dir / "quantized", loaded.revision, precision)
        kept = store.load(ops, scheme.name)
        if kept is not None and kept.holds(spec.projections):
            _log.info("model %s: quantised weights read from the cache", loaded.name)
            return kept
    return W8A8Maker(ops, scheme, _calibration(loaded, spec, ops), keep=store.save if store else None)


def _calibration(loaded: LoadedModel, spec: DecoderSpec, ops: Ops) -> Calibration | None:
    """The built-in texts, about to run; None if the model's tokenizer makes nothing of them."""
    longest = min(MAX_TOKENS, loaded.max_model_len)
    try:
        texts = [loaded.tokenizer.encode(text)[:longest] for text in TEXTS]
    except Exception as error:  # noqa: BLE001 -- a tokenizer may raise anything
        _log.warning("model %s is quantised without calibration: its tokenizer failed: %s", loaded.name, error)
        return None
    vocabulary = len(spec.embedding)
    texts = [text for text in texts if text and max(text) < vocabulary]
    num_tokens = sum(map(len, texts))
    if num_tokens < MIN_TOKENS:
        _log.warning(
            "model %s is quantised without calibration: its tokenizer makes %d tokens of the texts",
            loaded.name,
            num_tokens,
        )
        return None
    return Calibration(ops, spec, texts, _Contexts(ops, [len(text) for text in texts]))


class _Contexts:
    """A cache of one layer for all texts, made anew where a layer's shape differs from the one before."""

    def __init__(self, ops: Ops, lengths: Sequence[int]) -> None:
        self._ops = ops
        self._num_tokens = sum(lengths)
        self._spans: list[Span] = []
        self._num_blocks = 0
        for row, length in zip(_starts(lengths), lengths, strict=True):
            blocks = range(self._num_blocks, self._num_blocks - -length // BLOCK_MULTIPLE)
            self._num_blocks = blocks.stop
            self._spans.append(Span(row, 0, length, list(blocks)))
        self._shape: LayerShape | None = None
        self._context: StepContext | None = None

    def __call__(self, layer: LayerAttention) -> StepContext:
        """The context in which the layer has index 0."""
        shape = LayerShape(layer.num_kv_heads, layer.head_dim, layer.v_head_dim)
        if self._context is None or shape != self._shape:
            self._shape, self._context = shape, self._make(shape)
        return self._context

    def _make(self, shape: LayerShape) -> StepContext:
        if self._ops.name == "triton":
            from batchinfer.engine.triton_layers import one_layer  # noqa: PLC0415 -- needs Triton

            ops: Any = self._ops
            return one_layer(ops, shape, self._num_blocks, self._spans, self._num_tokens)
        attention = NativeAttention(self._ops, [shape], self._num_blocks, BLOCK_MULTIPLE, torch.float32)
        return attention.context(self._spans, self._num_tokens)


def _starts(lengths: Sequence[int]) -> list[int]:
    starts = [0]
    for length in lengths[:-1]:
        starts.append(starts[-1] + length)
    return starts
