"""Operations for the CPU: C++ compiled at first use, or plain torch where there is no compiler."""

from batchinfer_kernels.cpu.choice import get_ops, is_available, native_ops
from batchinfer_kernels.cpu.interface import AttentionPlan, Ops
from batchinfer_kernels.cpu.kv_cache import KVShape, LayerKV, PagedKVCache
from batchinfer_kernels.cpu.operands import (
    Accumulated,
    AttentionBatch,
    Int8Recipe,
    Int8Rows,
    LogitsReduction,
    RotaryEmbedding,
)
from batchinfer_kernels.cpu.packed import PackedLayer, PackedProjection, PackedWeights
from batchinfer_kernels.cpu.pages import untouched_zeros
from batchinfer_kernels.cpu.torch_ops import TorchOps

__all__ = [
    "Accumulated",
    "AttentionBatch",
    "AttentionPlan",
    "Int8Recipe",
    "Int8Rows",
    "KVShape",
    "LayerKV",
    "LogitsReduction",
    "Ops",
    "PackedLayer",
    "PackedProjection",
    "PackedWeights",
    "PagedKVCache",
    "RotaryEmbedding",
    "TorchOps",
    "get_ops",
    "is_available",
    "native_ops",
    "untouched_zeros",
]
