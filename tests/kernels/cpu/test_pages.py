from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from batchinfer_kernels.cpu import untouched_zeros
from batchinfer_kernels.cpu.pages import LINE, ROOM, Arena


def test_too_much_is_told_as_such():
    with pytest.raises(MemoryError, match="not enough memory"):
        untouched_zeros((1 << 60,), torch.int8)


def test_what_is_copied_lies_side_by_side_and_apart():
    """From several threads at once; strided, of other types, and with more than the rest of the room."""
    arena = Arena()
    originals = [torch.randn(7, 300 + i).to(torch.bfloat16).T for i in range(200)]
    originals += [torch.full((ROOM // 3,), i, dtype=torch.int8) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        copies = list(pool.map(arena.copy, originals))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(copies, originals, strict=True))
    assert all(copy.is_contiguous() and copy.data_ptr() % LINE == 0 for copy in copies)
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 2


def test_what_has_no_room_lies_alone():
    arena = Arena()
    small, large, other = (arena.copy(torch.ones(size, dtype=torch.int8)) for size in (10, ROOM + 1, 10))
    assert small.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert large.untyped_storage().nbytes() == ROOM + 1
