"""Chat templates that rows bring: what would fill or block a worker fails its row, all else is as transformers has it."""

import pytest

from batchinfer.chat_template import ChatTemplate
from batchinfer.dataset.template import check_chat_template
from batchinfer.engine.chat import ChatRenderer
from batchinfer.engine.truncation import encode_within
from batchinfer.errors import InvalidSpecError, RowFailure
from batchinfer.sampling_params import SamplingParams
from batchinfer.template_budget import MAX_WIDTH, budget
from batchinfer.types import ErrorCode, Request
from tests.engine.chat_templates import CLOCK, HERMES, LLAMA3, MISTRAL, WEATHER
from tests.small_model import tokenizer as small_tokenizer
from tests.unit.test_template_sandbox import EQUAL, TOO_MUCH, VALUES

USER = {"role": "user", "content": "Hello\n there "}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "<Paris> é"}}}
TURNS = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "", "reasoning": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "It is sunny "},
]
MORE = """{%- macro turn(m) -%}
  [{{ m.role | upper }}{% if m.reasoning_content is defined %} ({{ m.thinking }}){% endif %}]
{%- endmacro -%}
{% set ns = namespace(last=-1, texts=[]) %}
{% for m in messages[::-1] %}
    {% if m.role == 'system' %}{% continue %}{% endif %}
    {% set ns.last = [ns.last, loop.index0] | max %}
{% endfor %}
{{ bos_token }}{% for m in messages %}{{ turn(m) }}
    {% generation %}{% set inner = m.content %}{{ inner | trim }}{% endgeneration %}{{ inner }}{{ nothing }}
{% endfor %}{{ ns.last }}{{ tools | tojson(indent=2) if tools }}{{ documents is none }}
{{- {'b': 1, 'a': ['é', '<']} | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}
{{ strftime_now('%Y')[:2] }}{{ dict(a=1) }}{{ messages | map(attribute='role') | join(',') }}"""
OWN = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "more": MORE}


@pytest.fixture(scope="module")
def smol():
    return small_tokenizer()


def render(smol, template, turns=(USER,), **params):
    return ChatRenderer(smol).render(list(turns), SamplingParams(chat_template=template, **params))


def refused(smol, template, **params):
    with pytest.raises(RowFailure) as caught:
        render(smol, template, **params)
    return caught.value.error


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_would_fill_or_block_a_worker_fails_its_row(smol, name):
    error = refused(smol, TOO_MUCH[name], chat_template_kwargs={"x": "hi"})
    assert error.code is (ErrorCode.INVALID_MESSAGES if name == "translate" else ErrorCode.TEMPLATE_ERROR)
    assert "chat template" in error.message
    assert "MemoryError" not in error.message


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("name", OWN)
def test_a_template_renders_as_at_transformers(smol, name, continues):
    turns = TURNS if continues else TURNS[:-1]
    kwargs = {"enable_thinking": False, "x": [1, None]}
    expected = smol.apply_chat_template(
        turns, tools=[WEATHER, CLOCK], chat_template=OWN[name], tokenize=False, continue_final_message=continues,
        add_generation_prompt=not continues, **kwargs,
    )  # fmt: skip
    params = {"tools": [WEATHER, CLOCK], "chat_template_kwargs": kwargs, "continue_final_message": continues}
    assert render(smol, OWN[name], turns, **params) == expected
    assert "sunny" in expected


def test_the_models_own_template_brought_by_a_row_is_the_models_own(smol):
    assert render(smol, smol.chat_template, TURNS[:2]) == ChatRenderer(smol).render(TURNS[:2])


@pytest.mark.parametrize("source", EQUAL)
def test_what_templates_can_say_they_say_as_at_transformers(smol, source):
    expected = smol.apply_chat_template([USER], chat_template=source, tokenize=False, **VALUES)
    assert render(smol, source, chat_template_kwargs=VALUES) == expected


def test_a_row_does_not_pay_for_the_rows_before_it(smol):
    source = f"{{% for i in range({MAX_WIDTH}) %}}{{% endfor %}}a"
    assert [render(smol, source) for _ in range(20)] == ["a"] * 20


def test_looking_for_the_message_at_fault_is_part_of_the_rows_work(smol):
    """Each of the prefixes that are rendered for it would cost as much again."""
    source = (
        f"{{% for i in range({MAX_WIDTH}) %}}{{% endfor %}}"
        "{% if messages | length > 50 %}{{ raise_exception('too long') }}{% endif %}"
    )
    with pytest.raises(RowFailure) as caught:
        render(smol, source, [USER] * 60)
    assert caught.value.error.message == "the chat template refused the messages: too long"
    assert caught.value.error.code is ErrorCode.INVALID_MESSAGES
    assert budget.left < 0


def test_rendering_again_for_truncation_is_part_of_the_rows_work(smol):
    source = f"{{% for i in range({3 * MAX_WIDTH // 4}) %}}{{% endfor %}}" * 8 + "{{ messages }}"
    params = SamplingParams(chat_template=source, truncate="left")
    request = Request("0", params, messages=[USER] * 50)
    assert len(encode_within(ChatRenderer(smol), request, 10_000)[0]) > 500
    with pytest.raises(RowFailure) as caught:
        encode_within(ChatRenderer(smol), request, 100)
    assert caught.value.error.message == "the chat template: the template loops or computes too much for one row"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for m in messages %}", "line 1: Unexpected end of template"),
        ("\n{% include 'x' %}", "cannot include, import or extend another"),
        ("{{ " + "(" * 40_000 + "1" + ")" * 40_000 + " }}", "nested too deeply"),
        ("{% for i in messages %}" * 60 + "{% endfor %}" * 60, "nested too deeply"),
        ("{{ x|_bi_counted(0) }}", "no filter named '_bi_counted'"),
    ],
)
def test_wrong_syntax_is_refused_at_submit_and_in_a_row(smol, source, words):
    with pytest.raises(InvalidSpecError, match="chat_template, line 1: ") as failure:
        check_chat_template(source)
    assert words in str(failure.value)
    error = refused(smol, source)
    assert (error.code, words in error.message) == (ErrorCode.TEMPLATE_ERROR, True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set ns = namespace(__class__=1) %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ raise_exception('no') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{% generation %}{{ cycler.__init__.__globals__ }}{% endgeneration %}",
    ],
)
def test_nothing_leads_out_of_the_sandbox(smol, source):
    try:
        text = render(smol, source)
    except RowFailure as failure:
        assert failure.error.code is ErrorCode.INVALID_MESSAGES
    else:
        assert text == ""


def test_long_templates_and_forms_of_a_time_are_refused(smol):
    with pytest.raises(ValueError, match="at most 131072 characters"):
        SamplingParams(chat_template="a" * 131_073)
    assert refused(smol, "{{ strftime_now('%c' * 1000) }}").code is ErrorCode.TEMPLATE_ERROR


def test_a_template_goes_by_a_name_of_the_models(smol):
    class Several:
        chat_template = {"default": "d", "tool_use": "t {{ tools }}"}  # noqa: RUF012 -- a fake
        special_tokens_map: dict[str, str] = {}  # noqa: RUF012 -- as above

        def __len__(self):
            return 1

        def apply_chat_template(self, _turns, chat_template, **_options):
            return f"the model's {chat_template}"

    params = SamplingParams(chat_template="tool_use")
    assert ChatRenderer(Several()).render([USER], params) == "the model's tool_use"
    assert ChatRenderer(Several()).template_of(params) == "t {{ tools }}"


def test_what_is_no_json_has_no_methods_in_a_template():
    assert ChatTemplate("{{ messages[0].content }}{{ x }}").render([{"content": b"1"}], {"x": [object()]}) == (
        "<bytes>['<object>']"
    )
