"""Rows on their way through stages: whatever templates, filters, values and answers do, a row ends as one outcome."""

import json
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.dataset.stage_reader import row_reader
from batchinfer.errors import InputError, InvalidSpecError
from batchinfer.jobs.planner import prompt_config
from batchinfer.jobs.spec import parse_spec
from batchinfer.types import Completion, ErrorCode, FinishReason, RowError, RowStatus, Usage

ENDINGS = {RowStatus.SUCCEEDED, RowStatus.FILTERED, RowStatus.ERRORED, RowStatus.SKIPPED}


def read(stages, on_null="error", **columns):
    batch = pa.table(columns).to_batches()[0]
    spec = parse_spec({"inputs": ["x"], "model": "m", "stages": stages, "on_null": on_null})
    return row_reader(prompt_config(spec), batch.schema).read(batch, 0)


def answer(text, **extra):
    return Completion(
        "0", RowStatus.SUCCEEDED, text=text, finish_reason=FinishReason.STOP, usage=Usage(1, 0, 2), extra=extra
    )


def one(stages, on_null="error", **columns):
    """The only row."""
    (row,) = read(stages, on_null, **{name: [value] for name, value in columns.items()})
    return row


def verdict(expression, on_null="error", **columns):
    """What a filter before the only prompt does with a row: its status and error code, None where it goes on."""
    row = one([{"name": "keep", "filter": expression}, {"name": "a", "prompt": "x"}], on_null, **columns)
    return row.staged.status and row.staged.status.value, row.error and row.error.code.value


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("n > 2", (None, None)),
        ("n > 3", ("filtered", None)),
        ("n", (None, None)),
        ("n - 3", ("filtered", None)),
        ("word == 'yes' and n in [1, 3]", (None, None)),
        ("word | length > 2 and not word is none", (None, None)),
        ("row['my column'] == 1.5", (None, None)),
        ("nothing is none", (None, None)),
        ("nothing", ("filtered", None)),
        ("nothing > 3", ("errored", "null_field")),
        ("word", ("errored", "template_error")),
        ("[n]", ("errored", "template_error")),
        ("n / 0 > 1", ("errored", "template_error")),
        ("word.nowhere == 1", ("errored", "template_error")),
        ("word.__class__", ("errored", "template_error")),
        ("'x' * 100000000 == ''", ("errored", "template_error")),
        (
            "range(99999) | sum > range(99999) | map('string') | join('x' * 9999) | length",
            ("errored", "template_error"),
        ),
        ("amount > 1", (None, None)),
        ("moment.year == 2024", (None, None)),
    ],
)
def test_a_filter(expression, found):
    columns = {
        "n": 3, "word": "yes", "my column": 1.5, "nothing": None, "amount": Decimal("1.5"),
        "moment": datetime(2024, 1, 1, tzinfo=UTC),
    }  # fmt: skip
    assert verdict(expression, **columns) == found


def test_a_null_follows_on_null():
    assert verdict("x > 1", "skip", x=None) == ("skipped", None)
    row = one([{"name": "a", "prompt": "say {{ x }}"}], "skip", x=None)
    assert row.skipped
    assert one([{"name": "a", "prompt": "say {{ x }}"}], "empty", x=None).request.prompt == "say "


def test_an_answer_is_seen_by_the_stages_after_it():
    """Its text, its JSON as a value (a null in it is no word), numbers of tokens; a prompt or messages are made of it."""
    stages = [
        {"name": "a", "prompt": "{{ x }}", "json_schema": {"type": "object"}},
        {
            "name": "keep",
            "filter": "a.parsed.score >= 4 and a.usage.completion_tokens == 2 and row.a.finish_reason == 'stop'",
        },
        {"name": "b", "system": "Be {{ a.parsed.mood }}", "prompt": "{{ keep }} {{ a.output }} {{ a.parsed.tags[0] }}"},
        {"name": "c", "messages": [{"role": "user", "content": "{{ b.output }} {{ x }}"}]},
    ]
    parsed = {"score": 5, "mood": "kind", "tags": ["t"], "gone": None}
    row = one(stages, x="hi").staged
    request = row.take(answer("A", parsed=json.dumps(parsed)))
    assert request.messages == [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "True A t"}]
    assert row.take(answer("\ud800")).messages == [{"role": "user", "content": "\ufffd hi"}]
    assert row.take(answer("end")) is None
    assert (row.status, row.stopped_at, row.verdicts) == (RowStatus.SUCCEEDED, None, {"keep": True})
    assert "text_replaced" in row.warnings
    low = one(stages, x="hi").staged
    assert low.take(answer("A", parsed='{"score": 1}')) is None
    assert (low.status, low.stopped_at) == (RowStatus.FILTERED, "keep")
    null = one([stages[0], {"name": "b", "prompt": "{{ a.parsed.gone }}"}], x="hi").staged
    assert null.take(answer("A", parsed=json.dumps(parsed))) is None
    assert (null.error.code, null.named_error.message) == (
        ErrorCode.NULL_FIELD, "stage 'b': field 'a.parsed.gone' is null",
    )  # fmt: skip


def test_samples_and_logprobs_are_seen_with_all_of_their_fields():
    stages = [
        {"name": "a", "prompt": "x", "sampling": {"n": 2, "temperature": 1}},
        {"name": "b", "prompt": "{% for s in a.samples %}{{ s.output }}{{ s.reasoning or '-' }}{% endfor %}"},
    ]
    samples = [{"sample_index": i, "output": f"s{i}", "finish_reason": "stop", "token_ids": [1]} for i in range(2)]
    assert one(stages, x="hi").staged.take(answer("s0", samples=samples)).prompt == "s0-s1-"


def test_a_failed_answer_ends_the_row_and_the_error_names_the_stage():
    row = one([{"name": "a", "prompt": "x"}, {"name": "b", "prompt": "y"}], x="").staged
    row.take(answer("fine"))
    error = RowError(ErrorCode.ENGINE_ERROR, "no")
    assert row.take(Completion("0", RowStatus.ERRORED, error=error, clamped_max_tokens=3, warnings=("odd",))) is None
    assert (row.status, row.stopped_at, row.error) == (RowStatus.ERRORED, "b", error)
    assert row.named_error.message == "stage 'b': no"
    assert row.warnings == ("b:odd", "b:max_tokens_clamped:3")


def test_an_empty_prompt_and_a_value_that_cannot_be_read():
    row = one([{"name": "a", "prompt": "{{ x }}"}], x=" ")
    assert (row.request, row.error.code, row.error.message) == (None, "empty_prompt", "stage 'a': the prompt is empty")
    far = pa.array([2**62], pa.timestamp("s"))
    (row,) = read([{"name": "a", "prompt": "{{ x }}"}], x=far)
    assert row.error.code == "template_error"


def test_columns_named_like_parameters_are_data_and_that_is_said():
    batch = pa.table({"topic": ["x"], "max_tokens": [3], "temperature": [0.5]}).to_batches()[0]
    spec = parse_spec(
        {"inputs": ["x"], "model": "m", "stages": [{"name": "a", "prompt": "{{ topic }} {{ temperature }}"}]}
    )
    reader = row_reader(prompt_config(spec), batch.schema)
    assert reader.read(batch, 0)[0].request.params.temperature == 0
    assert reader.warnings == (
        "The column(s) 'max_tokens' do not override sampling parameters: stages have their own.",
    )


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.floats(), st.text(max_size=6),
    st.lists(st.integers(0, 9), max_size=3), st.fixed_dictionaries({"y": st.one_of(st.none(), st.text(max_size=3))}),
)  # fmt: skip
ATOMS = st.sampled_from(
    ["x", "x.y", "x[0]", "x['y']", "a.output", "a.usage.completion_tokens", "a.parsed", "a.parsed.z", "a.parsed[0].z", "row",
     "none", "1", "-2.5", "'ab'", "[]", "{}", "x()", "x.__class__", "range(9)", "loop"]
)  # fmt: skip
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "**", "/", "//", "%", "~", "<", "==", "in", "and", "or"]), inner),
        st.builds("{} | {}".format, inner, st.sampled_from(["length", "int", "upper", "first", "sum", "tojson", "list", "default(1)", "join('-')"])),
        st.builds("not {}".format, inner),
        st.builds("{} if {} else {}".format, inner, inner, inner),
    ),
    max_leaves=6,
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["y", "z"]), inner, max_size=2),
    max_leaves=5,
)


@given(VALUES, EXPRESSIONS, EXPRESSIONS, st.text(max_size=5), JSON, st.sampled_from(["error", "skip", "empty"]))
def test_whatever_a_template_does_its_row_has_one_outcome(value, condition, expression, text, parsed, on_null):
    """A description is refused as a whole, or each of its rows ends as something, with an error that names the stage."""
    stages = [
        {"name": "a", "prompt": "begin {{ x is none }}", "json_schema": {}},
        {"name": "keep", "filter": condition},
        {"name": "b", "prompt": f"{{{{ {expression} }}}}"},
    ]
    try:
        row = one(stages, on_null, x=value)
    except (InvalidSpecError, InputError) as error:
        assert "stage '" in error.message
        return
    except pa.ArrowException:  # a value that Arrow has no type for
        return
    staged = row.staged
    request = staged.take(answer(text, parsed=json.dumps(parsed)))
    if request is not None:
        assert (staged.status, staged.verdicts) == (None, {"keep": True})
        assert request.prompt.strip()
        assert staged.take(answer(text)) is None
    assert staged.status in ENDINGS
    assert (staged.status is RowStatus.ERRORED) == (staged.error is not None)
    assert (staged.status is RowStatus.SUCCEEDED) == (staged.stopped_at is None)
    if staged.error is not None:
        assert staged.named_error.message.startswith(f"stage '{staged.stopped_at}': ")
