"""The GPU benchmark without a GPU: every kernel in tiny sizes, wrong and dying ones, the engine, what it may import."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import __main__ as benchmark
from benchmarks.gpu import case, engine, kernels
from benchmarks.gpu.catalogue import all_cases, chosen_cases, registered_ops
from benchmarks.gpu.hardware import known_device
from benchmarks.gpu.report import line
from tests.triton import interpreter
from tests.triton.mutants import Mutant, load

ROOT = Path(__file__).resolve().parents[2]
CASES = all_cases(case.TINY)


@pytest.fixture(autouse=True)
def adapters_are_reached(monkeypatch):
    """Kernels find adapters by their addresses, which nobody tells the interpreter of here."""
    monkeypatch.setattr(interpreter.launch, "reachable", [(0, 2**63)])


def in_process(part, arguments, silence, lifetime):
    """Run a part here, as a child would."""
    options = benchmark.parse(["--child", part, *arguments])
    if part == "kernels":
        yield from kernels.run_kernels(options, options.first, float("inf"))
    else:
        yield from engine.run_engine(*part.split("-"), float("inf"))
    yield {"type": "end", "how": ""}


def run(tmp_path, *arguments, start=in_process):
    path = tmp_path / "results.json"
    code = benchmark.main([*arguments, "--output", str(path)], start)
    return code, json.loads(path.read_text())


def test_every_op_has_cases_in_every_float_type():
    assert {c.op for c in CASES} == registered_ops()
    assert {c.op for c in all_cases(case.Sizes())} == registered_ops()
    by_op = {op: {c.dtype for c in CASES if c.op == op} for op in registered_ops()}
    one_type = {"fp8_gemm", "merge_states", "change_logits"}  # these take one, by their checks
    assert {op for op, dtypes in by_op.items() if not dtypes >= set(case.FLOATS)} == one_type
    assert len({c.name for c in CASES}) == len(CASES)


def test_quick_keeps_every_op_and_every_goal():
    sizes = case.Sizes()
    quick = chosen_cases(sizes, [], is_quick=True)
    assert {c.op for c in quick} == registered_ops()
    assert [c.name for c in all_cases(sizes) if c.goal] == [c.name for c in quick if c.goal]
    goals = {(c.op, c.goal) for c in quick if c.goal}
    assert goals == {("paged_attention", 0.8), ("int8_gemm", 0.7)}


def test_all_kernels_run_to_the_end_and_are_right(tmp_path, capsys):
    code, report = run(tmp_path, "--skip-engine")
    verdicts = {r["name"]: (r["status"], r.get("detail")) for r in report["kernels"]}
    assert verdicts == {c.name: ("ok", None) for c in CASES}
    assert code == 0
    assert all(r["error"] <= 1 and "seconds" not in r and "peer_error" not in r for r in report["kernels"])
    peers = {r["peer"] for r in report["kernels"] if "peer" in r}
    assert {"scaled_dot_product_attention", "_int_mm", "rms_norm"} <= peers
    assert report["versions"]["torch"] == torch.__version__
    assert capsys.readouterr().out.count("| ok |") == len(CASES)


def test_a_wrong_kernel_is_named_and_the_exit_code_says_so(tmp_path, monkeypatch, capsys):
    mistake = Mutant("act_and_mul", "gelu without the cube", "0.044715 * gate * gate * gate", "0.044715 * gate * gate")
    wrong = load(mistake, tmp_path)["act_and_mul"]
    monkeypatch.setattr("batchinfer_kernels.library._act", wrong)
    code, report = run(tmp_path, "--only", "act_and_mul bf16", "--skip-engine")
    verdicts = {r["name"].split()[2]: r["status"] for r in report["kernels"]}
    assert verdicts == {"silu": "ok", "gelu": "wrong"}
    assert code == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_kernel_that_raises_costs_itself_alone(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no config for this shape")

    monkeypatch.setattr("batchinfer_kernels.library._quantize.quantize_rows", refuse)
    code, report = run(tmp_path, "--only", "quantize_rows f32", "--only", "embedding f32", "--skip-engine")
    found = {r["op"]: r for r in report["kernels"]}
    assert (code, found["quantize_rows"]["status"], found["embedding"]["status"]) == (1, "failed", "ok")
    assert "no config for this shape" in found["quantize_rows"]["detail"]


def scripted(*children):
    """Children that say what the script says, in turn; the arguments of each are kept."""
    given = []

    def start(part, arguments, _silence, _lifetime):
        script = children[len(given)]
        given.append((part, *arguments))
        yield from [dict(message) for message in script]

    return start, given


ABOUT = {"device": "a", "versions": {}, "copy_bytes_per_second": 1.0, "data_sheet": None}
MACHINE = {"type": "machine", "about": ABOUT, "cases": [["a", f"a {i}", None] for i in range(3)]}
OK = {"type": "case", "status": "ok", "error": 0.5}


def test_a_case_that_ends_its_process_is_named_and_the_others_go_on(tmp_path):
    start, given = scripted(
        [MACHINE, {"type": "begin", "index": 0}, {"type": "end", "how": "ended with SIGABRT"}],
        [MACHINE, {"type": "begin", "index": 1}, {**OK, "index": 1}, {"type": "end", "how": ""}],  # a poisoned context
        [{"type": "end", "how": "ended with exit code 1"}],
    )
    code, report = run(tmp_path, "--skip-engine", start=start)
    assert [r["status"] for r in report["kernels"]] == ["failed", "ok", "failed"]
    assert "SIGABRT" in report["kernels"][0]["detail"]
    assert "exit code 1 before it began" in report["kernels"][2]["detail"]
    assert [next(a for a in arguments if a.startswith("--first")) for arguments in given] == [
        "--first=0",
        "--first=1",
        "--first=2",
    ]
    assert code == 1


def test_what_the_time_does_not_suffice_for_is_named_and_no_failure(tmp_path, capsys):
    start, _ = scripted(
        [MACHINE, *({**OK, "index": i, "status": "skipped"} for i in range(3)), {"type": "end", "how": ""}]
    )
    code, report = run(tmp_path, "--budget-s", "5", start=start)
    assert [r["status"] for r in report["engines"]] == ["skipped"] * 4
    assert code == 0
    said = capsys.readouterr().out
    assert "skipped: 7 (a 0; a 1; a 2; batchinfer 1B; transformers 1B; batchinfer 8B; transformers 8B)" in said
    out_of_time = list(kernels.run_kernels(benchmark.parse(["--only", "embedding f32"]), 0, float("-inf")))
    assert [m["status"] for m in out_of_time if m["type"] == "case"] == ["skipped"]


def test_no_kernel_at_all_is_a_failure(tmp_path):
    start, _ = scripted([{"type": "end", "how": "ended with exit code 1"}])
    assert run(tmp_path, "--skip-engine", start=start)[0] == 1


def test_figures_are_shares_of_the_data_sheet():
    """By hand: an H200 moves 4.8e12 bytes and multiplies 1979e12 int8 pairs a second."""
    sheet = known_device("NVIDIA H200")
    least, waits_for = case.Work(4.8e9).seconds(sheet)
    assert (least, waits_for) == (pytest.approx(1e-3), "memory")
    least, waits_for = case.Work(4.8e6, 1.979e12, "int8").seconds(sheet)
    assert (least, waits_for) == (pytest.approx(1e-3), "int8")
    assert case.Work(9.6e9, 1.979e12, "int8").seconds(sheet) == (pytest.approx(2e-3), "memory")
    watch = SimpleNamespace(seconds=lambda _run: 0.5)
    gemm = next(c for c in CASES if c.op == "int8_gemm")
    result = kernels.run_case(gemm, torch.device("cpu"), sheet, watch)
    m, n, k = 3, 256, 64
    moved = m * k + n * k + 4 * m + 4 * n + 2 * m * n
    assert result["least_seconds"] == pytest.approx(moved / 4.8e12)
    assert result["share"] == pytest.approx(moved / 4.8e12 / 0.5)
    assert result["operations_per_second"] == 2 * m * n * k / 0.5
    row = line({"name": gemm.name, "goal": 0.7, **result, "share": 0.71}).split(" | ")
    assert row[1] == "ok"
    assert row[3:8] == ["500,000.0", "0.0", "memory", "71%", "70% met"]
    assert row[8:] == ["_int_mm", "500,000.0", "1.00"]
    for name in (
        "NVIDIA H100 PCIe",
        "NVIDIA H200 NVL",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
    ):
        assert known_device(name) is None


def test_decode_attention_moves_each_key_and_value_once():
    """By hand: 2 sequences x 70 tokens x 2 kv heads x 16 numbers, keys and values, 2 bytes; queries in and out."""
    call = next(c for c in CASES if c.name.startswith("paged_attention decode bf16 2")).build(torch.device("cpu"))
    assert call.work.num_bytes == 2 * 70 * 2 * 16 * 2 * 2 + 2 * 2 * 4 * 16 * 2
    assert call.work.operations == 4 * 2 * 70 * 4 * 16


ONLY = """
import importlib.machinery, os, re, sys
from importlib.metadata import packages_distributions, requires

def normal(name):
    return name.lower().replace("_", "-")

allowed, seen = set(os.environ["ONLY_PACKAGES"].split()), set()
while allowed - seen:  # with what they themselves need
    name = (allowed - seen).pop()
    seen.add(name)
    try:
        needs = requires(name) or []
    except Exception:
        needs = []
    allowed |= {normal(re.match(r"[\\w.-]+", need)[0]) for need in needs if "extra ==" not in need}
hidden = {top for top, owners in packages_distributions().items() if not {normal(owner) for owner in owners} & allowed}
hidden -= {"batchinfer", "batchinfer_kernels"}
paths = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None: None if name.split(".")[0] in hidden else paths(name, path, target)
)
"""
BARE = "torch triton numpy"  # numpy is the interpreter's
ENGINE = "torch triton transformers gguf psutil pydantic"


def bare(tmp_path, packages, *command):
    """Run Python where only these packages, and what they need, are installed."""
    (tmp_path / "sitecustomize.py").write_text(ONLY)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(tmp_path), "ONLY_PACKAGES": packages}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_kernels_need_torch_and_triton_alone(tmp_path):
    """As a command with a real child."""
    path = tmp_path / "results.json"
    command = ["-m", "benchmarks.gpu", "--only", "embedding f32", "--skip-engine", "--output", str(path)]
    ended = bare(tmp_path, BARE, *command)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(path.read_text())
    assert [r["status"] for r in report["kernels"]] == ["ok"]
    assert report["versions"]["transformers"]


BOTH_ENGINES = """
import sys
sys.path[:0] = ["kernels"]
from benchmarks.gpu import __main__, engine

def start(part, *_):
    yield from engine.run_engine(*part.split("-"), float("inf"))

sys.exit(__main__.main(["--skip-kernels", "--quick", "--output", sys.argv[1]], start))
"""


def test_the_engine_and_transformers_run_with_the_packages_that_the_help_names(tmp_path):
    path = tmp_path / "results.json"
    ended = bare(tmp_path, ENGINE, "-c", BOTH_ENGINES, str(path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    ours, theirs = json.loads(path.read_text())["engines"]
    assert (ours["status"], theirs["status"]) == ("ok", "ok")
    assert ours["tokens"] == theirs["tokens"] == 6 * 5
    assert ours["times_peer"] > 0
    assert all(name in " ".join(benchmark.__doc__.split()) for name in ENGINE.split())


def test_an_engine_without_its_packages_is_skipped_with_a_way_out(monkeypatch):
    monkeypatch.setattr(engine, "missing_packages", lambda: ["gguf", "psutil"])
    (message,) = engine.run_engine("batchinfer", "1B", float("inf"))
    assert message["status"] == "skipped"
    assert "pip install gguf psutil" in message["detail"]
