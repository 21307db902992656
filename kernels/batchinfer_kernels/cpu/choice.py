"""Which implementation this process uses; found once, and compiled then if need be."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from batchinfer_kernels.cpu.build import BuildError, build, find_compiler
from batchinfer_kernels.cpu.library import LibraryError, load_library
from batchinfer_kernels.cpu.native import NativeOps
from batchinfer_kernels.cpu.torch_ops import TorchOps
from batchinfer_kernels.cpu.variants import cpu_features, fitting_variants, variant_named

if TYPE_CHECKING:
    from pathlib import Path

    from batchinfer_kernels.cpu.interface import Ops
    from batchinfer_kernels.cpu.variants import Variant

VARIANT_VARIABLE = "BATCHINFER_KERNEL_VARIANT"
"""Names a variant to use instead of the best one, or ``torch`` for none."""


def get_ops() -> Ops:
    """The fastest ops there are: C++ for this CPU, or torch when that cannot be built (:func:`is_available` says why).

    Raises:
        ValueError: ``$BATCHINFER_KERNEL_VARIANT`` names no variant.
    """
    return _choose()[0]


def is_available() -> tuple[bool, str]:
    """Whether the C++ kernels work here, and which they are or why not. Compiles them if that has not been done.

    Raises:
        ValueError: ``$BATCHINFER_KERNEL_VARIANT`` names no variant.
    """
    ops, reason = _choose()
    return isinstance(ops, NativeOps), reason


def native_ops(variant: Variant, *, folder: Path | None = None, extra_flags: tuple[str, ...] = ()) -> NativeOps:
    """The ops of one variant, built into ``folder`` (default: the cache).

    Raises:
        BuildError: it cannot be compiled.
        LibraryError: it cannot be loaded, even when built anew.
    """
    path = build(variant, folder=folder, extra_flags=extra_flags)
    try:
        library = load_library(path)
    except LibraryError:  # damaged on disk, or made on a machine whose system libraries differ
        path.unlink(missing_ok=True)
        library = load_library(build(variant, folder=folder, extra_flags=extra_flags))
    if not library.bi_gemm_prepare():
        raise LibraryError(f"the system does not let this process use what {variant.name} needs")
    return NativeOps(library, variant.name, packs=variant.packs)


@functools.cache
def _choose() -> tuple[Ops, str]:
    wanted = os.environ.get(VARIANT_VARIABLE)
    if wanted == TorchOps.name:
        return TorchOps(), f"${VARIANT_VARIABLE} asks for torch"
    features = cpu_features()
    variants = [variant_named(wanted)] if wanted else fitting_variants(features)
    if missing := variants[0].needs - features:
        return TorchOps(), f"this CPU lacks {', '.join(sorted(missing))}, which {wanted} needs"
    try:
        find_compiler()
    except BuildError as error:
        return TorchOps(), f"falling back to torch: {error}"
    failed: list[str] = []
    for variant in variants:  # a compiler may be older than the CPU, or a system not let its newest units be used
        try:
            return native_ops(variant), "; ".join((f"C++ kernels, variant {variant.name}", *failed[:1]))
        except (BuildError, LibraryError) as error:
            failed.append(f"not {variant.name}: {error}")
    return TorchOps(), f"falling back to torch: {failed[-1]}"
