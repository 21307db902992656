"""Compile the C++ kernels on the user's machine, once: the result lies in a cache folder and is found again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batchinfer_kernels.cpu.variants import Variant

SOURCES = Path(__file__).parent / "csrc"
CACHE_VARIABLE = "BATCHINFER_KERNEL_CACHE"
COMPILER_VARIABLE = "CXX"
COMPILERS = ("c++", "g++", "clang++")
# No fast-math and no implicit fused multiply-add: a row's bits must not depend on how a loop was vectorised.
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fopenmp", "-w"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
)
TIMEOUT_SECONDS = 300


class BuildError(Exception):
    """The kernels could not be compiled; the message says why, in one paragraph."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler: its path, and what ``--version`` printed."""

    path: str
    version: str


def find_compiler() -> Compiler:
    """Take ``$CXX`` if it is set, else the first of :data:`COMPILERS` on the path.

    Raises:
        BuildError: there is none, or it does not run.
    """
    wanted = os.environ.get(COMPILER_VARIABLE)
    names = (wanted,) if wanted else COMPILERS
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        raise BuildError(f"no C++ compiler found (looked for {', '.join(names)}); install g++ or set $CXX")
    return Compiler(path, _run([path, "--version"]).splitlines()[0])


def cache_folder() -> Path:
    """Where built kernels are kept: ``$BATCHINFER_KERNEL_CACHE`` or ``~/.cache/batchinfer/kernels``."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "batchinfer" / "kernels").expanduser()


def build(variant: Variant, *, folder: Path | None = None, extra_flags: Sequence[str] = ()) -> Path:
    """Return the shared library of a variant, compiling it if the cache has none of this source, compiler and flags.

    Safe beside other builders, in this process or another: one compiles while the others wait, and a file appears
    under its name only when it is whole.

    Raises:
        BuildError: no compiler, a failed compilation, or a folder that cannot be written.
    """
    compiler = find_compiler()
    flags = (*FLAGS, *variant.flags, *extra_flags)
    sources = sorted(SOURCES.glob("*.cpp"))
    openmp = openmp_library()
    folder = folder or cache_folder()
    target = folder / f"{variant.name}-{_fingerprint(compiler, flags, openmp)}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_suffix(".lock")):
            if not target.exists():
                _compile(compiler, flags, sources, openmp, target)
    except OSError as error:
        raise BuildError(f"cannot build kernels in {folder}: {error}; set ${CACHE_VARIABLE}") from error
    return target


def source_version() -> str:
    """Short hash of the kernels' sources and flags: what was measured with others says nothing of these."""
    digest = hashlib.sha256(repr(FLAGS).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def openmp_library() -> Path | None:
    """The OpenMP runtime that torch brought along, if it did.

    Linking to it and not to the compiler's own keeps one pool of threads in the process: with two, those of one spin
    while the other's work.
    """
    package = Path(torch.__file__).parent
    places = (package / "lib", package.parent / "torch.libs")
    return next((path for place in places for path in sorted(place.glob("libgomp*.so*"))), None)


def _fingerprint(compiler: Compiler, flags: Sequence[str], openmp: Path | None) -> str:
    digest = hashlib.sha256(repr((compiler, flags, openmp)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


def _compile(
    compiler: Compiler, flags: Sequence[str], sources: Sequence[Path], openmp: Path | None, target: Path
) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as name:
        folder = Path(name)
        objects = [folder / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler.path, *flags, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(_run, commands))
        built = folder / target.name
        link_flags = [flag for flag in flags if openmp is None or flag != "-fopenmp"]
        libraries = [] if openmp is None else [str(openmp)]
        _run([compiler.path, *link_flags, "-shared", *map(str, objects), *libraries, "-o", str(built)])
        built.replace(target)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(  # noqa: S603 -- the compiler the user has, on our own sources
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        raise BuildError(f"{command[0]} failed with exit code {done.returncode}: {done.stderr.strip()[:2000]}")
    return done.stdout


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; where locks are not to be had, two builders build twice, and either wins."""
    try:
        import fcntl  # noqa: PLC0415 -- POSIX only
    except ImportError:
        yield
        return
    with path.open("w") as file:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
