"""Kernels are compiled once, found again, and whoever cannot have them computes with torch."""

import multiprocessing
import shutil
import subprocess
import sys

import pytest

from batchinfer_kernels.cpu import build as build_module
from batchinfer_kernels.cpu import choice
from batchinfer_kernels.cpu.build import BuildError, build, cache_folder
from batchinfer_kernels.cpu.library import LibraryError, load_library
from batchinfer_kernels.cpu.variants import VARIANTS, best_variant, cpu_features, variant_named

PORTABLE = variant_named("portable")


@pytest.fixture
def tiny_sources(tmp_path, monkeypatch):
    """Two files that compile in no time instead of the real ones."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "one.h").write_text("#define ANSWER 42\n")
    (folder / "one.cpp").write_text('#include "one.h"\nextern "C" int answer() { return ANSWER; }\n')
    monkeypatch.setattr(build_module, "SOURCES", folder)
    return folder


def build_in_child(sources, folder, queue):
    build_module.SOURCES = sources
    queue.put(str(build(PORTABLE, folder=folder)))


def test_what_was_built_is_found_again_until_something_changes(tiny_sources, tmp_path):
    """The name holds the hash of sources (headers too), flags and variant."""
    folder = tmp_path / "cache"
    first = build(PORTABLE, folder=folder)
    stamp = first.stat().st_mtime_ns
    assert build(PORTABLE, folder=folder) == first
    assert first.stat().st_mtime_ns == stamp
    assert build(PORTABLE, folder=folder, extra_flags=("-O1",)) != first
    (tiny_sources / "one.h").write_text("#define ANSWER 43\n")
    assert build(PORTABLE, folder=folder) != first
    assert not list(folder.glob(".build-*"))


def test_builders_at_the_same_time_end_with_one_whole_file(tiny_sources, tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    children = [
        context.Process(target=build_in_child, args=(tiny_sources, tmp_path / "cache", queue)) for _ in range(2)
    ]
    for child in children:
        child.start()
    paths = {queue.get(timeout=120) for _ in children}
    for child in children:
        child.join(timeout=60)
    assert len(paths) == 1
    assert [str(path) for path in (tmp_path / "cache").glob("*.so")] == list(paths)


def test_a_source_that_does_not_compile_says_what_the_compiler_said(tiny_sources, tmp_path):
    (tiny_sources / "one.cpp").write_text("int broken(\n")
    with pytest.raises(BuildError, match=r"exit code 1: .*one\.cpp"):
        build(PORTABLE, folder=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


def test_without_a_compiler_torch_takes_over_and_says_why(monkeypatch, tmp_path):
    """The chooser itself; its cache is left out."""
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    ops, reason = choice._choose.__wrapped__()
    assert ops.name == "torch"
    assert reason.startswith("falling back to torch: no C++ compiler found")


def test_a_cache_that_cannot_be_written_names_the_variable(tiny_sources, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(BuildError, match="BATCHINFER_KERNEL_CACHE"):
        build(PORTABLE, folder=blocker / "cache")


def test_a_damaged_library_is_built_anew(monkeypatch, tmp_path):
    """Cut off by a full disk, say; the next start mends it. (The compiler is played by a copy.)"""
    path = build(PORTABLE)
    copy = tmp_path / path.name
    monkeypatch.setattr(build_module, "_compile", lambda *_: shutil.copy(path, copy))
    copy.write_bytes(b"not a library")
    with pytest.raises(LibraryError, match="cannot load"):
        load_library(copy)
    assert choice.native_ops(PORTABLE, folder=tmp_path).name == "portable"
    assert copy.read_bytes() == path.read_bytes()


def test_where_the_best_variant_fails_the_next_one_is_taken(monkeypatch):
    """A compiler older than the CPU, or a system that keeps its newest units to itself."""
    monkeypatch.delenv(choice.VARIANT_VARIABLE, raising=False)
    monkeypatch.setattr(choice, "fitting_variants", lambda _: [VARIANTS[0], PORTABLE])
    real = choice.native_ops

    def without_the_best(variant):
        if variant is VARIANTS[0]:
            raise BuildError("unknown option")
        return real(variant)

    monkeypatch.setattr(choice, "native_ops", without_the_best)
    ops, reason = choice._choose.__wrapped__()
    assert ops.name == "portable"
    assert reason == f"C++ kernels, variant portable; not {VARIANTS[0].name}: unknown option"
    monkeypatch.setattr(choice, "fitting_variants", lambda _: [VARIANTS[0]])
    ops, reason = choice._choose.__wrapped__()
    assert (ops.name, reason) == ("torch", f"falling back to torch: not {VARIANTS[0].name}: unknown option")


def test_the_variable_chooses_the_variant(monkeypatch):
    monkeypatch.setenv(choice.VARIANT_VARIABLE, "portable")
    assert choice._choose.__wrapped__()[0].name == "portable"
    monkeypatch.setenv(choice.VARIANT_VARIABLE, "torch")
    assert choice._choose.__wrapped__()[0].name == "torch"
    monkeypatch.setenv(choice.VARIANT_VARIABLE, "avx1024")
    with pytest.raises(ValueError, match="amx, avx512_bf16, avx512, avx2, portable"):
        choice._choose.__wrapped__()


def test_a_cpu_gets_the_best_variant_whose_instructions_it_has(monkeypatch):
    everything = frozenset().union(*(variant.needs for variant in VARIANTS))
    assert best_variant(everything).name == "amx"
    assert best_variant(everything - {"amx_int8"}).name == "avx512_bf16"
    assert best_variant(everything - {"avx512_bf16"}).name == "avx512"
    assert best_variant(everything - {"avx512f"}).name == "avx2"
    assert best_variant(everything - {"fma"}).name == "portable"
    assert best_variant(frozenset()).name == "portable"
    monkeypatch.setattr(choice, "cpu_features", frozenset)
    monkeypatch.setenv(choice.VARIANT_VARIABLE, "avx2")
    ops, reason = choice._choose.__wrapped__()
    assert ops.name == "torch"
    assert "lacks avx2, fma" in reason


def test_the_cache_lies_where_the_user_wants_it(monkeypatch, tmp_path):
    monkeypatch.setenv("BATCHINFER_KERNEL_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("BATCHINFER_KERNEL_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "batchinfer" / "kernels"


def test_one_thread_pool_in_the_process():
    """The library is linked to the OpenMP runtime that torch has loaded, not to a second one."""
    path = build(best_variant(cpu_features()))
    program = (
        "import sys, torch, ctypes; ctypes.CDLL(sys.argv[1]);"
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line or 'libomp' in line}))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
