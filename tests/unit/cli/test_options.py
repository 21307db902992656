"""Flags become a JobSpec: only what was given, under the same names, with errors that name the flag."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from batchinfer.cli.control import parse_budget
from batchinfer.cli.options import build_spec, given_fields
from batchinfer.errors import InvalidSpecError
from batchinfer.jobs.spec import JobSpec

BASE = {"inputs": ("a.parquet",), "model": "org/name"}


def test_flags_that_were_not_given_leave_the_defaults_to_the_spec():
    flags = BASE | {"seed": None, "stop": (), "ignore_eos": None, "tags": ()}
    assert build_spec(flags) == JobSpec(inputs=("a.parquet",), model="org/name")


@pytest.mark.parametrize(("field", "value"), [("seed", 0), ("temperature", 0.0), ("max_tokens", 0), ("priority", 0)])
def test_zero_is_a_value(field, value):
    """`--seed 0` is not the same as no seed."""
    assert given_fields(BASE | {field: value})[field] == value


def test_tags_stops_and_budgets():
    spec = build_spec(BASE | {"tags": ("team=search", "note=a=b"), "stop": ("\n", "END"), "budget_usd": "$1,000.50"})
    assert spec.tags == {"team": "search", "note": "a=b"}
    assert spec.stop == ("\n", "END")
    assert spec.budget_usd == Decimal("1000.50")


def test_a_deadline_may_be_a_duration():
    before = datetime.now(UTC)
    spec = build_spec(BASE | {"deadline": "90m"})
    assert before + timedelta(minutes=90) <= spec.deadline <= datetime.now(UTC) + timedelta(minutes=90)


def test_long_texts_come_from_files(tmp_path):
    path = tmp_path / "prompt.j2"
    path.write_text("Say {{ word }} — é", encoding="utf-8")
    assert build_spec(BASE | {"template": f"@{path}"}).template == "Say {{ word }} — é"


@pytest.mark.parametrize(
    ("flags", "param", "words"),
    [
        ({"inputs": ()}, "inputs", ["input", "missing"]),
        ({"model": None}, "model", ["--model", "missing"]),
        ({"temperature": -1.0}, "temperature", ["--temperature", "-1.0"]),
        ({"budget_usd": "lots"}, "budget_usd", ["--budget", "lots"]),
        ({"tags": ("team",)}, "tags", ["--tag", "team"]),
        ({"deadline": "tomorrow"}, "deadline", ["--deadline", "tomorrow", "6h"]),
        ({"template": "@/nowhere/t.j2"}, "template", ["--template", "/nowhere/t.j2"]),
        ({"prompt_column": "p", "messages_column": "m"}, None, ["prompt_column", "messages_column"]),
        ({"max_tokens": 4, "min_tokens": 5}, None, ["min_tokens (5)", "max_tokens (4)"]),
    ],
)
def test_an_error_names_the_flag_and_the_value(flags, param, words):
    with pytest.raises(InvalidSpecError) as caught:
        build_spec(BASE | flags)
    assert caught.value.param == param
    for word in words:
        assert word in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("text", ["0", "-1", "five", "", "nan", "inf", "1e", "$"])
def test_a_budget_is_an_amount_above_zero(text):
    with pytest.raises(InvalidSpecError, match="--budget"):
        parse_budget(text)
