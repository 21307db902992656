"""The checks of the machine and the Python environment. None ever raises."""

from __future__ import annotations

import os
import platform
import shutil
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from batchinfer.cli.checks import MIN_FREE_BYTES, Check, fail, ok, warn
from batchinfer.cli.console import count, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchinfer.settings import Settings

DOCTORED_MODELS = 3
"""The latest models whose calibration is told."""
_CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16")


def check_python() -> Check:
    """Python's version."""
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return ok("python", text)


def check_cpu() -> Check:
    """Cores this process may use, and the vector instructions that the kernels care about."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = set()
    features = [name for name in _CPU_FEATURES if name in flags]
    return ok("cpu", f"{cores} cores" + (f", {' '.join(features)}" if features else ""))


def check_memory() -> Check:
    """Memory of the machine."""
    import psutil

    memory = psutil.virtual_memory()
    return ok("memory", f"{size(memory.available)} of {size(memory.total)} available")


def check_compiler() -> Check:
    """A C++ compiler builds the CPU kernels and Triton's launchers."""
    found = next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)
    if found is None:
        return warn(
            "compiler", "no C++ compiler", "install g++ (apt-get install g++) for the fast CPU kernels and Triton"
        )
    return ok("compiler", found)


def check_kernels() -> Check:
    """Whether the engine's CPU kernels run; builds them if that has not been done, which takes seconds."""
    try:
        from batchinfer_kernels.cpu import is_available

        works, detail = is_available()
    except (ImportError, OSError, ValueError) as error:
        return warn(
            "kernels", str(error), "correct or unset BATCHINFER_KERNEL_VARIANT; reinstall torch if it is broken"
        )
    if not works:
        return warn("kernels", detail, "jobs run, slower, on torch alone; install g++ for the C++ kernels")
    return ok("kernels", detail)


def check_calibration() -> Check:
    """What was measured of models on this machine, the latest of each."""
    try:
        from batchinfer.engine.calibration import CalibrationStore, describe
        from batchinfer.models.cache_dir import default_cache_dir

        kept = list(CalibrationStore(default_cache_dir()).all())
    except (ImportError, OSError) as error:
        return warn("calibration", str(error), "reinstall it: pip install --force-reinstall batchinfer")
    if not kept:
        return ok("calibration", "none yet: it is measured when a model is first loaded")
    latest = {key["model"]: (key, found) for key, found in reversed(kept)}
    lines = [
        f"{model} ({key['recipe'] or key['dtype']}, {key['threads']} threads): {describe(found)}"
        for model, (key, found) in latest.items()
    ]
    return ok("calibration", "; ".join(lines[-DOCTORED_MODELS:]))


def build_kernels() -> Iterator[Check]:
    """Compile every variant of the CPU kernels into the cache, one check each: a machine image may run on another CPU."""
    try:
        from batchinfer_kernels.cpu.build import BuildError, build, cache_folder
        from batchinfer_kernels.cpu.variants import buildable
    except (ImportError, OSError) as error:
        yield fail("build", str(error), "reinstall torch: pip install --force-reinstall torch")
        return
    for variant in buildable():
        before = set(cache_folder().glob("*.so"))
        started = time.monotonic()
        try:
            path = build(variant)
        except BuildError as error:
            yield fail(f"build {variant.name}", str(error), "install g++ 12 or newer, or set CXX to such a compiler")
            continue
        how = "was built before" if path in before else f"built in {time.monotonic() - started:.0f} s"
        yield ok(f"build {variant.name}", f"{how}: {path}")


def check_torch() -> Check:
    """Whether torch loads, and is the release that the engine is proved with."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return fail("torch", str(error), "reinstall it: pip install --force-reinstall torch")
    pinned = next((text for text in metadata.requires("batchinfer") or [] if text.startswith("torch==")), "")
    wanted = pinned.removeprefix("torch==")
    text = f"{torch.__version__}, {count(torch.get_num_threads())} threads"
    if wanted and torch.__version__.partition("+")[0] != wanted:
        return warn("torch", text, f"tested with {wanted}: pip install torch=={wanted}")
    return ok("torch", text)


def check_gpu() -> Check:
    """GPUs that torch sees; a driver without them is a mistake, a machine without a GPU is not."""
    try:
        import torch

        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return warn("gpu", str(error).splitlines()[0], "check the driver with nvidia-smi")
    if names:
        return ok("gpu", ", ".join(names))
    if shutil.which("nvidia-smi"):
        return warn("gpu", "nvidia-smi is here but torch sees no GPU", "install torch's CUDA build")
    return ok("gpu", "none: the engine runs on the CPU")


def check_transformers() -> Check:
    """Whether transformers is installed; loading it takes seconds and tells no more."""
    try:
        return ok("transformers", metadata.version("transformers"))
    except metadata.PackageNotFoundError:
        return fail("transformers", "not installed", "pip install batchinfer")


def check_engine(factory: str) -> Check:
    """Whether the engine's module exists."""
    module = factory.partition(":")[0]
    try:
        found = find_spec(module) is not None
    except ImportError:
        found = False
    if not found:
        return fail("engine", f"no module {module}", "correct or unset BATCHINFER_ENGINE_FACTORY")
    return ok("engine", factory)


def check_model_cache(settings: Settings) -> Check:
    """Where hub models are kept, and the room there."""
    default = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"
    cache = Path(os.environ.get("HF_HUB_CACHE", default)).expanduser()
    models = sum(1 for _ in cache.glob("models--*")) if cache.is_dir() else 0
    place = next(folder for folder in (cache, *cache.parents, settings.home) if folder.exists())
    free = shutil.disk_usage(place).free
    text = f"{cache}: {count(models)} hub models, {size(free)} free"
    if free < MIN_FREE_BYTES:
        return warn("model cache", text, "free some disk, or set HF_HOME to a larger one")
    return ok("model cache", text)
