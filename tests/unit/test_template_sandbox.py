"""Templates that want a worker's time or memory are error rows; all others render as plain Jinja renders them."""

import jinja2
import pyarrow as pa
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchinfer.dataset.template import PromptTemplate
from batchinfer.errors import InvalidSpecError, RowFailure
from batchinfer.template_budget import MAX_WIDTH
from batchinfer.types import ErrorCode

DOUBLED = "{% set ns = namespace(v=V) %}{% for i in range(60) %}{% set ns.v = NEXT %}{% endfor %}{{ ns.v|length }}"
MILLION = "{% set a = 'a' * 1000000 %}"


def doubled(value, following):
    return DOUBLED.replace("NEXT", following).replace("V", value)


TOO_MUCH = {
    "padding filter": "{{ x|center(500000000)|length }}",
    "indent": "{{ (x ~ '\\n')|indent(500000000)|length }}",
    "indent of many lines": "{{ ('\\n' * 1000000)|indent(99999)|length }}",
    "slices": "{{ [1]|slice(100000000)|list|length }}",
    "filled batch": "{{ [1]|batch(100000000, 'x')|list|length }}",
    "padding by map": "{{ range(99999)|map('string')|map('center', 8000000)|list|length }}",
    "text doubled by ~": doubled("'ab'", "ns.v ~ ns.v"),
    "text doubled by +": doubled("'ab'", "ns.v + ns.v"),
    "text doubled by join": doubled("'ab'", "[ns.v, ns.v]|join"),
    "text doubled by format": doubled("'ab'", "'%s%s'|format(ns.v, ns.v)"),
    "list doubled": doubled("[1]", "ns.v + ns.v"),
    "list of lists of lists": doubled("[1]", "[ns.v, ns.v]"),
    "tuples of tuples": doubled("(1,)", "(ns.v, ns.v)"),
    "dicts of dicts": doubled("{1: 1}", "{1: ns.v, 2: ns.v}"),
    "dicts by calls": doubled("{1: 1}", "dict(a=ns.v, b=ns.v)"),
    "number squared": doubled("3", "ns.v * ns.v"),
    "power of a power": "{{ (2 ** 4000) ** 4000 }}",
    "replace": MILLION + "{{ a.replace('a', a)|length }}",
    "replace filter": MILLION + "{{ a|replace('a', a)|length }}",
    "replace of nothing": MILLION + "{{ a|replace('', a)|length }}",
    "join": MILLION + "{{ a.join(a)|length }}",
    "join filter": MILLION + "{{ [1] * 100000|int }}{{ ([1] * 100000)|join(a)|length }}",
    "join of a stream": MILLION + "{{ range(99999)|map('string')|join(a)|length }}",
    "sum of lists": "{{ ([[1]] * 100000)|sum(start=[])|length }}",
    "wordwrap": MILLION + "{{ ('a ' * 1000000)|wordwrap(1, wrapstring=a)|length }}",
    "wide format": "{{ '%0999999999d'|format(1)|length }}",
    "wide json": "{{ [[1]]|tojson(indent=500000000)|length }}",
    "deep and wide json": "{% set ns = namespace(v=[1]) %}{% for i in range(900) %}{% set ns.v = [1, ns.v] %}{% endfor %}"
    "{{ ([ns.v] * 100)|tojson(indent=64)|length }}",
    "many wide lines of json": "{{ ([1] * 100000)|tojson(indent=99999)|length }}",
    "json's separators": MILLION + "{{ ([1] * 100000)|tojson(separators=(a, a))|length }}",
    "slices in loops": "{% set a = 'a' * 8000000 %}{% for i in range(99999) %}{% set b = a[1:] %}{% endfor %}",
    "searches in loops": "{% set a = 'a' * 8000000 %}{% for i in range(99999) %}{% set b = a.count('b') %}{% endfor %}",
    "titles in loops": "{% set a = 'a b ' * 1000000 %}{% for i in range(99999) %}{% set b = a|title %}{% endfor %}",
    "characters in loops": "{% set a = 'ab' * 1000000 %}{% for i in range(99999) %}{% set b = a|unique|list %}{% endfor %}",
    "width of a format": "{{ '{:>9999999999}'.format(x)|length }}",
    "width that is a value": "{{ '{:>{}}'.format(x, 9999999999)|length }}",
    "many wide fields": "{{ ('{0:>9999}' * 100000).format(x)|length }}",
    "many wide fields by %": "{{ (('%9999s' * 100000) % ((x,) * 100000))|length }}",
    "many wide fields by a filter": "{{ ('%9999s' * 2000)|format(*([x] * 2000))|length }}",
    "many long fields": MILLION + "{{ ('{0}' * 100000).format(a)|length }}",
    "format of a map": "{{ '{x:>9999999999}'.format_map({'x': x})|length }}",
    "translate": "{{ x.translate({104: 'a' * 8000000}) }}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "sums in loops": "{% for i in range(99999) %}{% if range(99999)|sum == 3 %}x{% endif %}{% endfor %}",
    "texts in loops": "{% for i in range(99999) %}{% set a = 'a' * 8000000 %}{% endfor %}",
    "kept output": MILLION + "{% set b %}{% for i in range(99999) %}{{ a }}{% endfor %}{% endset %}",
    "kept plain text": "{% set b %}{% for i in range(99999) %}" + "plain " * 10000 + "{% endfor %}{% endset %}",
    "kept plain text of a macro": "{% macro m() %}" + "plain " * 10000 + "{% endmacro %}"
    "{% set b %}{% for i in range(99999) %}{{ m() }}{% endfor %}{% endset %}",
    "macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless macro": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "endless loop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
}  # fmt: skip
EQUAL = [
    "{{ x }} and {{ y }}",
    "{% for k, v in d.items() %}{{ loop.index }}/{{ loop.length }} {{ k }}={{ v }}{{ ', ' if not loop.last }}{% endfor %}",
    "{% for i in range(3) %}{{ i }}{% else %}none{% endfor %}{% for i in [] %}x{% else %}none{% endfor %}",
    "{{ l|map('upper')|join(', ') }} {{ l|sort(reverse=true)|first }} {{ l|length }} {{ l|batch(2)|list }}",
    "{{ '{:>4}|{k}|{!r}'.format(x, l, k=y) }} {{ '%5s %(a)s' % {'a': y} if false }}{{ '%04d' % y }} {{ '{a}'.format_map({'a': 'b'}) }}",
    "{% set a, b = 1, 'two' %}{{ a }}{{ b }}{{ (a, b) }}{{ [a, b] }}{{ {'k': b} }}",
    "{{ 1 < y < 9 }} {{ 'h' in x }} {{ x in ['hi', 'ho'] }} {{ y not in (1, 2) }} {{ x == 'hi' }}",
    "{% macro m(a, b=2) %}<{{ a }}{{ b }}>{% endmacro %}{{ m(1) }}{{ m(1, b=3) }}",
    "{% macro m(a) %}<{{ a }}{{ caller() }}>{% endmacro %}{% call m(4) %}inner{% endcall %}",
    "{% set block %}text {{ x }}{% endset %}{{ block|upper }}{% filter lower %}LOUD {{ x }}{% endfilter %}",
    "{{ x ~ y ~ none }} {{ x + '!' }} {{ y * 2 + 1 }} {{ 'ab' * 3 }} {{ y % 4 }} {{ '%s-%d' % (x, y) }}",
    "{{ x|replace('h', 'll') }} {{ x.replace('i', 'o') }} {{ ', '.join(l) }} {{ x|indent(4, first=true) }}",
    "{% for g in [{'a': 1, 'b': 2}, {'a': 1, 'b': 3}]|groupby('a') %}{{ g.grouper }}:{{ g.list|map(attribute='b')|sum }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for i in l %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ l[1:]|list }} {{ l[-1] }} {{ x|default('d') }} {{ nothing|default('d') }} {{ 3.14159|round(2) }}",
    "{% for a in [1, [2, [3]]] recursive %}{% if a is iterable %}{{ loop(a) }}{% else %}{{ a }}{% endif %}{% endfor %}",
    "{{ l|select('ne', 'a')|list }} {{ l|reject('in', ['a'])|list }} {{ [3, 1, 2]|max }} {{ l|last }}",
]
VALUES = {"x": "hi", "y": 7, "l": ["a", "b", "c"], "d": {"one": 1, "two": 2}}


def render(source, values):
    arrays = {name: pa.array([value]) for name, value in values.items()}
    schema = pa.schema([(name, array.type) for name, array in arrays.items()])
    template = PromptTemplate(source, schema, "error")
    return template.render({name: [value] for name, value in values.items()}, 0)


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_would_fill_or_block_a_worker_fails_its_row(name):
    with pytest.raises(RowFailure) as failure:
        render(TOO_MUCH[name], {"x": "hi"})
    assert failure.value.error.code is ErrorCode.TEMPLATE_ERROR
    assert "MemoryError" not in failure.value.error.message


@pytest.mark.parametrize("source", EQUAL)
def test_all_else_renders_as_plain_jinja_does(source):
    plain = ImmutableSandboxedEnvironment(undefined=jinja2.Undefined, autoescape=False)
    source = source.replace("{{ nothing|default('d') }}", "")  # an unknown column is refused, elsewhere
    assert render(source, VALUES) == plain.from_string(source).render(**VALUES)


def test_a_row_does_not_pay_for_the_rows_before_it():
    template = PromptTemplate(
        f"{{% for i in range({MAX_WIDTH}) %}}{{% endfor %}}{{{{ x }}}}", pa.schema([("x", pa.string())]), "error"
    )
    assert [template.render({"x": ["a"]}, 0) for _ in range(20)] == ["a"] * 20


def test_a_template_that_is_nested_too_deeply_is_refused():
    for source in ("{{ " + "(" * 40_000 + "1" + ")" * 40_000 + " }}", "{% for i in x %}" * 60 + "{% endfor %}" * 60):
        with pytest.raises(InvalidSpecError, match="nested too deeply"):
            render(source, {"x": "hi"})


def test_the_sandbox_s_own_filters_are_no_template_s_business():
    with pytest.raises(InvalidSpecError, match="no filter named '_bi_counted'"):
        render("{{ x|_bi_counted(0) }}", {"x": "hi"})
