"""Several adapters in one batch, against float32 torch."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from batchinfer_kernels import lora, reference
from tests.triton import interpreter
from tests.triton.checks import assert_rounded

F32, BF16, F16, I8 = torch.float32, torch.bfloat16, torch.float16, torch.int8
EXPLORE = settings(max_examples=10, deadline=None, phases=(Phase.explicit, Phase.generate), derandomize=True)


def randn(generator, *shape):
    return torch.randn(*shape, generator=generator)


def table_of(adapters, dtype):
    """Addresses of adapters, filled up to a power of two; None is one without this projection."""
    size = len(lora.padded_offsets([0] * len(adapters))) - 1
    columns = [[0] * size for _ in range(3)]
    for g, adapter in enumerate(adapters):
        if adapter is not None:
            down, up = adapter
            columns[0][g], columns[1][g], columns[2][g] = down.data_ptr(), up.data_ptr(), len(down)
    interpreter.reach(*(tensor for adapter in adapters if adapter for tensor in adapter))
    return lora.LoraTable(*(torch.tensor(column) for column in columns), max(columns[2]), dtype)


def rows_of(uses, num_adapters):
    """``uses`` is the adapter of each row of a step, or None."""
    groups = [[row for row, used in enumerate(uses) if used == g] for g in range(num_adapters)]
    order = torch.tensor([row for group in groups for row in group], dtype=torch.int32)
    offsets = lora.padded_offsets([len(group) for group in groups])
    return lora.LoraRows(order, torch.tensor(offsets, dtype=torch.int32))


def make_adapters(generator, ranks, k, n, dtype):
    return [
        (randn(generator, r, k).to(dtype) * 0.25, randn(generator, n, r).to(dtype) * 0.25) if r else None for r in ranks
    ]


def check(uses, ranks, k, n, x_dtype, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    adapters = make_adapters(generator, ranks, k, n, dtype)
    x, x_scale = randn(generator, len(uses), k), None
    if x_dtype == I8:
        x, x_scale = reference.quantize_rows(x)
    x, out = x.to(x_dtype), randn(generator, len(uses), n).to(dtype)
    rows = rows_of(uses, len(ranks))
    expected = lora.lora_add_reference(out, x, rows, adapters, x_scale=x_scale)
    plain = out.clone()
    lora.lora_add(out, x, rows, table_of(adapters, dtype), x_scale=x_scale)
    for row, used in enumerate(uses):
        if used is None or not ranks[used]:
            assert torch.equal(out[row], plain[row])
    # what is rounded between the products may fall to either side
    slack = 30.0 if dtype == F32 else 4.0
    size = (expected.abs().max() * torch.finfo(dtype).eps * slack).item()
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=size)
    return out


@EXPLORE
@given(
    uses=st.lists(st.sampled_from([None, 0, 1, 2]), min_size=1, max_size=40), ranks=st.tuples(*[st.sampled_from([0, 16, 48])] * 3),
    k=st.sampled_from([16, 144, 1040]), n=st.sampled_from([16, 40, 144]), dtype=st.sampled_from([F32, BF16, F16]),
    is_int8=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_lora_add(uses, ranks, k, n, dtype, is_int8, seed):
    check(uses, ranks, k, n, I8 if is_int8 else dtype, dtype, seed)


def test_adapters_of_several_ranks_tiles_and_shares_of_the_depth():
    """More rows than a tile, a depth of three shares, ranks of more than a block, an adapter without rows, plain rows."""
    uses = [[0, None, 2, 3][row % 4] for row in range(140)]
    check(uses, (16, 16, 80, 0), 1552, 176, I8, F32, 0)
    check(uses, (16, 16, 80, 0), 1552, 176, BF16, BF16, 1)


def test_a_row_does_not_depend_on_its_neighbours():
    generator = torch.Generator().manual_seed(3)
    adapters = make_adapters(generator, (16, 64), 1040, 48, BF16)
    x, out = randn(generator, 70, 1040).to(BF16), torch.zeros(70, 48).to(BF16)
    lora.lora_add(out, x, rows_of([row % 2 for row in range(70)], 2), table_of(adapters, BF16))
    alone = torch.zeros(1, 48).to(BF16)
    lora.lora_add(alone, x[69:], rows_of([0], 1), table_of(adapters[1:], BF16))
    assert torch.equal(alone[0], out[69])


def test_it_is_the_product_of_the_merged_weights():
    """``x @ (W + B A).T``, in float64."""
    generator = torch.Generator().manual_seed(4)
    (adapter,) = make_adapters(generator, (32,), 64, 80, F32)
    x, w = randn(generator, 5, 64), randn(generator, 80, 64)
    out = x @ w.T
    lora.lora_add(out, x, rows_of([0] * 5, 1), table_of([adapter], F32))
    merged = w.double() + adapter[1].double() @ adapter[0].double()
    assert_rounded(out, (x.double() @ merged.T).float(), slack=10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": torch.zeros(4, dtype=torch.int32)}, "power of two"),
        ({"downs": torch.zeros(2, dtype=torch.int64)}, "downs must be"),
        ({"max_rank": 8}, "multiples of 16"),
        ({"x": torch.zeros(3, 32).to(BF16)}, "adapters' type"),
        ({"x": torch.zeros(3, 32, dtype=I8)}, "int8 takes scales"),
        ({"x": torch.zeros(2, 32)}, "rows"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    one = torch.zeros(1, dtype=torch.int64)
    given = {
        "x": torch.zeros(3, 32),
        "offsets": torch.zeros(2, dtype=torch.int32),
        "downs": one,
        "max_rank": 16,
    } | change
    rows = lora.LoraRows(torch.zeros(1, dtype=torch.int32), given["offsets"])
    table = lora.LoraTable(given["downs"], one, one, given["max_rank"], F32)
    with pytest.raises(ValueError, match=message):
        lora.lora_add(torch.zeros(3, 16), given["x"], rows, table)
