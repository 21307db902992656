"""Every op that the package registers, in every type that it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchinfer_kernels import library
from benchmarks.gpu.case import F16, F32
from benchmarks.gpu.cases_attention import attention_cases
from benchmarks.gpu.cases_heads import head_cases
from benchmarks.gpu.cases_products import product_cases
from benchmarks.gpu.cases_rows import rows_cases

if TYPE_CHECKING:
    from benchmarks.gpu.case import Case, Sizes


def registered_ops() -> set[str]:
    """Names of the ops of ``torch.ops.batchinfer``."""
    return {name for name, value in vars(library).items() if isinstance(value, torch.library.CustomOpDef)}


def all_cases(sizes: Sizes) -> list[Case]:
    """All cases; float16 and float32, which few models run in, come last."""
    cases = [*rows_cases(sizes), *attention_cases(sizes), *product_cases(sizes), *head_cases(sizes)]
    return sorted(cases, key=lambda case: case.dtype in {F16, F32})


def chosen_cases(sizes: Sizes, only: list[str], *, is_quick: bool) -> list[Case]:
    """Those whose name contains one of ``only``, or all; the first of each op and type if ``is_quick``, and all goals."""
    cases = [case for case in all_cases(sizes) if not only or any(part in case.name for part in only)]
    if not is_quick:
        return cases
    first = {(case.op, case.dtype): case for case in reversed(cases)}
    return [case for case in cases if case.goal is not None or first[case.op, case.dtype] is case]
