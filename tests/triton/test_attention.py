"""Paged attention against float32 torch: ragged batches, head ratios, page edges, windows, caps, sinks, INT8, prefixes."""

import dataclasses

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from batchinfer_kernels import merge_states, paged_attention
from batchinfer_kernels.attention_plan import PrefixGroup, QuerySpan, plan_attention
from batchinfer_kernels.kv_write import kv_write_reference
from batchinfer_kernels.paged_kv import PagedKV
from tests.triton.checks import TOLERANCE

EXPLORE = settings(max_examples=16, deadline=None, phases=(Phase.explicit, Phase.generate), derandomize=True)
F32, BF16 = torch.float32, torch.bfloat16


@dataclasses.dataclass
class Step:
    """A batch in a cache whose blocks are shuffled and whose unused slots hold NaN."""

    q: torch.Tensor
    kv: PagedKV
    tables: torch.Tensor
    positions: torch.Tensor
    spans: list[QuerySpan]

    def run(self, form, *, groups=(), split=64, config=None) -> torch.Tensor:
        group_size = self.q.shape[1] // self.kv.num_kv_heads
        plan = plan_attention(
            self.spans, group_size=group_size, sliding_window=form.sliding_window, prefix_groups=groups, split=split
        )
        return paged_attention.paged_attention(self.q, self.kv, self.tables, self.positions, plan, form, config=config)

    def expected(self, form) -> torch.Tensor:
        return paged_attention.paged_attention_reference(self.q, self.kv, self.tables, self.spans, form)


def make_step(lengths, *, heads=(4, 2), head_dim=16, block_size=16, dtype=F32, int8=False, seed=0, shared=0) -> Step:
    """``lengths`` are (num_queries, context) of each sequence; the first ``shared`` tokens of all lie in the same blocks."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-context // block_size) for _, context in lengths]
    pool = torch.randperm(sum(num_blocks) + 2, generator=generator).int()
    tables = torch.full((len(lengths), max(num_blocks, default=1)), -(2**31), dtype=torch.int32)
    kv = PagedKV.empty(len(pool), block_size, heads[1], head_dim, torch.int8 if int8 else dtype, "cpu")
    poison = 127 if int8 else float("nan")
    kv.keys.fill_(poison)
    kv.values.fill_(poison)
    for scales in (kv.key_scale, kv.value_scale):
        if scales is not None:
            scales.fill_(float("nan"))
    spans, first, used, num_shared = [], 0, 0, shared // block_size
    for row, ((num_queries, context), count) in enumerate(zip(lengths, num_blocks, strict=True)):
        tables[row, :count] = pool[used : used + count]
        if row:
            tables[row, :num_shared] = tables[0, :num_shared]
        used += count
        spans.append(QuerySpan(first, num_queries, context, row))
        first += num_queries
        at = torch.arange(num_shared * block_size if row else 0, context)
        slots = tables[row].long()[at // block_size] * block_size + at % block_size
        k, v = torch.randn(2, len(at), heads[1], head_dim, generator=generator).to(dtype)
        kv_write_reference(k, v, slots, kv)
    q = torch.randn(first, heads[0], head_dim, generator=generator).to(dtype)
    positions = [torch.arange(s.context - s.num_queries, s.context) for s in spans]
    return Step(q, kv, tables, torch.cat([torch.empty(0, dtype=torch.long), *positions]).int(), spans)


def plain(head_dim=16, **options) -> paged_attention.AttentionForm:
    return paged_attention.AttentionForm(head_dim**-0.5, **options)


def assert_attends(step: Step, form, **options) -> torch.Tensor:
    out = step.run(form, **options)
    tolerance = TOLERANCE[out.dtype] * 2  # the output's rounding and that of the softmax's weights
    torch.testing.assert_close(out.float(), step.expected(form), rtol=tolerance, atol=tolerance)
    return out


def test_the_oracle_is_torchs_attention():
    step = make_step([(5, 5), (3, 20), (1, 33)], heads=(6, 2))
    expected = step.expected(plain())
    keys, values = (cache.flatten(0, 1) for cache in step.kv.dequantized())
    for span in step.spans:
        at = torch.arange(span.context)
        slots = step.tables[span.table].long()[at // 16] * 16 + at % 16
        rows = slice(span.first, span.first + span.num_queries)
        q, k, v = (x.transpose(0, 1)[None] for x in (step.q[rows], keys[slots], values[slots]))
        mask = at <= torch.arange(span.context - span.num_queries, span.context)[:, None]
        sdpa = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        torch.testing.assert_close(expected[rows], sdpa[0].transpose(0, 1))


LENGTHS = st.lists(
    st.tuples(st.sampled_from([1, 1, 1, 2, 5, 17]), st.sampled_from([1, 2, 15, 16, 17, 31, 32, 48, 63, 64, 65, 70, 130])).map(
        lambda pair: (min(pair), pair[1])
    ),
    min_size=0, max_size=4,
)  # fmt: skip


@EXPLORE
@example(lengths=[(1, 64), (1, 65), (1, 128)], heads=(3, 1), head_dim=64, block_size=64, dtype=BF16, int8=False,
         window=None, softcap=None, sinks=False, seed=0)  # fmt: skip
@example(lengths=[(17, 33), (1, 130), (16, 16)], heads=(8, 2), head_dim=80, block_size=16, dtype=BF16, int8=True,
         window=20, softcap=5.0, sinks=True, seed=1)  # fmt: skip
@given(
    lengths=LENGTHS, heads=st.sampled_from([(1, 1), (3, 3), (3, 1), (4, 1), (10, 2), (6, 1), (7, 1), (8, 1), (32, 1)]),
    head_dim=st.sampled_from([16, 64, 80, 96, 128]), block_size=st.sampled_from([16, 32, 64, 128]),
    dtype=st.sampled_from([F32, BF16, torch.float16]), int8=st.booleans(),
    window=st.sampled_from([None, None, 1, 16, 33, 100]), softcap=st.sampled_from([None, None, 2.0, 30.0]),
    sinks=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_paged_attention(lengths, heads, head_dim, block_size, dtype, int8, window, softcap, sinks, seed):
    step = make_step(lengths, heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype, int8=int8, seed=seed)
    strengths = torch.randn(heads[0], generator=torch.Generator().manual_seed(seed)) if sinks else None
    assert_attends(step, plain(head_dim, sliding_window=window, softcap=softcap, sinks=strengths))


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"), [((9, 3), 64, 64), ((32, 8), 128, 128), ((4, 1), 256, 64)]
)
@pytest.mark.parametrize("int8", [False, True])
def test_production_shapes(heads, head_dim, block_size, int8):
    """The sizes of SmolLM2, Llama and Gemma heads, splits and tiles as on a GPU, decode and prefill in one launch."""
    step = make_step([(1, 600), (40, 72)], heads=heads, head_dim=head_dim, block_size=block_size, dtype=BF16, int8=int8)
    assert_attends(step, plain(head_dim), split=512)


@pytest.mark.parametrize("context", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 192])
def test_contexts_around_the_edges_of_pages_and_splits(context):
    assert_attends(make_step([(1, context), (context, context)]), plain())


@pytest.mark.parametrize("window", [1, 15, 16, 63, 64, 65, 200])
def test_a_window_is_exact_to_the_token(window):
    """A query sees ``window`` positions, itself included, whether it decodes or belongs to a chunk."""
    step = make_step([(1, 150), (30, 140)])
    out = assert_attends(step, plain(sliding_window=window))
    if window == 1:  # then a query sees only its own value
        values = step.kv.values.flatten(0, 1)
        slot = step.tables[0, 149 // 16] * 16 + 149 % 16
        torch.testing.assert_close(out[0], values[slot].repeat_interleave(2, dim=0))


def test_caps_pages_and_scales_at_once():
    """Blocks of two tiles of keys, INT8, a cap that bites, heads that share keys three to one."""
    step = make_step([(1, 150), (7, 140)], heads=(6, 2), block_size=128, int8=True)
    assert_attends(step, plain(softcap=0.5))


@pytest.mark.parametrize("strength", [-100.0, 0.0, 1.5, 100.0])
def test_sinks_however_strong(strength):
    step = make_step([(1, 20), (1, 150), (4, 9)])
    out = assert_attends(step, plain(sinks=torch.full((4,), strength)))
    if strength == 100.0:
        assert out.abs().max() < 1e-6


@pytest.mark.parametrize("num_sequences", [2, 9])
def test_a_shared_prefix_gives_what_private_reading_gives(num_sequences):
    """To the bit: a row's splits are the same whoever computes them, in either tile, or in the second of two."""
    lengths = [(1, 200 + 7 * i) for i in range(num_sequences)]
    step = make_step(lengths, shared=176, dtype=BF16, heads=(8, 1))
    group = PrefixGroup(tuple(range(num_sequences)), 176)
    shared = step.run(plain(), groups=[group])
    assert torch.equal(shared, step.run(plain()))
    torch.testing.assert_close(shared.float(), step.expected(plain()), rtol=2e-2, atol=2e-2)


def test_several_groups_chunks_and_loners_in_one_launch():
    step = make_step([(1, 150), (1, 160), (1, 170), (1, 133), (1, 129), (6, 140)], shared=128)
    groups = [PrefixGroup((0, 2), 128), PrefixGroup((1, 3, 5), 64)]
    assert torch.equal(
        assert_attends(step, plain(sinks=torch.ones(4)), groups=groups), step.run(plain(sinks=torch.ones(4)))
    )


def test_a_rows_result_does_not_depend_on_its_batch():
    step = make_step([(1, 150), (1, 37), (20, 80), (1, 300)], dtype=BF16)
    together = step.run(plain())
    for span in step.spans:
        rows = slice(span.first, span.first + span.num_queries)
        alone = Step(step.q[rows], step.kv, step.tables, step.positions[rows], [dataclasses.replace(span, first=0)])
        assert torch.equal(alone.run(plain()), together[rows])


def test_how_a_prompt_is_cut_into_chunks_does_not_matter():
    """Each query reads from position 0 in the same tiles of keys."""
    step = make_step([(90, 90)], dtype=BF16)
    whole = step.run(plain())
    cuts = [(0, 33), (33, 64), (64, 90)]
    parts = []
    for begin, end in cuts:
        span = QuerySpan(0, end - begin, end, 0)
        parts.append(Step(step.q[begin:end], step.kv, step.tables, step.positions[begin:end], [span]).run(plain()))
    assert torch.equal(torch.cat(parts), whole)


def test_tiles_that_are_compiled_differently_are_launched_apart(monkeypatch):
    """On sm_80 the large tile of a head of 128 takes eight warps, and must not change how decode tokens are computed."""
    monkeypatch.setattr(paged_attention, "target_arch", lambda: 80)
    step = make_step([(1, 150), (5, 20), (1, 70)], head_dim=128, heads=(2, 1))
    assert_attends(step, plain(128))


def test_padding_items_do_nothing():
    """A captured graph has a fixed grid: the plan is filled up with items of no queries and merges of no token."""
    step = make_step([(1, 150), (1, 20)])
    plan = plan_attention(step.spans, group_size=2, split=64)
    padded = dataclasses.replace(
        plan,
        items=torch.cat((plan.items, torch.zeros(3, 6, dtype=torch.int32))),
        merges=torch.cat((plan.merges, torch.tensor([[-1, 0, 0]], dtype=torch.int32))),
    )
    out = paged_attention.paged_attention(step.q, step.kv, step.tables, step.positions, padded, plain())
    assert torch.equal(out, step.run(plain()))


@EXPLORE
@given(num_states=st.integers(1, 4), num_tokens=st.integers(0, 3), heads=st.integers(1, 9), seed=st.integers(0, 99))
def test_merge_states(num_states, num_tokens, heads, seed):
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(num_states, num_tokens, heads, 16, generator=generator)
    lses = torch.randn(num_states, num_tokens, heads, generator=generator) * 20
    lses[torch.rand(lses.shape, generator=generator) < 0.3] = float("-inf")
    actual = merge_states.merge_states(outputs, lses)
    expected = merge_states.merge_states_reference(outputs, lses)
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_plans_that_cannot_be_are_refused():
    spans = [QuerySpan(0, 1, 100, 0), QuerySpan(1, 1, 100, 1)]
    with pytest.raises(ValueError, match="multiple of 64"):
        plan_attention(spans, group_size=1, split=100)
    with pytest.raises(ValueError, match="shorter than its prefix"):
        plan_attention(spans, group_size=1, prefix_groups=[PrefixGroup((0, 1), 128)])
    with pytest.raises(ValueError, match="two prefix groups"):
        plan_attention(spans, group_size=1, prefix_groups=[PrefixGroup((0, 1), 64), PrefixGroup((1,), 64)])


def test_heads_that_do_not_fit_are_refused():
    step = make_step([(1, 20)])
    with pytest.raises(ValueError, match="do not fit"):
        dataclasses.replace(step, q=step.q[:, :3].contiguous()).run(plain())
    with pytest.raises(ValueError, match="sinks"):
        step.run(plain(sinks=torch.zeros(3)))
