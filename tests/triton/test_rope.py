"""Rotary embedding and the cache's write, against transformers and float32 torch."""

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from batchinfer_kernels import kv_write, rope_and_kv_write
from batchinfer_kernels.paged_kv import PagedKV
from tests.triton.checks import TOLERANCE, assert_rounded

EXPLORE = settings(max_examples=14, deadline=None, phases=(Phase.explicit, Phase.generate), derandomize=True)
NUM_POSITIONS = 64


def tables(rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 100.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(NUM_POSITIONS)[:, None] * frequencies
    return angles.cos(), angles.sin()


def projection(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype, seed: int):
    """Queries, keys and values as views of one fused projection."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(dtype)
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    return [part.view(num_tokens, -1, head_dim) if num_tokens else part.view(0, size // head_dim, head_dim)
            for part, size in zip(fused.split(sizes, dim=1), sizes, strict=True)]  # fmt: skip


def test_the_oracle_embeds_as_transformers_does():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = tables(32)
    q, k, _ = projection(5, 4, 2, 32, torch.float32, 0)
    positions = torch.tensor([3, 0, 63, 7, 8])
    full = [torch.cat((table[positions], table[positions]), dim=-1)[None] for table in (cos, sin)]
    expected_q, expected_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *full)
    rope = rope_and_kv_write.Rope(cos, sin)
    for x, expected in ((q, expected_q), (k, expected_k)):
        actual = rope_and_kv_write.rope_reference(x, positions, rope, None)
        torch.testing.assert_close(actual, expected[0].transpose(0, 1))


def test_the_interleaved_oracle_turns_complex_numbers():
    cos, sin = tables(16)
    q, _, _ = projection(5, 2, 1, 16, torch.float32, 0)
    positions = torch.arange(5)
    turned = torch.view_as_complex(q.unflatten(-1, (8, 2)).contiguous()) * torch.complex(cos, sin)[positions][:, None]
    actual = rope_and_kv_write.rope_reference(q, positions, rope_and_kv_write.Rope(cos, sin, interleaved=True), None)
    torch.testing.assert_close(actual, torch.view_as_real(turned).flatten(2))


def assert_cache(actual: PagedKV, expected: PagedKV, dtype: torch.dtype) -> None:
    assert (actual.key_scale is None) == (expected.key_scale is None)
    for mine, theirs in zip(actual.dequantized(), expected.dequantized(), strict=True):
        step = 0.0 if actual.key_scale is None else float(expected.key_scale.max() + expected.value_scale.max())
        torch.testing.assert_close(mine, theirs, rtol=2 * TOLERANCE[dtype], atol=step + 1e-5)
        assert float(((mine - theirs).abs() > 2 * TOLERANCE[dtype] * theirs.abs() + 1e-5).float().mean()) < 0.01


@EXPLORE
@example(heads=(9, 3), head_dim=64, rotary_dim=64, block_size=16, interleaved=False, norms=False,
         dtype=torch.bfloat16, int8=False, num_tokens=3, seed=0)  # fmt: skip
@example(heads=(4, 4), head_dim=80, rotary_dim=32, block_size=64, interleaved=True, norms=True,
         dtype=torch.float32, int8=True, num_tokens=4, seed=1)  # fmt: skip
@given(
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (6, 6), (32, 8)]), head_dim=st.sampled_from([64, 80, 96, 128]),
    rotary_dim=st.sampled_from([16, 32, 48, 64]), block_size=st.sampled_from([16, 32, 64, 128]),
    interleaved=st.booleans(), norms=st.booleans(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    int8=st.booleans(), num_tokens=st.integers(0, 5), seed=st.integers(0, 99),
)  # fmt: skip
def test_rope_and_kv_write(heads, head_dim, rotary_dim, block_size, interleaved, norms, dtype, int8, num_tokens, seed):
    num_heads, num_kv_heads = heads
    generator = torch.Generator().manual_seed(seed)
    q, k, v = projection(num_tokens, num_heads, num_kv_heads, head_dim, dtype, seed)
    weights = [torch.randn(head_dim, generator=generator).to(dtype) for _ in range(2)] if norms else [None, None]
    rope = rope_and_kv_write.Rope(*tables(rotary_dim), interleaved, *weights, norm_offset=1.0)
    positions = torch.randint(0, NUM_POSITIONS, (num_tokens,), generator=generator)
    slots = torch.randperm(3 * block_size, generator=generator)[:num_tokens]
    caches = [
        PagedKV.empty(3, block_size, num_kv_heads, head_dim, torch.int8 if int8 else dtype, "cpu") for _ in range(2)
    ]
    out = rope_and_kv_write.rope_and_kv_write(q, k, v, positions, slots, rope, caches[0])
    expected = rope_and_kv_write.rope_and_kv_write_reference(q, k, v, positions, slots, rope, caches[1])
    assert_rounded(out, expected, slack=2.0)
    assert_cache(caches[0], caches[1], dtype)


@pytest.mark.parametrize("int8", [False, True])
def test_padding_writes_nothing_and_others_keep_their_neighbours(int8):
    kv = PagedKV.empty(2, 16, 2, 16, torch.int8 if int8 else torch.float32, "cpu")
    kv.keys.fill_(7)
    kv.values.fill_(7)
    q, k, v = projection(3, 2, 2, 16, torch.float32, 0)
    rope = rope_and_kv_write.Rope(*tables(16))
    slots = torch.tensor([-1, 17, -1], dtype=torch.int32)
    rope_and_kv_write.rope_and_kv_write(q, k, v, torch.arange(3, dtype=torch.int32), slots, rope, kv)
    written = torch.zeros(2, 16, dtype=torch.bool)
    written[1, 1] = True
    for cache in (kv.keys, kv.values):
        assert (cache[~written] == 7).all()
        assert not (cache[written] == 7).any()
    if int8:
        assert (kv.key_scale[1, :, 1] > 0).all()
        assert int((kv.key_scale > 0).sum()) == 2


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_write_writes_what_it_is_given(int8, dtype):
    _, k, v = projection(5, 3, 3, 80, dtype, 0)
    slots = torch.tensor([5, -1, 0, 31, 16])
    caches = [PagedKV.empty(2, 16, 3, 80, torch.int8 if int8 else dtype, "cpu") for _ in range(2)]
    kv_write.kv_write(k, v, slots, caches[0])
    kv_write.kv_write_reference(k, v, slots, caches[1])
    assert_cache(caches[0], caches[1], dtype)


def test_the_cache_may_hold_heads_before_tokens():
    """Strides are the cache's affair: [num_blocks, num_kv_heads, block_size, head_dim] in memory."""
    memory = [torch.zeros(2, 3, 16, 16).transpose(1, 2) for _ in range(2)]
    kv, plain = PagedKV(*memory), PagedKV.empty(2, 16, 3, 16, torch.float32, "cpu")
    q, k, v = projection(4, 3, 3, 16, torch.float32, 0)
    rope = rope_and_kv_write.Rope(*tables(16))
    for cache in (kv, plain):
        rope_and_kv_write.rope_and_kv_write(q, k, v, torch.arange(4), torch.tensor([0, 9, 16, 31]), rope, cache)
    assert torch.equal(kv.keys, plain.keys)
    assert torch.equal(kv.values, plain.values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 48}, "block_size"),
        ({"dtype": torch.int8, "scales": False}, "need scales"),
        ({"head_dim": 24}, "multiples of 16"),
    ],
)
def test_a_cache_that_no_kernel_reads_well_is_refused(changes, message):
    sizes = {"block_size": 16, "head_dim": 16, "dtype": torch.float32, "scales": True} | changes
    keys = torch.zeros(2, sizes["block_size"], 1, sizes["head_dim"], dtype=sizes["dtype"])
    with pytest.raises(ValueError, match=message):
        PagedKV(keys, keys.clone())


def test_tensors_that_do_not_fit_are_refused():
    kv = PagedKV.empty(2, 16, 2, 16, torch.float32, "cpu")
    q, k, v = projection(3, 2, 2, 16, torch.float32, 0)
    rope = rope_and_kv_write.Rope(*tables(16))
    at = torch.arange(3)
    with pytest.raises(ValueError, match="k has shape"):
        rope_and_kv_write.rope_and_kv_write(q, k[:, :1], v, at, at, rope, kv)
    with pytest.raises(ValueError, match="v has strides"):
        rope_and_kv_write.rope_and_kv_write(q, k, v.transpose(0, 1).contiguous().transpose(0, 1), at, at, rope, kv)
    with pytest.raises(ValueError, match="rotary dimension"):
        rope_and_kv_write.rope_and_kv_write(q, k, v, at, at, rope_and_kv_write.Rope(*tables(32)), kv)
