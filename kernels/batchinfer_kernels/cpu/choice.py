"""Which implementation this process uses; found once, and compiled then if need be."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from batchinfer_kernels.cpu.build import BuildError, build
from batchinfer_kernels.cpu.library import LibraryError, load_library
from batchinfer_kernels.cpu.native import NativeOps
from batchinfer_kernels.cpu.torch_ops import TorchOps
from batchinfer_kernels.cpu.variants import best_variant, cpu_features, variant_named

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
        return NativeOps(load_library(path), variant.name)
    except LibraryError:  # damaged on disk, or made on a machine whose system libraries differ
        path.unlink(missing_ok=True)
        return NativeOps(load_library(build(variant, folder=folder, extra_flags=extra_flags)), variant.name)


@functools.cache
def _choose() -> tuple[Ops, str]:
    wanted = os.environ.get(VARIANT_VARIABLE)
    if wanted == TorchOps.name:
        return TorchOps(), f"${VARIANT_VARIABLE} asks for torch"
    features = cpu_features()
    variant = variant_named(wanted) if wanted else best_variant(features)
    if missing := variant.needs - features:
        return TorchOps(), f"this CPU lacks {', '.join(sorted(missing))}, which {variant.name} needs"
    try:
        return native_ops(variant), f"C++ kernels, variant {variant.name}"
    except (BuildError, LibraryError) as error:
        return TorchOps(), f"falling back to torch: {error}"
