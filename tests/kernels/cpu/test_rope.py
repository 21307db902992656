"""Rotary embedding as multiplication of complex numbers, and keys and values where the cache's layout says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer_kernels.cpu import AttentionBatch, KVShape, PagedKVCache, RotaryEmbedding
from batchinfer_kernels.cpu.kv_cache import kv_rotation
from batchinfer_kernels.reference import hadamard


def angles(num_positions, half, seed):
    angle = torch.rand(num_positions, half, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 6.28
    return angle, angle.cos().float(), angle.sin().float()


def rotated(x, angle, interleaved):
    """``x [T, heads, dim]`` with each pair taken as a complex number and turned by its angle ``[T, half]``."""
    half = angle.shape[1]
    x = x.double().clone()
    turn = torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
    pair = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    turned = torch.complex(x[..., pair[0]], x[..., pair[1]]) * turn
    x[..., pair[0]], x[..., pair[1]] = turned.real, turned.imag
    return x


def normed(x, weight, offset):
    if weight is None:
        return x.double()
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight.double() + offset)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(0, 40),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dims=st.sampled_from([(8, 8, 8), (16, 4, 16), (64, 64, 64), (80, 32, 80), (96, 96, 64), (24, 16, 40)]),
    interleaved=st.booleans(),
    with_norm=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_queries_come_back_rotated_and_the_rest_is_in_the_cache(
    ops, tokens, heads, dims, interleaved, with_norm, dtype, seed
):
    g = torch.Generator().manual_seed(seed)
    (num_kv, ratio), (head_dim, rotary_dim, v_dim) = heads, dims
    angle, cos, sin = angles(64, rotary_dim // 2, seed)
    norms = torch.rand(2, head_dim, generator=g) if with_norm else (None, None)
    rope = RotaryEmbedding(cos, sin, interleaved, norms[0], norms[1], norm_offset=1.0)
    q_width, k_width = num_kv * ratio * head_dim, num_kv * head_dim
    merged = torch.randn(tokens, q_width + k_width + num_kv * v_dim, generator=g)
    query, key, value = merged.split([q_width, k_width, num_kv * v_dim], dim=1)
    positions = torch.randint(64, (tokens,), generator=g)
    slots = torch.randperm(64, generator=g)[:tokens]
    layer = PagedKVCache([KVShape(num_kv, head_dim, v_dim)], 2, 32, dtype).layer(0)
    out = ops.rope_and_kv_write(query, key, value, rope, positions=positions, slots=slots, layer=layer)
    wanted = rotated(
        normed(query.reshape(tokens, num_kv * ratio, head_dim), norms[0], 1.0), angle[positions], interleaved
    )
    torch.testing.assert_close(out.double(), wanted, atol=3e-6, rtol=3e-6)
    stored_key, stored_value = layer.gather(slots)
    wanted = rotated(normed(key.reshape(tokens, num_kv, head_dim), norms[1], 1.0), angle[positions], interleaved)
    step = 2**-8 if dtype == torch.bfloat16 else 3e-6
    torch.testing.assert_close(stored_key.double(), wanted, atol=3e-6, rtol=step)
    assert torch.equal(stored_value, value.reshape(tokens, num_kv, v_dim).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_given_slots_change(ops, dtype):
    """Slot -1 writes nothing; every other token of the cache, and the padding of heads, keeps its bits."""
    g = torch.Generator().manual_seed(0)
    layer = PagedKVCache([KVShape(2, 24, 40)], 3, 16, dtype).layer(0)
    everything = torch.arange(48)
    layer.write(everything, torch.randn(48, 2, 24, generator=g), torch.randn(48, 2, 40, generator=g))
    before = [x.clone() for x in layer.gather(everything)]
    slots = torch.tensor([5, -1, 40, 17])
    key, value = torch.randn(4, 48, generator=g), torch.randn(4, 80, generator=g)
    ops.kv_write(key, value, slots, layer)
    after = layer.gather(everything)
    kept = torch.ones(48, dtype=torch.bool)
    kept[slots[slots >= 0]] = False
    assert all(torch.equal(a[kept], b[kept]) for a, b in zip(before, after, strict=True))
    assert torch.equal(after[0][[5, 40, 17]], key[[0, 2, 3]].view(3, 2, 24).to(dtype))
    assert layer.keys.flatten(3).float().count_nonzero() <= 48 * 2 * 24
    assert layer.values[:, :, :, :, 40:].count_nonzero() == 0


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 30),
    num_kv=st.integers(1, 3),
    dims=st.sampled_from([(8, 8), (16, 40), (64, 64), (80, 96), (128, 256), (13, 24)]),
    seed=st.integers(0, 999),
)
def test_int8_keys_and_values_are_within_half_a_step_of_their_scale(ops, tokens, num_kv, dims, seed):
    """Each head of each token by itself, as rotated; zeros stay zeros, and the scale is the largest by 127."""
    g = torch.Generator().manual_seed(seed)
    layer = PagedKVCache([KVShape(num_kv, *dims)], 2, 32, torch.int8).layer(0)
    key, value = (
        torch.randn(tokens, num_kv, dim, generator=g) * torch.logspace(-3, 3, num_kv)[:, None] for dim in dims
    )
    if tokens:
        key[0], value[-1, 0] = 0.0, 0.0
    slots = torch.randperm(64, generator=g)[:tokens]
    ops.kv_write(key.flatten(1), value.flatten(1), slots, layer)
    scales = [x[slots // 32, :, slots % 32] for x in (layer.key_scales, layer.value_scales)]
    for stored, given_, scale, dim in zip(layer.gather(slots), (key, value), scales, dims, strict=True):
        block = kv_rotation(dim)
        assert block in (0, 16, 32, 64)
        rotated = given_.double()
        if block:
            rotated = (rotated.reshape(-1, block) @ hadamard(block).double()).view_as(rotated)
        torch.testing.assert_close(scale.double(), rotated.abs().amax(-1) / 127, atol=0, rtol=1e-5)
        # a rotation back spreads half a step over its block: at most half a step times the root of the block
        most = scale[..., None] * (0.5 + 1e-3) * max(1, block) ** 0.5
        assert ((stored - given_).abs() <= most).all()
        assert not stored[given_.abs().amax(-1) == 0].any()
    untouched = torch.ones(64, dtype=torch.bool)
    untouched[slots] = False
    assert not any(x[untouched].any() for x in layer.gather(torch.arange(64)))


def test_an_int8_head_with_inf_or_nan_is_nan_and_its_neighbours_are_not(native):
    """In the cache and in what attends to it; a slot that is written again is clean again."""
    layer = PagedKVCache([KVShape(2, 32, 32)], 2, 16, torch.int8).layer(0)
    key, value = torch.randn(20, 2, 32), torch.randn(20, 2, 32)
    key[3, 0, 5], value[4, 1, 0] = float("inf"), float("nan")
    slots = torch.arange(20)
    native.kv_write(key.flatten(1), value.flatten(1), slots, layer)
    stored = layer.gather(slots)
    assert stored[0].isnan().all(-1).nonzero().tolist() == [[3, 0]]
    assert stored[1].isnan().all(-1).nonzero().tolist() == [[4, 1]]
    query = torch.randn(20, 2, 32)
    plan = native.plan_attention(AttentionBatch.of([20], [20], [[0, 1]]), layer, 2)
    out = native.paged_attention(query, layer, plan, scale=0.2)
    assert out.isnan().all(-1).nonzero().tolist() == sorted(
        [[t, 0] for t in range(3, 20)] + [[t, 1] for t in range(4, 20)]
    )
    native.kv_write(query.flatten(1), query.flatten(1), slots, layer)
    assert native.paged_attention(query, layer, plan, scale=0.2).isfinite().all()


def test_what_lies_outside_is_refused(native):
    layer = PagedKVCache([KVShape(1, 16, 16)], 2, 16, torch.float32).layer(0)
    x, one = torch.zeros(1, 16), torch.zeros(1, dtype=torch.int64)
    rope = RotaryEmbedding(torch.ones(4, 8), torch.zeros(4, 8))
    write = lambda position, slot: native.rope_and_kv_write(  # noqa: E731 -- four uses
        x, x, x, rope, positions=one + position, slots=one + slot, layer=layer
    )
    write(3, 31)
    for position, slot in ((4, 0), (-1, 0), (0, 32), (0, -2)):
        with pytest.raises(ValueError, match="1 of 1 positions or slots lie outside"):
            write(position, slot)
    with pytest.raises(ValueError, match="slots"):
        native.kv_write(x, x, one.int(), layer)
    with pytest.raises(ValueError, match="the layer holds"):
        native.kv_write(torch.zeros(1, 32), x, one, layer)
    with pytest.raises(ValueError, match=r"rope\.cos"):
        native.rope_and_kv_write(
            x, x, x, RotaryEmbedding(torch.ones(4, 9), torch.zeros(4, 9)), positions=one, slots=one, layer=layer
        )


def test_a_token_alone_or_in_a_batch_on_any_number_of_threads(native):
    g = torch.Generator().manual_seed(1)
    _, cos, sin = angles(400, 32, 1)
    rope = RotaryEmbedding(cos, sin, q_norm=torch.rand(64), k_norm=torch.rand(64))
    query, key = torch.randn(400, 9 * 64, generator=g), torch.randn(400, 3 * 64, generator=g)
    at = torch.arange(400)
    results = []
    for threads in (1, 4):
        torch.set_num_threads(threads)
        layer = PagedKVCache([KVShape(3, 64, 64)], 25, 16, torch.bfloat16).layer(0)
        results.append(native.rope_and_kv_write(query, key, key, rope, positions=at, slots=at, layer=layer))
        results.append(layer.keys)
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    one = slice(123, 124)
    alone = native.rope_and_kv_write(
        query[one], key[one], key[one], rope, positions=at[one], slots=at[one], layer=layer
    )
    assert torch.equal(alone, results[0][one])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_blocks_are_copied_whole_and_odd_caches_refused(dtype):
    cache = PagedKVCache([KVShape(2, 8, 8), KVShape(1, 16, 4)], 4, 16, dtype)
    slots = torch.arange(64)
    for layer in cache.layers:
        shape = layer.shape
        layer.write(
            slots,
            torch.randn(64, shape.num_kv_heads, shape.head_dim),
            torch.randn(64, shape.num_kv_heads, shape.v_head_dim),
        )
    cache.copy_blocks([0, 1], [2, 3])
    for layer in cache.layers:
        key, value = layer.gather(slots)
        assert torch.equal(key[:32], key[32:])
        assert torch.equal(value[:32], value[32:])
    assert KVShape(2, 8, 20).bytes_per_block(32, torch.bfloat16) == 2 * (16 + 32) * 32 * 2
    assert KVShape(2, 8, 20).bytes_per_block(32, torch.int8) == 2 * (16 + 32 + 8) * 32
    for block_size in (0, 8, 24):
        with pytest.raises(ValueError, match="block_size"):
            PagedKVCache([KVShape(1, 8, 8)], 1, block_size, torch.float32)
    with pytest.raises(ValueError, match="dtype"):
        PagedKVCache([KVShape(1, 8, 8)], 1, 16, torch.float16)
