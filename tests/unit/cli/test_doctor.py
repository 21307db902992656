"""The doctor finds what is wrong, says how to mend it, and never falls over."""

import importlib.util
import re
import shutil
from datetime import datetime, timedelta

import pytest

from batchinfer.cli import checks_machine, checks_services
from batchinfer.cli.checks import CheckStatus
from batchinfer.settings import Settings
from tests.program import batchinfer


def by_name(result):
    return {check["name"]: check for check in result.json["checks"]}


def test_a_healthy_machine(monkeypatch):
    monkeypatch.setenv("BATCHINFER_USD_PER_HOUR", "2.5")
    result = batchinfer("doctor", "--json")
    assert result.json["healthy"]
    checks = by_name(result)
    assert {
        "database", "migrations", "python", "settings", "price", "home", "broker", "cpu", "memory", "compiler", "torch",
        "kernels", "calibration", "gpu", "transformers", "engine", "model cache",
    } <= set(checks)  # fmt: skip
    assert checks["price"]["status"] == "ok"
    assert "BATCHINFER_USD_PER_HOUR" in checks["settings"]["detail"]


def test_it_names_what_was_measured_of_models(monkeypatch, tmp_path):
    from batchinfer.engine.calibration import Calibration, CalibrationStore

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "none yet" in checks_machine.check_calibration().detail
    key = {"model": "small", "threads": "2", "recipe": "", "dtype": "float32"}
    CalibrationStore(tmp_path / "batchinfer").save(key, Calibration(((512, 10), (1024, 20)), ((1, 5), (2, 9))))
    check = checks_machine.check_calibration()
    assert check.status is CheckStatus.OK
    assert "small (float32, 2 threads): 512 tokens a step" in check.detail


def test_build_compiles_every_variant_once(monkeypatch, tmp_path):
    """Into the cache folder; a second time nothing is left to do. Without a compiler it says which way out there is."""
    from batchinfer_kernels.cpu.build import COMPILER_VARIABLE
    from batchinfer_kernels.cpu.variants import Variant, buildable

    assert {"portable"} <= {variant.name for variant in buildable()}
    quick = (Variant("portable", frozenset(), ("-O0",)), Variant("avx2", frozenset(), ("-O0", "-mno-such-thing")))
    monkeypatch.setattr("batchinfer_kernels.cpu.variants.buildable", lambda: quick)
    monkeypatch.setattr("batchinfer.cli.doctor.run_checks", lambda _storage: [checks_machine.check_python()])
    monkeypatch.setenv("BATCHINFER_KERNEL_CACHE", str(tmp_path))
    first = by_name(batchinfer("doctor", "--build", "--json", exit_code=1))
    (library,) = tmp_path.glob("*.so")
    assert first["build portable"]["detail"].startswith("built in")
    assert str(library) in first["build portable"]["detail"]
    assert first["build avx2"]["status"] == "failed"
    assert "no-such-thing" in first["build avx2"]["detail"]
    again = by_name(batchinfer("doctor", "--build", "--json", exit_code=1))
    assert again["build portable"]["detail"] == f"was built before: {library}"
    monkeypatch.setenv(COMPILER_VARIABLE, "no-such-compiler")
    assert "g++" in by_name(batchinfer("doctor", "--build", "--json", exit_code=1))["build portable"]["mend"]


def test_for_people_it_is_a_line_a_check(monkeypatch):
    monkeypatch.setattr("batchinfer.cli.doctor.run_checks", lambda _storage: [checks_machine.check_python()])
    assert batchinfer("doctor").stdout.startswith("ok    python  3.")


@pytest.mark.parametrize(
    ("variable", "value", "name", "mend"),
    [
        ("DATABASE_URL", "postgresql://user:secret@127.0.0.1:1/x", "database", "BATCHINFER_DATABASE_URL"),
        ("DATABASE_URL", "nonsense", "database", "BATCHINFER_DATABASE_URL"),
        ("BROKER_URL", "redis://:secret@127.0.0.1:1/0", "broker", "BATCHINFER_BROKER_URL"),
        ("ENGINE_FACTORY", "no.such.module:create", "engine", "BATCHINFER_ENGINE_FACTORY"),
        ("PORT", "-1", "settings", "variable"),
    ],
)
def test_what_is_wrong_is_named_with_the_way_out(monkeypatch, variable, value, name, mend):
    monkeypatch.setenv(f"BATCHINFER_{variable}", value)
    result = batchinfer("doctor", "--json", exit_code=1)
    assert not result.json["healthy"]
    check = by_name(result)[name]
    assert check["status"] == "failed"
    assert mend in check["mend"]
    assert "secret" not in result.stdout


def test_a_home_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    check = checks_services.check_folder(tmp_path / "file" / "home")
    assert check.status is CheckStatus.FAILED
    assert "BATCHINFER_HOME" in check.mend


def test_a_price_that_nobody_set_is_an_assumption():
    check = checks_services.check_price(Settings.load())
    assert check.status is CheckStatus.WARNING
    assert "BATCHINFER_USD_PER_HOUR" in check.mend


def test_no_compiler_is_a_warning(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    check = checks_machine.check_compiler()
    assert check.status is CheckStatus.WARNING
    assert "g++" in check.mend


def test_kernels_that_cannot_be_built_are_a_warning(monkeypatch):
    """Jobs still run without them, so it is no failure; the reason is shown."""
    monkeypatch.setattr("batchinfer_kernels.cpu.is_available", lambda: (False, "no compiler found"))
    check = checks_machine.check_kernels()
    assert (check.status, check.detail) == (CheckStatus.WARNING, "no compiler found")
    assert "g++" in check.mend


def test_kernels_that_run_are_named(monkeypatch):
    monkeypatch.setattr("batchinfer_kernels.cpu.is_available", lambda: (True, "C++ kernels, variant avx2"))
    assert checks_machine.check_kernels().status is CheckStatus.OK


def test_an_engine_in_a_package_that_does_not_exist():
    assert importlib.util.find_spec("json") is not None
    assert checks_machine.check_engine("json:loads").status is CheckStatus.OK
    assert checks_machine.check_engine("nowhere.at.all:x").status is CheckStatus.FAILED


def test_storage_is_tried_by_writing(tmp_path):
    assert checks_services.check_storage(str(tmp_path / "new")).status is CheckStatus.OK
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    assert checks_services.check_storage(str(tmp_path / "file")).status is CheckStatus.FAILED
    assert checks_services.check_storage("gopher://x/y").status is CheckStatus.FAILED


@pytest.mark.service
def test_a_broker_that_answers(redis_url):
    assert checks_services.check_broker(redis_url).status is CheckStatus.OK


@pytest.mark.service
def test_a_database_of_an_older_program(postgres, monkeypatch):
    url = postgres.create_database()
    monkeypatch.setenv("BATCHINFER_DATABASE_URL", url)
    check = by_name(batchinfer("doctor", "--json", exit_code=1))["migrations"]
    assert check["mend"] == "batchinfer db upgrade"
    postgres.drop_database(url)


@pytest.mark.service
@pytest.mark.parametrize(
    ("turned", "detail"),
    [
        (timedelta(hours=2), r"7[12]\d\d\.\d s ahead of the database's"),
        (-timedelta(hours=2), r"7[12]\d\d\.\d s behind the database's"),
    ],
)
def test_a_clock_that_is_off_is_found(postgresql_url, monkeypatch, turned, detail):
    """This machine's clock is turned by two hours; the database's is PostgreSQL's own."""

    class Turned(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + turned

    monkeypatch.setattr(checks_services, "datetime", Turned)
    found = checks_services.check_clock(Settings.load(database_url=postgresql_url))
    assert found.status is CheckStatus.FAILED
    assert re.fullmatch(detail, found.detail)
    assert "synchronise" in found.mend


@pytest.mark.service
def test_a_clock_that_agrees_is_fine(postgresql_url):
    found = checks_services.check_clock(Settings.load(database_url=postgresql_url))
    assert (found.status, found.mend) == (CheckStatus.OK, None)
    assert found.detail.startswith("within ")
