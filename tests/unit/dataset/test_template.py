from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.dataset.prompt import PromptConfig, RowReader
from batchinfer.errors import InputError, InvalidSpecError
from batchinfer.types import ErrorCode


def render(template, columns, on_null="error"):
    """The outcome of each row: its text, its error code, or None where it is skipped."""
    batch = pa.record_batch(columns)
    reader = RowReader(PromptConfig(template=template, on_null=on_null), batch.schema)
    rows = reader.read(batch.select(reader.columns) if reader.columns else batch, 0)
    return [row.request.prompt if row.request else row.error and row.error.code for row in rows]


NULL, TEMPLATE = ErrorCode.NULL_FIELD, ErrorCode.TEMPLATE_ERROR
NAMES = pa.array(["Ada", None])

NULL_USES = {
    # template: outcome of the null row under on_null = error and under empty
    "Hi {{ name }}!": (NULL, "Hi !"),
    "Hi {{ name | upper }}!": (NULL, "Hi !"),
    "Hi {{ name ~ '!' }}": (NULL, "Hi !"),
    "{{ 'Hi ' + name }}!": (NULL, "Hi !"),
    "{{ ['Hi', name] | join(' ') }}!": (NULL, "Hi !"),
    "{{ 'Hi %s' % name }}!": (NULL, "Hi !"),
    "Hi {{ name | trim }}!": (NULL, "Hi !"),
    "Hi {{ name[0] }}!": (NULL, "Hi !"),
    "Hi {{ name.title() }}!": (NULL, "Hi !"),
    "Hi {{ name | string }}!": (NULL, "Hi !"),
    "Hi {{ [name] }}!": (NULL, "Hi []!"),
    "Hi {{ name | default('you') }}!": ("Hi you!", "Hi you!"),
    "Hi {{ name or 'you' }}!": ("Hi you!", "Hi you!"),
    "Hi{% if name %} {{ name }}{% endif %}!": ("Hi!", "Hi!"),
    "{{ 'no' if name is none else 'a' }} name": ("no name", "no name"),
    "{{ 'no' if name == none else 'a' }} name": ("no name", "no name"),
    "{{ 'a' if name is defined else 'no' }} name": ("no name", "no name"),
    "{{ row | tojson }}": ('{"name": null}', '{"name": null}'),
    "Hi {% for c in name %}{{ c }}{% endfor %}!": (NULL, "Hi !"),
    "{{ name | length }} letters": (NULL, "0 letters"),
}


@pytest.mark.parametrize("template", NULL_USES)
def test_a_null_never_becomes_the_word_none(template):
    """Through every way in which a template can print a value."""
    error, empty = NULL_USES[template]
    for on_null, expected in (("error", error), ("empty", empty), ("skip", None if error is NULL else error)):
        ada, null = render(template, {"name": NAMES}, on_null)
        assert null == expected
        assert isinstance(ada, str)
        assert not isinstance(null, str) or "none" not in null.lower()


def test_nulls_inside_structs_lists_and_maps_are_nulls_too():
    person = pa.array([{"name": "Ada", "age": None}], pa.struct([("name", pa.string()), ("age", pa.int8())]))
    tags = pa.array([["x", None]], pa.list_(pa.string()))
    table = pa.array([[("k", None)]], pa.map_(pa.string(), pa.string()))
    columns = {"person": person, "tags": tags, "table": table}
    assert render("{{ person.name }}", columns) == ["Ada"]
    for template in ("{{ person.age }}", "{{ person }}", "{{ tags[1] }}", "{{ tags | join }}", "{{ table.k }}"):
        assert render(template, columns) == [NULL]
    reader = RowReader(PromptConfig(template="{{ person.age }}{{ tags[1] }}"), pa.record_batch(columns).schema)
    assert reader.read(pa.record_batch(columns), 0)[0].error.message == "field 'person.age' is null"


def test_unknown_columns_are_refused_before_any_row_with_the_list_of_those_there_are():
    with pytest.raises(InputError, match=r"'nme', 'x y'.* it has: name, age") as caught:
        render("{{ nme }} {{ row['x y'] }} {{ name }}", {"name": NAMES, "age": NAMES})
    assert caught.value.param == "template"


def test_only_the_columns_that_are_used_are_read():
    schema = pa.schema([(name, pa.string()) for name in ("a", "b", "c d", "e")])
    for template, columns in [
        ("{{ b }}{% set e = 1 %}{{ e }}", ("b",)),
        ("{{ row['c d'] }}{{ row.a }}", ("a", "c d")),
        ("{% for k, v in row.items() %}{{ v }}{% endfor %}", ("a", "b", "c d", "e")),
        ("{{ row | tojson }}", ("a", "b", "c d", "e")),
        ("{% for x in range(3) %}{{ x }}{{ loop.index }}{% endfor %}", ()),
        ("constant", ()),
    ]:
        assert RowReader(PromptConfig(template=template), schema).columns == columns


def test_values_of_every_kind_are_written_as_people_write_them():
    columns = {
        "n": pa.array([3], pa.int8()),
        "d": pa.array([Decimal("1.50")]),
        "b": pa.array(["grüß".encode()]),
        "t": pa.array([1], pa.timestamp("ns")),
        "day": pa.array([dt.date(2024, 2, 29)]),
        "e": pa.array(["x"]).dictionary_encode(),
        "m": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int8())),
        "row": pa.array(["a column named row"]),
    }
    template = "{{ n }} {{ d }} {{ b }} {{ t.year }} {{ day }} {{ e }} {{ m.k }} {{ row }}"
    assert render(template, columns) == ["3 1.50 grüß 1970 2024-02-29 x 1 a column named row"]
    assert render("{{ b | tojson }}", {"b": pa.array(['<a> & "ü"'])}) == ['"<a> & \\"ü\\""']


def test_values_that_python_cannot_hold_fail_their_row_only_if_it_needs_them():
    """Bytes that are not UTF-8, in binary and in string columns; times beyond the calendar."""
    bad_string = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.array([0, 2, 4], pa.int32()).buffers()[1], pa.py_buffer(b"\xff\xfeok")]
    )
    for values in (bad_string, pa.array([b"\xff\xfe", b"ok"])):
        assert render("{{ s }}", {"s": values}) == [ErrorCode.INVALID_ENCODING, "ok"]
    times = pa.array([2**62, 0], pa.timestamp("us"))
    assert render("{{ s }}{{ t }}", {"s": ["a", "b"], "t": times}) == [TEMPLATE, "b1970-01-01 00:00:00"]
    assert render("{{ s }}", {"s": ["a", "b"], "t": times}) == ["a", "b"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / n }}",
        "{{ n.nope }}",
        "{{ 'x' * 100000000 }}",
        "{{ [0] * 100000000 }}",
        "{{ 10 ** 100000 }}",
        "{{ '%100000000d' % n }}",
        "{{ 'x'.ljust(100000000) }}",
        "{{ '{:100000000}'.format(n) }}",
        "{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ row.items.__func__.__globals__ }}",
        "{{ (1).__class__.__bases__[0].__subclasses__() }}",
    ],
)
def test_a_template_that_fails_explodes_or_breaks_out_is_an_error_row(template):
    assert render(template, {"n": pa.array([0, 0])}) == [TEMPLATE, TEMPLATE]


@pytest.mark.parametrize(
    ("template", "words"),
    [("{{ n", "line 1"), ("a\n{% if %}", "line 2"), ("{% include 'x' %}", "include"), ("{{ n | nope }}", "nope")],
)
def test_wrong_syntax_is_refused_before_any_row(template, words):
    with pytest.raises(InvalidSpecError, match=words) as caught:
        render(template, {"n": pa.array([0])})
    assert caught.value.param == "template"


def test_an_empty_text_is_an_empty_prompt_and_surrogates_are_replaced():
    assert render("{{ s }}", {"s": [" \n"]}) == [ErrorCode.EMPTY_PROMPT]
    reader = RowReader(PromptConfig(template="{{ '\\ud800' }}{{ s }}"), pa.schema([("s", pa.string())]))
    row = reader.read(pa.record_batch({"s": ["x"]}), 0)[0]
    assert (row.request.prompt, row.warnings) == ("\ufffdx", ("text_replaced",))


@given(st.lists(st.one_of(st.none(), st.text(max_size=5)), max_size=6))
def test_a_plain_template_is_the_string_itself(values):
    """For text without nulls, a template of one variable changes nothing."""
    outcomes = render("{{ s }}|", {"s": pa.array(values, pa.string())})
    assert outcomes == [NULL if value is None else f"{value}|" for value in values]
