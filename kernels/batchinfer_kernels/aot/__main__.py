"""``python -m batchinfer_kernels.aot [--arch 80 90 gfx942] [--only REGEX] [--write FILE | --check FILE]``.

The exit status is 1 where a kernel fails, or where the checked page lacks a line.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchinfer_kernels.aot.report import CodeReport

ARCHS = ("80", "86", "89", "90", "100", "gfx942")


def _print(name: str, reports: list[CodeReport], failures: list[str]) -> None:
    for r in reports:
        sys.stdout.write(
            f"{name:52} {r.kernel:28} {r.target} warps={r.num_warps} regs={r.registers} spill={r.spilled_bytes} "
            f"smem={r.shared_bytes} occ={r.occupancy:.0%} v={r.vector_loads} narrow={r.narrow_loads} "
            f"loop={r.scalar_loads_in_loops} async={r.async_copies} {' '.join(r.matrix_instructions)}\n"
        )
    sys.stdout.writelines(f"FAILED {failure}\n" for failure in failures)
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Compile and judge; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m batchinfer_kernels.aot", description=__doc__)
    parser.add_argument("--arch", nargs="+", default=list(ARCHS), choices=ARCHS)
    parser.add_argument("--only", default="", help="a regular expression over the cases' names")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", type=Path, help="write the table to this file")
    parser.add_argument("--check", type=Path, help="fail where this file lacks a line of the table")
    options = parser.parse_args(arguments)
    os.environ.pop("TRITON_INTERPRET", None)
    # imported here: compiling and interpreting exclude each other, and the variable is read on import
    from batchinfer_kernels.aot.cases import all_cases  # noqa: PLC0415 -- as above
    from batchinfer_kernels.aot.gate import judge, table, table_row  # noqa: PLC0415 -- as above

    cases = [case for case in all_cases() if re.search(options.only, case.name)]
    archs = [int(name) if name.isdigit() else name for name in options.arch]
    work = [(case.name, arch) for case in cases for arch in archs if arch in case.archs]
    rows, failures = [], []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for name, reports, failed in pool.map(judge, *zip(*work, strict=True)):
            _print(name, reports, failed)
            rows += [(name, report) for report in reports]
            failures += failed
    if options.write:
        options.write.write_text(table(rows))
    if options.check:
        page = set(options.check.read_text().splitlines())
        missing = [line for line in (table_row(*row) for row in rows) if line not in page]
        failures += [f"{options.check} lacks: {line}" for line in missing]
        sys.stdout.writelines(f"{options.check} lacks: {line}\n" for line in missing)
    sys.stdout.write(f"{len(rows)} kernels compiled, {len(failures)} failures\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
