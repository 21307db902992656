"""What is measured at start-up: where the curve of steps bends, which prefixes are read together, and what is kept."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from batchinfer.engine import startup
from batchinfer.engine.calibration import (
    DEFAULT_BATCHED_TOKENS,
    DISTURBED_SECONDS,
    MAX_FILES,
    NEVER,
    VERSION,
    Calibration,
    CalibrationStore,
    SharedPrefix,
    describe,
    knee,
    measure_curve,
)
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.engine import create_engine
from batchinfer.engine.others_load import OthersLoad
from batchinfer.engine.speculation import StepCosts, break_even
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Request
from tests.engine.fakes import drain
from tests.tiny_model import write_tiny_model

SIZES = (64, 128, 256, 512, 1024, 2048)
KEY = {"model": "m", "device": "d"}
FOUND = Calibration(
    ((64, 10), (128, 11)), ((1, 5), (2, 6)), (SharedPrefix(256, 2, 30, 20), SharedPrefix(256, 4, 30, 40))
)


class Device:
    """A clock that only steps move: a fixed cost and a cost a token, until ``full`` tokens are a batch of their own."""

    def __init__(self, fixed, per_token, full=2**30):
        self.now = 0
        self.runs = []
        self._cost = lambda n: fixed * -(-n // full) + per_token * n

    def run(self, size):
        self.runs.append(size)
        self.now += self._cost(size)

    def clock(self):
        return self.now


@pytest.mark.parametrize(
    ("points", "found"),
    [
        ([(64, 100), (128, 101), (256, 150), (512, 300), (1024, 600)], 256),
        ([(64, 100), (128, 200), (256, 400)], 64),
        ([(64, 100), (128, 110), (256, 120)], 256),
        # a slow one in between, as on a machine that is shared, is no knee
        ([(64, 100), (128, 300), (256, 200), (512, 399)], 256),
        # 2.9 % more is nothing, 3.1 % is something: 128 tokens in 128 / 0.6585 against 128 / 0.6598
        ([(64, 100_000), (128, 194_363), (256, 388_726)], 64),
        ([(64, 100_000), (128, 193_986), (256, 387_972)], 128),
        ([], 0),
    ],
)  # fmt: skip
def test_the_knee_of_a_curve(points, found):
    assert knee(points) == found


def test_a_curve_is_measured_until_it_is_flat():
    """1,000 a step and 10 a token, both anew every 256 tokens: 256 is as good as it gets, and two doublings show it."""
    device = Device(1000, 10, full=256)
    points = measure_curve(device.run, SIZES, 1.0, device.clock)
    assert points == ((64, 1640), (128, 2280), (256, 3560), (512, 7120), (1024, 14240))
    assert knee(points) == 256
    assert Calibration(points).batched_tokens(max_num_seqs=64) == DEFAULT_BATCHED_TOKENS, "never less"
    assert Calibration(points).batched_tokens(max_num_seqs=512) == 576, "all rows decode, and prompts go on"
    gaining = (*points[:4], (1024, 12000), (2048, 24000))
    assert Calibration(gaining).batched_tokens(max_num_seqs=64) == 1024


def test_a_slow_model_takes_no_longer_than_it_may():
    device = Device(0, 4_000_000)  # 64 tokens take a quarter of a second
    points = measure_curve(device.run, SIZES, 1.0, device.clock)
    assert [tokens for tokens, _ in points] == [64, 128]
    assert device.now <= 1.3e9, "the warm-up and a second"
    assert Calibration(((64, 100), (128, 110))).batched_tokens(8) == DEFAULT_BATCHED_TOKENS, "no knee was seen"
    assert Calibration().batched_tokens(8) == DEFAULT_BATCHED_TOKENS


def test_the_first_size_is_always_measured():
    device = Device(10**12, 0)
    assert measure_curve(device.run, (64, 128), 1.0, device.clock) == ((64, 10**12),)


def test_prefixes_are_read_together_from_where_it_wins_for_good():
    def cases(prefix, *wins):
        return [SharedPrefix(prefix, 2 << i, 10, 20 if won else 5) for i, won in enumerate(wins)]

    shared = (
        *cases(256, False, True, True),
        *cases(1024, True, False, True),
        *cases(2048, False, False),
        *cases(4096, True),
    )
    assert Calibration(shared=shared).least_shared() == {256: 4, 1024: 8, 2048: NEVER, 4096: 2}
    assert Calibration().least_shared() == {}


def test_where_guessing_breaks_even():
    """Flat up to 8 tokens, then 100 a token: two rows with 2 guesses (6 tokens) are free; 8 rows pay for each token.

    By hand, 7 of 10 guesses right: two more give 2.19 tokens. 4 rows with them are 12 tokens at 1,200: 8.76 tokens or
    0.0073 a ns, against 4 / 800 = 0.005; 8 rows: 24 tokens at 2,400 give 0.0073 against 8 / 800 = 0.01.
    """
    costs = StepCosts([(1, 800), (8, 800), (16, 1600), (32, 3200)])
    assert costs.of(64) == 6400, "beyond what was measured the line goes on"
    assert 4 <= break_even(costs) < 8
    assert break_even(StepCosts([(1, 100), (2, 200), (64, 6400)])) == 0
    assert break_even(StepCosts()) == 0


def test_kept_and_read_again(tmp_path):
    store = CalibrationStore(tmp_path / "cache")
    assert store.load(KEY) is None
    store.save(KEY, FOUND)
    assert CalibrationStore(tmp_path / "cache").load(dict(reversed(KEY.items()))) == FOUND
    assert store.load(KEY | {"model": "other"}) is None
    assert list(store.all()) == [(KEY, FOUND)]


@pytest.mark.parametrize(
    "change",
    [
        lambda _: "{",
        lambda _: "[]",
        lambda _: "null",
        lambda text: text.replace(f'"version": {VERSION}', '"version": 0'),
        lambda text: text.replace('"model": "m"', '"model": "of another"'),
        lambda text: text.replace('"prefill"', '"before"'),
        lambda text: text.replace("128", "-128"),
        lambda text: text.replace("128", "1.5"),
        lambda text: text.replace("128", "32"),
        lambda text: text.replace('"together_ns"', '"rm -rf"'),
        lambda text: text[: len(text) // 2],
    ],
)
def test_a_file_of_no_use_is_ignored(tmp_path, change):
    store = CalibrationStore(tmp_path)
    store.save(KEY, FOUND)
    (path,) = (tmp_path / "calibration").iterdir()
    path.write_text(change(path.read_text()))
    assert store.load(KEY) is None
    store.save(KEY, FOUND)
    assert store.load(KEY) == FOUND


def test_what_was_measured_beside_other_work_is_kept_for_a_while(tmp_path):
    store = CalibrationStore(tmp_path)
    store.save(KEY, FOUND, is_disturbed=True)
    assert store.load(KEY) == FOUND
    (path,) = (tmp_path / "calibration").iterdir()
    long_ago = time.time() - DISTURBED_SECONDS - 60
    os.utime(path, (long_ago, long_ago))
    assert store.load(KEY) is None
    store.save(KEY, FOUND)
    os.utime(path, (long_ago, long_ago))
    assert store.load(KEY) == FOUND


def test_another_process_is_seen():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        with OthersLoad() as others:
            time.sleep(1)
        spinning.kill()
    assert others.seconds >= 1
    assert others.percent > 30 / psutil.cpu_count()


@pytest.mark.parametrize(("percent", "is_kept"), [(9.0, True), (11.0, False)])
def test_an_engine_marks_what_it_measured_beside_other_work(model, tmp_path, monkeypatch, percent, is_kept):
    class Load(OthersLoad):
        def __exit__(self, *error):
            super().__exit__(*error)
            self.percent = percent

    for name, value in (("PREFILL_TOKENS", (16, 32)), ("DECODE_ROWS", (1, 2)), ("SHARED_ROWS", (2,))):
        monkeypatch.setattr(startup, name, value)
    monkeypatch.setattr(startup, "machine_ceilings", lambda _: startup_ceilings())
    monkeypatch.setattr(startup, "OthersLoad", Load)
    create_engine(EngineConfig(model=str(model), device="cpu", num_kv_blocks=80, cache_dir=str(tmp_path / "cache")))
    (path,) = (tmp_path / "cache" / "calibration").iterdir()
    assert json.loads(path.read_text())["disturbed"] is not is_kept


def test_files_do_not_grow_without_end_and_a_full_disk_is_no_failure(tmp_path):
    store = CalibrationStore(tmp_path / "cache")
    for number in range(MAX_FILES + 5):
        store.save(KEY | {"threads": str(number)}, FOUND)
    assert len(list((tmp_path / "cache" / "calibration").iterdir())) == MAX_FILES
    (tmp_path / "file").write_text("")
    CalibrationStore(tmp_path / "file").save(KEY, FOUND)


def test_people_are_told():
    """Steps of n tokens take 4 + n: two guesses pay while 2.19 / (4 + 3 n) > 1 / (4 + n), which is below 5.9 rows."""
    found = Calibration(FOUND.prefill, FOUND.decode, (*FOUND.shared, SharedPrefix(1024, 2, 30, 20)))
    assert describe(found) == (
        "512 tokens a step; shared prefixes read together: 256 tokens from 4 rows on, 1024 tokens never; "
        "guessing may pay up to a batch of 5 rows"
    )
    assert "not measured" in describe(Calibration())


@pytest.fixture
def model(tmp_path):
    return write_tiny_model(tmp_path / "model")


def test_an_engine_measures_once_and_answers_alike(model, tmp_path, monkeypatch):
    """Real steps, short ones: the second engine reads the file, a damaged one is made anew, and no token changes."""
    for name, value in (("PREFILL_TOKENS", (16, 32, 64, 128)), ("DECODE_ROWS", (1, 2)), ("SHARED_ROWS", (2, 4))):
        monkeypatch.setattr(startup, name, value)
    monkeypatch.setattr(startup, "machine_ceilings", lambda _: startup_ceilings())
    measured = []
    real = startup._measure
    monkeypatch.setattr(startup, "_measure", lambda *args: measured.append(1) or real(*args))
    config = EngineConfig(
        model=str(model), device="cpu", num_kv_blocks=80, max_num_seqs=4, cache_dir=str(tmp_path / "cache")
    )

    def answers(**settings):
        engine = create_engine(replace(config, **settings))
        for end in (30, 31):
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            prompt = [*(3 + i % 90 for i in range(300)), end]
            engine.add_request(Request(str(end), params, prompt_token_ids=prompt))
        return {done.request_id: done.token_ids for done in drain(engine)}, engine.stats()

    plain, without = answers(calibrate=False)
    first, stats = answers()
    again, _ = answers()
    assert plain == first == again
    assert len(measured) == 1
    (path,) = (tmp_path / "cache" / "calibration").iterdir()
    kept = json.loads(path.read_text())
    assert kept["key"]["model"] == "model"
    assert {case["prefix"] for case in kept["calibration"]["shared"]} == {256, 1024}
    assert 0 < stats.roofline_share < 1
    assert without.roofline_share is None
    path.write_text("{}")
    limited, stats = answers(max_num_batched_tokens=48)
    assert limited == plain
    assert len(measured) == 2
    assert stats.batched_tokens_limit == 48


@pytest.mark.parametrize(("settings", "rows"), [({}, 64), ({"kv_cache_dtype": "int8"}, 128), ({"max_num_seqs": 5}, 5)])
def test_an_engine_runs_as_many_rows_as_its_cache_takes_memory_for(model, settings, rows):
    config = EngineConfig(model=str(model), device="cpu", num_kv_blocks=20, calibrate=False, **settings)
    assert create_engine(config).stats().max_num_seqs == rows


@pytest.mark.parametrize(("thread_tokens", "largest"), [(16, 16), (64, 64), (1000, 128)])
def test_a_cpu_measures_no_larger_steps_than_its_threads_need(model, tmp_path, monkeypatch, thread_tokens, largest):
    """Larger ones cost memory and gain nothing. Nothing is timed here, so that all sizes there are would be measured."""
    for name, value in (("PREFILL_TOKENS", (16, 32, 64, 128)), ("DECODE_ROWS", (1, 2)), ("SHARED_ROWS", (2,))):
        monkeypatch.setattr(startup, name, value)
    monkeypatch.setattr(startup, "THREAD_TOKENS", thread_tokens)
    monkeypatch.setattr(startup.torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(startup, "measure_curve", lambda _run, sizes, *_: tuple((size, size) for size in sizes))
    monkeypatch.setattr(startup, "machine_ceilings", lambda _: startup_ceilings())
    create_engine(EngineConfig(model=str(model), device="cpu", num_kv_blocks=80, cache_dir=str(tmp_path / "cache")))
    (path,) = (tmp_path / "cache" / "calibration").iterdir()
    assert json.loads(path.read_text())["calibration"]["prefill"][-1] == [largest, largest]


def startup_ceilings():
    """Of a machine that is faster than any: the share stays below 1."""
    from batchinfer.engine.ceilings import Ceilings

    return Ceilings(1e13, 1e13, 1e13, 1e12)
