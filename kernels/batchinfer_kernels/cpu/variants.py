"""Which instruction sets the kernels are built for, and which of them this machine has."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Variant:
    """A set of compiler flags, and the CPU features (as ``/proc/cpuinfo`` names them) that they need."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]
    packs: bool = False
    """Whether its products of packed weights are faster than torch's."""


_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
_HAS_AVX2 = frozenset({"avx2", "fma"})
_HAS_AVX512 = _HAS_AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}

_HAS_BF16 = _HAS_AVX512 | {"avx512_vnni", "avx512_bf16"}
_BF16 = (*_AVX512, "-mavx512vnni", "-mavx512bf16")
_HAS_AMX = _HAS_BF16 | {"avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"}
_AMX = (*_BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16")

VARIANTS = (
    Variant("amx", _HAS_AMX, _AMX, packs=True),
    Variant("avx512_bf16", _HAS_BF16, _BF16, packs=True),
    Variant("avx512", _HAS_AVX512, _AVX512),
    Variant("avx2", _HAS_AVX2, _AVX2),
    Variant("portable", frozenset(), ()),
)
"""From the fastest to the one that runs everywhere. Named flags and not ``-march=native``: what is built depends on the
variant alone, so machines of one variant give the same bytes."""


def cpu_features() -> frozenset[str]:
    """What the CPU and its operating system offer; empty where that cannot be read (then only ``portable`` fits)."""
    if platform.machine().lower() not in {"x86_64", "amd64"}:
        return frozenset()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def fitting_variants(features: frozenset[str]) -> list[Variant]:
    """Those of :data:`VARIANTS` whose needs are met, the best first; there is always one."""
    return [variant for variant in VARIANTS if variant.needs <= features]


def best_variant(features: frozenset[str]) -> Variant:
    """The first of those that fit."""
    return fitting_variants(features)[0]


def buildable() -> tuple[Variant, ...]:
    """Those that a compiler on this machine can make, whether or not this CPU can run them."""
    is_x86 = platform.machine().lower() in {"x86_64", "amd64"}
    return tuple(variant for variant in VARIANTS if is_x86 or not variant.flags)


def variant_named(name: str) -> Variant:
    """Look up a variant.

    Raises:
        ValueError: there is none of that name.
    """
    for variant in VARIANTS:
        if variant.name == name:
            return variant
    raise ValueError(f"no kernel variant {name!r}; there are {', '.join(v.name for v in VARIANTS)}")
