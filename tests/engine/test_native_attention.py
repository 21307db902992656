"""The C++ attention gives what the torch context gives, through the same door, for odd layouts and options."""

import pytest
import torch

from batchinfer.engine.attention import AttentionOptions
from batchinfer.engine.attention_backend import TorchAttention, bytes_per_block, choose_attention, why_not_native
from batchinfer.engine.attention_groups import Span
from batchinfer.engine.kv_cache import LayerShape
from batchinfer.engine.native_attention import NativeAttention
from batchinfer.errors import ModelError

CPU = torch.device("cpu")
BLOCK = 16
SHAPES = (LayerShape(3, 64, 64), LayerShape(2, 48, 32))
NUM_BLOCKS = 40


@pytest.fixture(scope="module")
def native_ops():
    from batchinfer_kernels.cpu import get_ops

    assert why_not_native(CPU, torch.float32, BLOCK) is None, "these tests need a C++ compiler"
    return get_ops()


def layout(computed):
    """Spans of ``computed = [(start, num_queries), ...]``; sequences own scattered blocks, rows are packed in order."""
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(5)).tolist()
    spans, row = [], 0
    for start, count in computed:
        table = [blocks.pop() for _ in range(-(-(start + count) // BLOCK))]
        spans.append(Span(row, start, count, table))
        row += count
    return spans, row


def step(backend, spans, rows, layer, heads, options, dtype):
    """Fill the past, then attend to a step; the same random numbers for every backend."""
    shape = SHAPES[layer]
    generator = torch.Generator().manual_seed(layer)

    def numbers(count, num_heads, dim):
        return torch.randn(count, num_heads, dim, generator=generator).to(dtype)

    past = [Span(0, 0, span.start, span.block_table) for span in spans if span.start]
    for span in past:
        kv = numbers(span.num_queries, shape.num_kv_heads, shape.head_dim)
        values = numbers(span.num_queries, shape.num_kv_heads, shape.v_head_dim)
        query = numbers(span.num_queries, heads, shape.head_dim)
        backend.context([span], span.num_queries).attend(layer, query, kv, values, options)
    # as transformers gives them: heads first, then transposed
    query = numbers(heads, rows, shape.head_dim).transpose(0, 1)
    key = numbers(shape.num_kv_heads, rows, shape.head_dim).transpose(0, 1)
    value = numbers(shape.num_kv_heads, rows, shape.v_head_dim).transpose(0, 1)
    return backend.context(spans, rows).attend(layer, query, key, value, options).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(0.125),
        AttentionOptions(0.3, sliding_window=9),
        AttentionOptions(0.2, softcap=5.0, sinks=torch.linspace(-1, 1, 6)),
    ],
    ids=["plain", "window", "softcap and sinks"],
)
@pytest.mark.parametrize("layer", [0, 1])
def test_like_torch(native_ops, dtype, options, layer):
    """A decode token, a fresh prompt, a chunk in the middle of a prompt, and padding rows that read nothing."""
    spans, real = layout([(37, 1), (0, 20), (16, 33), (0, 1)])
    rows = real + 3
    native = step(NativeAttention(native_ops, SHAPES, NUM_BLOCKS, BLOCK, dtype), spans, rows, layer, 6, options, dtype)
    torch_backend = TorchAttention(SHAPES, NUM_BLOCKS, BLOCK, dtype, CPU)
    expected = step(torch_backend, spans, rows, layer, 6, options, dtype)
    assert not native[real:].any()
    tolerance = 3e-6 if dtype == torch.float32 else 2e-2
    assert (native - expected).abs().max() < tolerance


def test_where_the_kernels_cannot_serve():
    """Odd blocks, half precision and other devices run in torch, and the reason is said."""
    assert "multiple of 16" in why_not_native(CPU, torch.float32, 3)
    assert "float16" in why_not_native(CPU, torch.float16, BLOCK)
    assert "cuda" in why_not_native(torch.device("cuda"), torch.float32, BLOCK)
    assert isinstance(choose_attention(SHAPES, 2, 3, torch.float32, CPU), TorchAttention)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_bytes_per_block_is_what_is_allocated(native_ops, kv_dtype):
    backend = NativeAttention(native_ops, SHAPES, NUM_BLOCKS, BLOCK, torch.bfloat16, kv_dtype=kv_dtype)
    tensors = [
        tensor
        for layer in backend.kv_cache.layers
        for tensor in (layer.keys, layer.values, layer.key_scales, layer.value_scales)
        if tensor is not None
    ]
    allocated = sum(tensor.nbytes for tensor in tensors)
    assert allocated == NUM_BLOCKS * bytes_per_block(SHAPES, BLOCK, torch.bfloat16, CPU, kv_dtype=kv_dtype)


def test_an_int8_cache_that_cannot_be_is_refused_with_the_way_out():
    with pytest.raises(ModelError, match="multiple of 16; use kv_cache_dtype auto"):
        choose_attention(SHAPES, 2, 3, torch.float32, CPU, kv_dtype=torch.int8)
