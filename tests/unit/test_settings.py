"""Settings: read from the environment, and refused with a sentence that names the variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.errors import UserError
from batchinfer.settings import Settings


def test_defaults_need_no_server(tmp_path, monkeypatch):
    """With nothing set: SQLite in the home folder, messages in the process."""
    monkeypatch.setenv("BATCHINFER_HOME", str(tmp_path))
    settings = Settings.load()
    assert settings.sqlalchemy_url == f"sqlite:///{tmp_path}/batchinfer.db"
    assert settings.is_embedded
    assert settings.nanos_per_hour == 100_000_000


def test_the_environment_is_read_and_arguments_win(monkeypatch):
    monkeypatch.setenv("BATCHINFER_SHARDS_IN_FLIGHT", "7")
    monkeypatch.setenv("BATCHINFER_USD_PER_HOUR", "2.50")
    monkeypatch.setenv("BATCHINFER_HOME", "~/elsewhere")
    settings = Settings.load(usd_per_hour="3")
    assert settings.shards_in_flight == 7
    assert settings.nanos_per_hour == 3 * 10**9
    assert settings.home == Path("~/elsewhere").expanduser()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BATCHINFER_PORT", "eighty"),
        ("BATCHINFER_USD_PER_HOUR", "-1"),
        ("BATCHINFER_ENGINE_FACTORY", "no colon"),
        ("BATCHINFER_LEASE_SECONDS", "0"),
        ("BATCHINFER_LOG_LEVEL", "loud"),
    ],
)
def test_a_bad_value_is_one_sentence_with_the_variable_and_the_value(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        Settings.load()
    assert str(caught.value).startswith(f"{name}={value} is not valid: ")
    assert "\n" not in str(caught.value)


def test_values_that_do_not_fit_together_are_refused():
    """A heartbeat as long as the lease would lose it at the first delay."""
    with pytest.raises(UserError, match="heartbeat_seconds"):
        Settings.load(lease_seconds=5, heartbeat_seconds=5)
