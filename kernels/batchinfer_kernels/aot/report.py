"""What a compiled kernel needs and does, read from its PTX and cubin."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from triton import knobs

if TYPE_CHECKING:
    from batchinfer_kernels.aot.capture import Launched

SHARED_LIMIT = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that one program may use (CUDA C++ Programming Guide, technical specifications)."""
SHARED_PER_SM = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}
MAX_WARPS_PER_SM = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}
REGISTERS_PER_SM = 65_536
RESERVED_SHARED = 1_024
"""Bytes that the driver adds to each program's shared memory."""

_LABEL = re.compile(r"^\s*(\$L\w+):", re.MULTILINE)
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L\w+);")
_NARROW_LOAD = re.compile(r"ld\.global(?!\S*\.v[248])\S*\.[bfsu](?:8|16)\b")
_SCALAR_LOAD = re.compile(r"ld\.global(?!\S*\.v[248])\S*\.[bfsu](?:8|16|32|64)\b")
_MATRIX = re.compile(r"wgmma\.mma_async\S+|tcgen05\.mma\.\S+|\bmma\.sync\.aligned\.\S+")


@dataclass(frozen=True, slots=True)
class CodeReport:
    """One kernel of one launch for one architecture."""

    kernel: str
    arch: int
    num_warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    matrix_instructions: tuple[str, ...]
    vector_loads: int
    narrow_loads: int
    """Loads of one or two bytes anywhere."""
    scalar_loads_in_loops: int
    async_copies: int
    ptx: str

    @property
    def occupancy(self) -> float:
        """Share of the warps an SM can hold, by registers and shared memory."""
        rounded = -(-self.registers // 8) * 8
        by_registers = REGISTERS_PER_SM // (rounded * 32 * self.num_warps)
        by_shared = SHARED_PER_SM[self.arch] * 1024 // (self.shared_bytes + RESERVED_SHARED)
        limit = MAX_WARPS_PER_SM[self.arch]
        return min(by_registers, by_shared, limit // self.num_warps) * self.num_warps / limit

    def failures(self) -> list[str]:
        """Why a GPU would refuse this kernel or run it slowly, whatever it computes."""
        found = []
        if self.spilled_bytes:
            found.append(f"spills {self.spilled_bytes} bytes")
        if self.shared_bytes > SHARED_LIMIT[self.arch] * 1024:
            found.append(f"needs {self.shared_bytes} bytes of shared memory")
        if self.registers * 32 * self.num_warps > REGISTERS_PER_SM:
            found.append(f"{self.registers} registers x {self.num_warps} warps do not fit an SM")
        return found


def inspect_launch(launched: Launched, arch: int) -> CodeReport:
    """Read a kernel compiled for ``sm_<arch>``."""
    ptx = launched.compiled.asm["ptx"]
    metadata = launched.compiled.metadata
    registers, spilled = _resources(launched.compiled.asm["cubin"])
    return CodeReport(
        kernel=launched.name.removeprefix("_").removesuffix("_kernel"),
        arch=arch,
        num_warps=metadata.num_warps,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=metadata.shared,
        matrix_instructions=tuple(sorted({_short(name) for name in _MATRIX.findall(ptx)})),
        vector_loads=len(re.findall(r"ld\.global\S*\.v[248]", ptx)),
        narrow_loads=len(_NARROW_LOAD.findall(ptx)),
        scalar_loads_in_loops=sum(len(_SCALAR_LOAD.findall(body)) for body in loop_bodies(ptx)),
        async_copies=len(re.findall(r"cp\.async\.c[ag]|cp\.async\.bulk\.tensor", ptx)),
        ptx=ptx,
    )


def loop_bodies(ptx: str) -> list[str]:
    """The text between each label and the last branch back to it."""
    labels = {match[1]: match.start() for match in _LABEL.finditer(ptx)}
    ends: dict[int, int] = {}
    for match in _BRANCH.finditer(ptx):
        start = labels.get(match[1], match.start())
        if start < match.start():
            ends[start] = max(ends.get(start, 0), match.start())
    return [ptx[start:end] for start, end in ends.items()]


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
