"""Prompts and messages become token ids: the template applied once, bad rows named with the message at fault."""

import json

import pytest
from tokenizers import Tokenizer, processors
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from batchinfer.engine.chat import ChatRenderer
from batchinfer.engine.messages import normalize_messages
from batchinfer.errors import RowFailure
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import ErrorCode, Request
from tests.small_model import tokenizer as small_tokenizer

ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    " {{ m['role'] }} {{ m['content'] }}{% endfor %}{% if add_generation_prompt %} assistant{% endif %}"
)


@pytest.fixture(scope="module")
def smol():
    return small_tokenizer()


@pytest.fixture(scope="module")
def renderer(smol):
    return ChatRenderer(smol)


def with_bos(template=ALTERNATING) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words that puts BOS before every text, as Llama's and Gemma's do."""
    words = ["[BOS]", "[UNK]", "user", "assistant", "system", "hello", "there", "friend"]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    backend.add_special_tokens(["[BOS]"])
    backend.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="[BOS]", unk_token="[UNK]")
    tokenizer.chat_template = template
    return tokenizer


def failure(call, *args) -> tuple[ErrorCode, str]:
    with pytest.raises(RowFailure) as caught:
        call(*args)
    return caught.value.error.code, caught.value.error.message


def user(content) -> dict:
    return {"role": "user", "content": content}


def test_messages_give_the_tokens_of_transformers_own_chat_path(smol, renderer):
    messages = [
        {"role": "system", "content": "Be brief."},
        user("Héllo 🦜"),
        {"role": "assistant", "content": "Hi"},
        user("?"),
    ]
    expected = smol.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)["input_ids"]
    assert renderer.encode_messages(messages) == expected


def test_a_template_with_bos_gives_one_bos():
    tokenizer = with_bos()
    assert tokenizer.encode("hello") == [0, 5], "this tokenizer adds BOS by itself"
    assert ChatRenderer(tokenizer).encode_messages([user("hello there")]) == [0, 2, 5, 6, 3]


def test_a_plain_prompt_gets_one_bos_also_when_it_has_one():
    renderer = ChatRenderer(with_bos())
    assert renderer.encode_prompt("hello there") == [0, 5, 6]
    assert renderer.encode_prompt("[BOS]hello there") == [0, 5, 6]


def test_a_plain_prompt_is_not_put_into_a_template(smol, renderer):
    assert renderer.encode_prompt("The capital of France is") == smol.encode("The capital of France is")


def test_content_as_parts_beside_content_as_text(renderer):
    """One column may hold both; a text part says what the text would."""
    as_text = renderer.encode_messages([user("one\ntwo")])
    assert (
        renderer.encode_messages([user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])]) == as_text
    )
    assert renderer.encode_messages([user(["one", {"type": "input_text", "text": "two"}])]) == as_text


def test_null_fields_of_a_struct_column_are_as_if_absent(renderer):
    """Arrow fills every field of a struct: a null ``name`` must not reach the template."""
    seen = with_bos("{{ messages[0].keys() | list | join(' ') }}")
    assert ChatRenderer(seen).render([{**user("hello"), "name": None, "tool_calls": None}]) == "role content"
    assert renderer.encode_messages([{**user("x"), "name": None}]) == renderer.encode_messages([user("x")])


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages is empty"),
        ("hello", "messages is a text"),
        (None, "messages is null"),
        ([user("a"), "b"], "messages[1] is a text"),
        ([{"content": "a"}], "messages[0].role is null"),
        ([{"role": 3, "content": "a"}], "messages[0].role is a number"),
        ([{"role": "", "content": "a"}], "messages[0].role is an empty text"),
        ([user("a"), user(None)], "messages[1].content is missing or null"),
        ([user("a"), {"role": "user"}], "messages[1].content is missing or null"),
        ([user(7)], "messages[0].content is a number"),
        ([user({"type": "text"})], "messages[0].content is an object"),
        ([user([])], "messages[0].content is an empty list"),
        ([user([{"type": "image_url", "image_url": {}}])], "messages[0].content[0] has type 'image_url'"),
        ([user([{"type": "text", "text": None}])], "messages[0].content[0].text is null"),
        ([user([5])], "messages[0].content[0] is a number"),
    ],
)
def test_misshapen_messages_are_refused_with_their_place(renderer, messages, where):
    code, message = failure(renderer.encode_messages, messages)
    assert code is ErrorCode.INVALID_MESSAGES
    assert message.startswith(where)


def test_a_call_of_a_tool_needs_no_content():
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert normalize_messages([call]) == [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]


def test_normalizing_leaves_the_callers_messages_alone():
    messages = [user([{"type": "text", "text": "a"}])]
    before = json.dumps(messages)
    normalize_messages(messages)
    assert json.dumps(messages) == before


def test_two_user_turns_in_a_row_are_refused_where_the_template_forbids_them():
    renderer = ChatRenderer(with_bos())
    good = [user("hello"), {"role": "assistant", "content": "there"}]
    code, message = failure(renderer.encode_messages, [*good, user("hello"), user("friend")])
    assert code is ErrorCode.INVALID_MESSAGES
    assert message.startswith("messages[3]: ")
    assert "roles must alternate" in message


def test_a_failure_that_no_single_message_brings_names_none():
    """The template fails on every prefix for another reason: no message is blamed wrongly."""
    template = "{{ raise_exception(messages | length | string) }}"
    _, message = failure(ChatRenderer(with_bos(template)).encode_messages, [user("a"), user("b")])
    assert message == "the model's chat template refused the messages: 2"


def test_a_template_may_not_reach_out_of_its_sandbox():
    template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    code, _ = failure(ChatRenderer(with_bos(template)).encode_messages, [user("a")])
    assert code is ErrorCode.INVALID_MESSAGES


def test_without_a_chat_template_messages_are_an_error_row():
    code, message = failure(ChatRenderer(with_bos(None)).encode_messages, [user("a")])
    assert code is ErrorCode.TEMPLATE_ERROR
    assert "no chat template" in message


@pytest.mark.parametrize("prompt", ["", "   ", "\n\t\u00a0"])
def test_empty_prompts(renderer, prompt):
    assert failure(renderer.encode_prompt, prompt)[0] is ErrorCode.EMPTY_PROMPT


def test_a_lone_surrogate_is_an_encoding_error_and_nul_is_text(smol, renderer):
    code, message = failure(renderer.encode_prompt, "ab\ud83dcd")
    assert code is ErrorCode.INVALID_ENCODING
    assert "character 2" in message
    assert failure(renderer.encode_messages, [user("\ud83d")])[0] is ErrorCode.INVALID_ENCODING
    assert smol.decode(renderer.encode_prompt("a\0b")) == "a\0b"


def test_token_ids_are_checked_against_the_vocabulary(smol):
    renderer = ChatRenderer(smol, vocab_size=1000)

    def encode(ids):
        return renderer.encode(Request("0", prompt_token_ids=ids))

    assert encode([0, 999]) == [0, 999]
    assert failure(encode, [])[0] is ErrorCode.EMPTY_PROMPT
    assert failure(encode, [5, 1000]) == (
        ErrorCode.INVALID_PARAMS,
        "prompt_token_ids[1] is 1000; the vocabulary has 1000",
    )
    assert failure(encode, [-1])[0] is ErrorCode.INVALID_PARAMS
    assert failure(renderer.encode_prompt, "Hello")[0] is ErrorCode.INVALID_PARAMS, "the tokenizer may know more"


def test_each_form_of_a_request_goes_its_way(renderer):
    params = SamplingParams()
    assert renderer.encode(Request("0", params, prompt="Hi")) == renderer.encode_prompt("Hi")
    assert renderer.encode(Request("0", params, messages=[user("Hi")])) == renderer.encode_messages([user("Hi")])
    assert renderer.encode(Request("0", params, prompt_token_ids=[7, 8])) == [7, 8]
    assert failure(renderer.encode, Request("0", params, messages=[]))[0] is ErrorCode.INVALID_MESSAGES


def test_a_final_message_is_continued_where_it_ends(smol, renderer):
    """Equal to transformers' own continuation; a last message that is not the assistant's is named."""
    params = SamplingParams(continue_final_message=True)
    turns = [user("The capital of France?"), {"role": "assistant", "content": "The capital is"}]
    found = renderer.encode(Request("a", params, messages=turns))
    text = smol.decode(found)
    assert text == smol.apply_chat_template(turns, tokenize=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nThe capital is")
    with pytest.raises(RowFailure) as failure:
        renderer.encode(Request("a", params, messages=turns[:1]))
    assert failure.value.error.code is ErrorCode.INVALID_MESSAGES
    assert failure.value.error.message.startswith("messages[0]: continue_final_message needs")


def test_developer_is_the_system_where_the_template_has_no_developer(renderer):
    turns = [{"role": "developer", "content": "Be brief."}, user("Hi")]
    assert renderer.render(turns) == renderer.render([turns[0] | {"role": "system"}, turns[1]])
    own = SamplingParams(chat_template="{% for m in messages %}{{ m.role }} {% endfor %}{# developer #}")
    assert renderer.render(turns, own) == "developer user "


def test_a_role_that_nobody_knows_is_named(renderer):
    code, message = failure(renderer.encode_messages, [user("a"), {"role": "asistant", "content": "b"}])
    assert code is ErrorCode.INVALID_MESSAGES
    assert message.startswith("messages[1].role is 'asistant'")
    own = SamplingParams(chat_template="{% for m in messages %}{{ m.role == 'critic' }} {% endfor %}")
    assert renderer.render([{"role": "critic", "content": "b"}], own) == "True "


def test_names_and_template_variables_reach_the_template(smol, renderer):
    template = "{% for m in messages %}{{ m.name }}: {{ m.content }}{% endfor %}{{ mood }}"
    turns = [{**user("Hi"), "name": "Ada"}]
    params = SamplingParams(chat_template=template, chat_template_kwargs={"mood": [1, "é"]})
    expected = smol.apply_chat_template(turns, chat_template=template, tokenize=False, mood=[1, "é"])
    assert renderer.render(turns, params) == expected == "Ada: Hi[1, 'é']"
    assert failure(renderer.encode_messages, [{**user("Hi"), "name": 3}])[1].startswith("messages[0].name is a number")


def test_a_jobs_template_runs_in_the_sandbox(renderer):
    params = SamplingParams(chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
    code, message = failure(lambda: renderer.encode_messages([user("a")], params))
    assert code is ErrorCode.INVALID_MESSAGES
    assert "the chat template refused" in message
