"""The gate: compile the cases, judge their code, write the table."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from batchinfer_kernels.aot.amd import inspect_gcn
from batchinfer_kernels.aot.capture import captured_launches
from batchinfer_kernels.aot.cases import all_cases
from batchinfer_kernels.aot.nvidia import inspect_ptx
from batchinfer_kernels.aot.report import target_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchinfer_kernels.aot.cases import Case
    from batchinfer_kernels.aot.report import CodeReport

TABLE_HEAD = """# Kernels, as compiled

Written by `python -m batchinfer_kernels.aot --write docs/kernels.md`, which runs each launcher on meta tensors and
compiles what it would launch; no GPU takes part. Registers are a thread's, shared memory is a program's, occupancy is the
share of an SM's warps that registers and shared memory allow. No kernel spills. Narrow loads are loads of one or two
bytes. Nothing here says how fast a kernel runs. gfx942 counts lanes of 64, and LDS as shared memory.

Which config a GEMM takes: up to 64 rows wait for the weights, so tiles are as low as the rows are few and 64 channels wide,
and an INT8 product with too few tiles for the SMs splits its depth over up to 8 programs (`split_k`), whose int32 shares
are added exactly by `reduce`: about equal shares for every SM, in steps of powers of two. More
rows of INT8 in too few large tiles are `stream`: an SM each takes an equal share of all tiles' depths, and `add_partials`
adds what several hold of one tile, where `gemm_config.clocks` says that this saves an eighth: deep products of narrow
matrices, from 65 to some hundred rows; up to 64 rows wait for the memory however they are divided. Other
rows take tiles of 128 x 128, or 128 x 256 through TMA on sm_90 (FP8: sm_100 too), if neither a residual is added nor the
result is INT8: with either the wide tile needs more registers than there are. Experts take tiles as high as an expert
has rows on average. Products that round (W8A16, W4A16, FP8, bfloat16) never split their depth.

| case | kernel | arch | warps | registers | shared KiB | occupancy | vector / narrow / async loads | matrix instructions |
|---|---|---|---|---|---|---|---|---|
"""


def compile_case(case: Case, arch: int | str) -> list[CodeReport]:
    """The kernels that a case launches, compiled for an architecture."""
    with captured_launches(arch) as launched:
        case.run()
    return [inspect_ptx(one, arch) if isinstance(arch, int) else inspect_gcn(one, arch) for one in launched]


def failures_of(case: Case, arch: int | str, reports: list[CodeReport]) -> list[str]:
    """What is wrong with a case's code; empty if nothing is."""
    found = []
    for report in reports:
        found += [f"{report.kernel}: {failure}" for failure in report.failures()]
        if report.scalar_loads_in_loops > case.max_scalar_loads_in_loops:
            found.append(f"{report.kernel}: {report.scalar_loads_in_loops} scalar loads in loops")
        if report.narrow_loads > case.max_narrow_loads:
            found.append(f"{report.kernel}: {report.narrow_loads} loads of one or two bytes")
        if not report.vector_loads + report.async_copies and report.kernel not in case.small:
            found.append(f"{report.kernel}: no vector loads")
    code = "\n".join(report.assembly for report in reports)
    found += [f"its code lacks {pattern}" for pattern in expected_of(case, arch) if not re.search(pattern, code)]
    return [f"{case.name} on {target_name(arch)}: {failure}" for failure in found]


def expected_of(case: Case, arch: int | str) -> tuple[str, ...]:
    """What a case's code must contain: sm_86 and sm_89 have the units of sm_80, gfx ones their own name for them."""
    if isinstance(arch, str):
        return (r"mfma_i32",) if case.is_int8 else (r"mfma",) if case.expect else ()
    return (*case.expect.get(0, ()), *case.expect.get(80 if arch in (86, 89) else arch, ()))


def judge(name: str, arch: int | str) -> tuple[str, list[CodeReport], list[str]]:
    """The case's name, its kernels and its failures; an exception of the launcher or the compiler is a failure."""
    case = next(case for case in all_cases() if case.name == name)
    try:
        reports = compile_case(case, arch)
    except Exception as error:  # noqa: BLE001 -- whatever the compiler dislikes is a finding, and the rest goes on
        reason = str(error).strip().rsplit("\n", maxsplit=1)[-1]  # Triton quotes the kernel's source first
        return name, [], [f"{name} on {target_name(arch)}: {type(error).__name__}: {reason}"]
    return name, reports, failures_of(case, arch, reports)


def table_row(case: str, r: CodeReport) -> str:
    """One line of the page."""
    return (
        f"| {case} | {r.kernel} | {r.target} | {r.num_warps} | {r.registers} | {r.shared_bytes / 1024:.1f} "
        f"| {r.occupancy:.0%} | {r.vector_loads} / {r.narrow_loads} / {r.async_copies} "
        f"| {', '.join(r.matrix_instructions) or '-'} |"
    )


def table(rows: Iterable[tuple[str, CodeReport]]) -> str:
    """The page of all (case name, report)."""
    return TABLE_HEAD + "".join(table_row(*row) + "\n" for row in rows)
