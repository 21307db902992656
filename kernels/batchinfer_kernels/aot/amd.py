"""Reads what AMD's compiler made: the assembly of a gfx target, with its own account of registers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from batchinfer_kernels.aot.report import CodeReport, kernel_name, loop_bodies

if TYPE_CHECKING:
    from batchinfer_kernels.aot.capture import Launched

_LABEL = re.compile(r"^(\.LBB\w+):", re.MULTILINE)
_BRANCH = re.compile(r"\bs_c?branch\w*\s+(\.LBB\w+)")
_NARROW_LOAD = re.compile(r"\b(?:global|buffer|flat)_load_(?:[us]byte|[us]?short)\w*")
_VECTOR_LOAD = re.compile(r"\b(?:global|buffer|flat)_load_dwordx[234]\b")
_MATRIX = re.compile(r"\bv_s?mfma(?:c)?_\w+")


def inspect_gcn(launched: Launched, arch: str) -> CodeReport:
    """Read a kernel compiled for a gfx target.

    A lane loads at least four bytes where several of its numbers lie together; a whole wave's lie together then, so
    only loads of one and two bytes count as scalar. Scalar registers spill into vector ones, which costs no memory.
    """
    code = launched.compiled.asm["amdgcn"]
    metadata = launched.compiled.metadata
    spilled = 4 * _number("vgpr_spill_count", code) + _number("private_segment_fixed_size", code)
    return CodeReport(
        kernel=kernel_name(launched.name),
        arch=arch,
        num_warps=metadata.num_warps,
        registers=_number("vgpr_count", code) + _number("agpr_count", code),
        spilled_bytes=spilled,
        shared_bytes=metadata.shared,
        matrix_instructions=tuple(sorted({name.removeprefix("v_") for name in _MATRIX.findall(code)})),
        vector_loads=len(_VECTOR_LOAD.findall(code)),
        narrow_loads=len(_NARROW_LOAD.findall(code)),
        scalar_loads_in_loops=sum(len(_NARROW_LOAD.findall(body)) for body in loop_bodies(code, _LABEL, _BRANCH)),
        async_copies=0,
        assembly=code,
    )


def _number(name: str, code: str) -> int:
    found = re.search(rf"\.{name}:\s*(\d+)", code)
    if found is None:
        raise RuntimeError(f"the assembly does not tell its {name}")
    return int(found[1])
