"""Reads what NVIDIA's compiler made: PTX and cubin."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from triton import knobs

from batchinfer_kernels.aot.report import CodeReport, kernel_name, loop_bodies

if TYPE_CHECKING:
    from batchinfer_kernels.aot.capture import Launched

_LABEL = re.compile(r"^\s*(\$L\w+):", re.MULTILINE)
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L\w+);")
_NARROW_LOAD = re.compile(r"ld\.global(?!\S*\.v[248])\S*\.[bfsu](?:8|16)\b")
_SCALAR_LOAD = re.compile(r"ld\.global(?!\S*\.v[248])\S*\.[bfsu](?:8|16|32|64)\b")
_MATRIX = re.compile(r"wgmma\.mma_async\S+|tcgen05\.mma\.\S+|\bmma\.sync\.aligned\.\S+")


def inspect_ptx(launched: Launched, arch: int) -> CodeReport:
    """Read a kernel compiled for ``sm_<arch>``."""
    ptx = launched.compiled.asm["ptx"]
    metadata = launched.compiled.metadata
    registers, spilled = _resources(launched.compiled.asm["cubin"])
    return CodeReport(
        kernel=kernel_name(launched.name),
        arch=arch,
        num_warps=metadata.num_warps,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=metadata.shared,
        matrix_instructions=tuple(sorted({_short(name) for name in _MATRIX.findall(ptx)})),
        vector_loads=len(re.findall(r"ld\.global\S*\.v[248]", ptx)),
        narrow_loads=len(_NARROW_LOAD.findall(ptx)),
        scalar_loads_in_loops=sum(len(_SCALAR_LOAD.findall(body)) for body in loop_bodies(ptx, _LABEL, _BRANCH)),
        async_copies=len(re.findall(r"cp\.async\.c[ag]|cp\.async\.bulk\.tensor", ptx)),
        assembly=ptx,
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of local memory: stack and spills."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603 -- Triton's own tool
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {text[-200:]!r}")
    return int(found[1]), int(found[2]) + int(found[3])


def _short(instruction: str) -> str:
    """``wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8`` -> ``wgmma m64n128k32 s32.s8.s8``."""
    family = instruction.split(".", maxsplit=1)[0]
    shape = re.search(r"m\d+n\d+k\d+", instruction)
    tail = instruction.rsplit(shape[0] + ".", maxsplit=1)[-1] if shape else instruction.split(".", 2)[-1]
    tail = re.sub(r"^(?:row\.col\.|satfinite\.)+", "", tail)
    return f"{family} {shape[0] if shape else ''} {tail}".replace("  ", " ")
