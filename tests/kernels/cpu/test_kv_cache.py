import subprocess
import sys

import pytest
import torch

from batchinfer_kernels.cpu import AttentionBatch, KVShape, PagedKVCache, untouched_zeros
from batchinfer_kernels.cpu.kv_cache import LayerKV
from batchinfer_kernels.cpu.pages import HUGE_PAGE

MEASURE = """
import torch
from batchinfer_kernels.cpu import KVShape, PagedKVCache

def resident():
    fields = (line.split() for line in open("/proc/self/status") if line.startswith("VmRSS"))
    return int(next(fields)[1]) * 1024

def write(cache, num_blocks):
    ones = torch.ones(16, 4, 64)
    for layer in cache.layers:
        for block in range(num_blocks):
            layer.write(torch.arange(16) + 16 * block, ones, ones)

write(PagedKVCache([KVShape(4, 64, 64)], 8, 16, torch.bfloat16), 8)  # what torch takes for writes, it has now
before = resident()
cache = PagedKVCache([KVShape(4, 64, 64)] * 8, 4096, 16, torch.bfloat16)  # 512 MiB
empty = resident() - before
write(cache, 100)
print(empty, resident() - before)
"""


def test_blocks_cost_memory_once_they_are_written():
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    empty, used = map(int, done.stdout.split())
    assert empty < 4 << 20
    written = 8 * KVShape(4, 64, 64).bytes_per_block(16, torch.bfloat16) * 100
    ragged = 2 * HUGE_PAGE  # at both ends, ...
    assert written <= used < written + ragged + (4 << 20)  # ... and what torch still took for the writes


def test_parts_of_a_cache_that_lie_apart_are_refused(native):
    one, other = (PagedKVCache([KVShape(2, 64, 64)] * n, 4, 16, torch.bfloat16).layer(0) for n in (1, 2))
    apart = LayerKV(one.keys, other.values, one.shape, 16)
    batch = AttentionBatch.of([1], [1], [[0]])
    plan = native.plan_attention(batch, apart, 2)
    with pytest.raises(ValueError, match="must lie beside each other"):
        native.paged_attention(torch.zeros(1, 2, 64), apart, plan, scale=1.0)
    turned = one.keys.transpose(3, 4).contiguous().transpose(3, 4)
    with pytest.raises(ValueError, match="do not lie in one piece"):
        native.paged_attention(torch.zeros(1, 2, 64), LayerKV(turned, one.values, one.shape, 16), plan, scale=1.0)


def test_untouched_zeros_are_zeros_of_any_size_and_type():
    for shape in ((0, 3), (2, 3), (70, 1000)):
        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            made = untouched_zeros(shape, dtype)
            assert torch.equal(made, torch.zeros(shape, dtype=dtype))
            made += 1
            assert torch.equal(made, torch.ones(shape, dtype=dtype))


def test_copied_blocks_are_equal_in_every_layer():
    cache = PagedKVCache([KVShape(2, 16, 16)] * 2, 64, 16, torch.float32)
    for layer in cache.layers:
        layer.write(torch.arange(32), torch.randn(32, 2, 16), torch.randn(32, 2, 16))
    cache.copy_blocks([0, 1], [62, 63])
    for layer in cache.layers:
        assert torch.equal(layer.keys[:2], layer.keys[62:])
        assert torch.equal(layer.values[:2], layer.values[62:])
        assert layer.keys[62:].any()
