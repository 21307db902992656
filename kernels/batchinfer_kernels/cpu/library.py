"""The loaded shared library: argument types of its functions, and the C structs they take.

The structs mirror those of the same name in ``csrc``. A library is always one built from the sources beside this file
(its name holds their hash), so the two cannot differ. A call costs 2-4 us through ctypes; a registered torch operator
in Python costs more than that again, and nothing here needs autograd or tracing.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from pathlib import Path

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int32: 2, torch.int8: 3}
"""``Kind`` of ``rows.h``."""


class SourceStruct(Structure):
    """``Source`` of ``rows.h``."""

    _fields_: ClassVar = [
        ("data", c_void_p),
        ("stride", c_int64),
        ("row_scale", c_void_p),
        ("column_scale", c_void_p),
        ("bias", c_void_p),
        ("kind", c_int32),
    ]


class SinkStruct(Structure):
    """``Sink`` of ``rows.h``."""

    _fields_: ClassVar = [
        ("data", c_void_p),
        ("scale", c_void_p),
        ("smoothing", c_void_p),
        ("kind", c_int32),
        ("rotation", c_int32),
    ]


class CacheStruct(Structure):
    """``Cache`` of ``layout.h``."""

    _fields_: ClassVar = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("block_stride", c_int64),
        ("num_blocks", c_int64),
        ("kind", c_int32),
        ("block_size", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("v_head_dim", c_int32),
        ("key_rotation", c_int32),
        ("value_rotation", c_int32),
    ]


class RopeStruct(Structure):
    """``Rope`` of ``row_ops.h``."""

    _fields_: ClassVar = [
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("norm_offset", c_float),
        ("norm_eps", c_float),
        ("rotary_dim", c_int32),
        ("interleaved", c_int32),
    ]


class NormStruct(Structure):
    """``Norm`` of ``row_ops.h``."""

    _fields_: ClassVar = [("weight", c_void_p), ("offset", c_float), ("eps", c_float)]


class PackedStruct(Structure):
    """``Packed`` of ``gemm.h``."""

    _fields_: ClassVar = [("data", c_void_p), ("n", c_int64), ("k", c_int64), ("kind", c_int32)]


class BatchStruct(Structure):
    """``Batch`` of ``attention_plan.cpp``."""

    _fields_: ClassVar = [
        ("query_start", c_void_p),
        ("context_lens", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("num_blocks", c_int64),
        ("max_partials", c_int64),
        ("num_sequences", c_int32),
        ("block_size", c_int32),
        ("queries_per_kv_head", c_int32),
        ("num_kv_heads", c_int32),
        ("num_threads", c_int32),
        ("num_least_shared", c_int32),
        ("least_shared", c_void_p),
    ]


class AttentionStruct(Structure):
    """``Attention`` of ``attention.h``."""

    _fields_: ClassVar = [
        ("query", c_void_p),
        ("out", c_void_p),
        ("sinks", c_void_p),
        ("workspace", c_void_p),
        ("query_stride", c_int64),
        ("query_kind", c_int32),
        ("out_kind", c_int32),
        ("num_q_heads", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
    ]


class ReductionStruct(Structure):
    """``Reduction`` of ``row_ops.h``."""

    _fields_: ClassVar = [
        ("best", c_void_p),
        ("best_index", c_void_p),
        ("peak", c_void_p),
        ("total", c_void_p),
        ("top_values", c_void_p),
        ("top_indices", c_void_p),
        ("has_nan", c_void_p),
        ("place", c_void_p),
        ("logits", c_void_p),
        ("num_columns", c_int64),
        ("k", c_int32),
    ]


class LinearStruct(Structure):
    """``Linear`` of ``decoder.cpp``."""

    _fields_: ClassVar = [
        ("weights", PackedStruct),
        ("column_scale", c_void_p),
        ("bias", c_void_p),
        ("smoothing", c_void_p),
        ("rotation", c_int32),
    ]


class LayerStruct(Structure):
    """``Layer`` of ``decoder.cpp``."""

    _fields_: ClassVar = [
        ("qkv", LinearStruct),
        ("o", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("attention_norm", NormStruct),
        ("mlp_norm", NormStruct),
        ("rope", RopeStruct),
        ("num_positions", c_int64),
        ("num_q_heads", c_int32),
        ("activation", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
    ]


class StepStruct(Structure):
    """``Step`` of ``decoder.cpp``."""

    _fields_: ClassVar = [
        ("residual", c_void_p),
        ("tokens", c_int64),
        ("hidden", c_int64),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("plan", c_void_p),
        ("workspace", c_void_p),
        ("rows", c_void_p),
        ("row_scale", c_void_p),
        ("product", c_void_p),
        ("gated", c_void_p),
        ("added", c_void_p),
        ("query", c_void_p),
        ("attended", c_void_p),
        ("spent", c_void_p),
        ("outside", c_int64),
        ("row_bytes", c_int64),
        ("columns", c_int64),
        ("gated_columns", c_int64),
        ("block", c_int64),
        ("query_kind", c_int32),
    ]


_SOURCE, _SINK, _CACHE = POINTER(SourceStruct), POINTER(SinkStruct), POINTER(CacheStruct)
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "bi_rms_norm": (
        None,
        [_SOURCE, c_void_p, c_int32, POINTER(NormStruct), c_int64, c_int64, _SINK, c_int32],
    ),
    "bi_act_and_mul": (None, [_SOURCE, c_int32, c_int64, c_int64, _SINK, c_int32]),
    "bi_convert": (None, [_SOURCE, c_int64, c_int64, _SINK, c_int32]),
    "bi_rope_and_kv_write": (
        c_int64,
        [*[_SOURCE] * 3, POINTER(RopeStruct), c_void_p, c_int64, c_void_p, _CACHE, c_int64, c_int32, _SINK, c_int32],
    ),
    "bi_reduce_logits": (
        None,
        [_SOURCE, c_int64, c_int64, c_int64, c_float, c_float, POINTER(ReductionStruct), c_int32],
    ),
    "bi_plan_create": (c_void_p, [POINTER(BatchStruct), POINTER(c_int32)]),
    "bi_plan_num_partials": (c_int64, [c_void_p]),
    "bi_plan_num_tokens": (c_int64, [c_void_p]),
    "bi_plan_free": (None, [c_void_p]),
    "bi_gemm_prepare": (c_int32, []),
    "bi_gemm": (None, [c_void_p, c_int64, POINTER(PackedStruct), c_void_p, c_int32]),
    "bi_decoder_layers": (None, [POINTER(LayerStruct), _CACHE, c_int64, POINTER(StepStruct), c_int32]),
    "bi_decoder_head": (
        None,
        [
            *[POINTER(LinearStruct), c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_float, c_float],
            *[POINTER(ReductionStruct), c_int32],
        ],
    ),
    "bi_attention": (None, [c_void_p, _CACHE, POINTER(AttentionStruct), c_int32]),
}


class LibraryError(Exception):
    """A shared library that cannot be loaded, or is not one of these kernels."""


def load_library(path: Path) -> ctypes.CDLL:
    """Load a built library and declare its functions.

    Raises:
        LibraryError: the file is damaged.
    """
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise LibraryError(f"cannot load {path}: {error}") from error
    return library
