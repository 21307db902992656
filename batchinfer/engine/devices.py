"""What GPUs can do at most, by their makers' data sheets. Pure data: no torch, no device is asked.

Rates are dense (no structured sparsity) and of one GPU; bfloat16 and FP8 accumulate in float32. Bandwidths are in bytes
a second, memory in bytes (10**9 a GB, as data sheets count), peaks in multiply and add operations a second, two a pair.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from batchinfer.errors import InvalidSpecError

UNITS = ("fp32", "bf16", "fp8", "int8", "int4")
"""Kinds of matrix units."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or ``num_devices`` equal ones that share each layer (tensor parallelism)."""

    name: str
    bandwidth: float
    """Of its memory, in bytes a second."""
    memory: float
    """In bytes."""
    bf16: float
    """Peak of matrix products, in operations a second; None below: there is no such unit."""
    fp8: float | None
    int8: float | None
    int4: float | None
    link: float | None
    """To its neighbours, in bytes a second and direction; None: only PCIe."""
    pcie: float
    """To the host, in bytes a second and direction."""
    source: str
    """Where the figures stand."""
    num_devices: int = 1
    fp32: float | None = None
    """Peak in float32, where it was measured; data sheets' vector units are no matrix units."""

    def peak(self, unit: str) -> float:
        """Operations a second of one GPU in one of :data:`UNITS`.

        Raises:
            InvalidSpecError: it has no such unit.
        """
        found: float | None = getattr(self, unit)
        if found is None:
            has = ", ".join(name for name in UNITS if getattr(self, name) is not None)
            raise InvalidSpecError(f"{self.name} has no {unit} matrix unit; it has {has}", param="device")
        return found

    @property
    def peer(self) -> float:
        """Bytes a second and direction between GPUs."""
        return self.link or self.pcie


PCIE_4, PCIE_5 = 32e9, 64e9
"""16 lanes of 16 and 32 GT/s, each way, as data sheets state it (64 and 128 GB/s both ways)."""

DEVICES = {
    device.name: device
    for device in (
        # INT4: NVIDIA A100 Tensor Core GPU Architecture white paper, table 1; NVLink 600 GB/s both ways
        Device("a100", 2.039e12, 80e9, 312e12, None, 624e12, 1248e12, 300e9, PCIE_4,
               "NVIDIA A100 80GB SXM data sheet"),
        # the data sheet states rates with sparsity, twice these; NVLink 900 GB/s both ways
        Device("h100", 3.35e12, 80e9, 989.5e12, 1979e12, 1979e12, None, 450e9, PCIE_5,
               "NVIDIA H100 SXM data sheet"),
        # as H100
        Device("h200", 4.8e12, 141e9, 989.5e12, 1979e12, 1979e12, None, 450e9, PCIE_5,
               "NVIDIA H200 SXM data sheet"),
        # INT4 is stated no faster than INT8; no NVLink
        Device("l40s", 0.864e12, 48e9, 362.05e12, 733e12, 733e12, 733e12, None, PCIE_4,
               "NVIDIA L40S data sheet"),
        # appendix A, dense, float32 accumulation; no NVLink
        Device("rtx4090", 1.008e12, 24e9, 165.2e12, 330.3e12, 660.6e12, 1321.2e12, None, PCIE_4,
               "NVIDIA Ada GPU Architecture white paper"),
        # dense, float32 accumulation; it has FP4, and no INT4; no NVLink
        Device("rtx5090", 1.792e12, 32e9, 209.5e12, 419e12, 838e12, None, None, PCIE_5,
               "NVIDIA RTX Blackwell GPU Architecture white paper"),
        # an eighth of the system: 1,440 GB, 64 TB/s, 72 PFLOPS FP8 with sparsity; NVLink 1.8 TB/s both ways
        Device("b200", 8e12, 180e9, 2250e12, 4500e12, 4500e12, None, 900e9, PCIE_5,
               "NVIDIA DGX B200 data sheet"),
        # seven Infinity Fabric links of 128 GB/s both ways
        Device("mi300x", 5.3e12, 192e9, 1307.4e12, 2614.9e12, 2614.9e12, None, 448e9, PCIE_5,
               "AMD Instinct MI300X data sheet"),
    )
}  # fmt: skip
_SEVERAL = re.compile(r"(?P<name>.+?)x(?P<number>[1-9]\d?)")


def find_device(name: str) -> Device | None:
    """A device by name, ``h200``, or several that work as one, ``h200x8``; None if the table has none of that name."""
    wanted = name.lower().replace("-", "").replace(" ", "")
    if wanted in DEVICES:
        return DEVICES[wanted]
    match = _SEVERAL.fullmatch(wanted)
    if match is None or match["name"] not in DEVICES:
        return None
    number = int(match["number"])
    return replace(DEVICES[match["name"]], name=wanted, num_devices=number)
