"""What a compiled kernel needs and does, whatever GPU it is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import re


@dataclass(frozen=True, slots=True)
class Limits:
    """What one architecture has. Shared memory (AMD: LDS) in KiB; ``registers`` a thread of a full SM (AMD: CU) shares."""

    shared_a_program: int
    shared_an_sm: int
    warps_an_sm: int
    registers: int = 65_536
    lanes: int = 32
    max_registers: int = 255
    reserved_shared: int = 1_024
    """Bytes that the driver adds to each program's shared memory."""


LIMITS: dict[int | str, Limits] = {
    80: Limits(163, 164, 64),
    86: Limits(99, 100, 48),
    89: Limits(99, 100, 48),
    90: Limits(227, 228, 64),
    100: Limits(227, 228, 64),
    120: Limits(99, 100, 48),
    # four SIMDs of 512 registers a lane each
    "gfx942": Limits(64, 64, 32, registers=131_072, lanes=64, max_registers=512, reserved_shared=0),
}
"""CUDA C++ Programming Guide, technical specifications; AMD Instinct MI300 ISA guide."""


@dataclass(frozen=True, slots=True)
class CodeReport:
    """One kernel of one launch for one architecture."""

    kernel: str
    arch: int | str
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
    assembly: str
    """PTX or AMD's assembly."""

    @property
    def target(self) -> str:
        """``sm_90`` or ``gfx942``."""
        return target_name(self.arch)

    @property
    def occupancy(self) -> float:
        """Share of the warps an SM can hold, by registers and shared memory."""
        limits = LIMITS[self.arch]
        rounded = -(-max(1, self.registers) // 8) * 8
        by_registers = limits.registers // (rounded * limits.lanes * self.num_warps)
        needed = self.shared_bytes + limits.reserved_shared
        by_shared = limits.shared_an_sm * 1024 // needed if needed else limits.warps_an_sm
        programs = min(by_registers, by_shared, limits.warps_an_sm // self.num_warps)
        return programs * self.num_warps / limits.warps_an_sm

    def failures(self) -> list[str]:
        """Why a GPU would refuse this kernel or run it slowly, whatever it computes."""
        found = []
        limits = LIMITS[self.arch]
        if self.spilled_bytes:
            found.append(f"spills {self.spilled_bytes} bytes")
        if self.shared_bytes > limits.shared_a_program * 1024:
            found.append(f"needs {self.shared_bytes} bytes of shared memory")
        if self.registers * limits.lanes * self.num_warps > limits.registers:
            found.append(f"{self.registers} registers x {self.num_warps} warps do not fit an SM")
        return found


def target_name(arch: int | str) -> str:
    """``sm_90`` or ``gfx942``."""
    return f"sm_{arch}" if isinstance(arch, int) else arch


def kernel_name(function: str) -> str:
    """``_gemm_kernel`` -> ``gemm``."""
    return function.removeprefix("_").removesuffix("_kernel")


def loop_bodies(assembly: str, label: re.Pattern[str], branch: re.Pattern[str]) -> list[str]:
    """The text between each label and the last branch back to it; both patterns capture the label's name."""
    labels = {match[1]: match.start() for match in label.finditer(assembly)}
    ends: dict[int, int] = {}
    for match in branch.finditer(assembly):
        start = labels.get(match[1], match.start())
        if start < match.start():
            ends[start] = max(ends.get(start, 0), match.start())
    return [assembly[start:end] for start, end in ends.items()]
