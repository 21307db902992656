"""Structured output on the real model: what comes follows its schema, expression, choice or grammar, at any temperature.

Validity is judged by the jsonschema library, ``re`` and membership, never by the grammar library.
"""

import json
import re

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchinfer.engine.config import EngineConfig
from batchinfer.engine.engine import build_engine
from batchinfer.guided import Guide
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import ErrorCode, Request, RowStatus
from tests.engine.fakes import drain
from tests.engine.test_core import by_id

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "long tag"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS = [
    PERSON,
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
    {"anyOf": [{"type": "null"}, {"const": 3.5}, {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}]},
    {"oneOf": [
        {"type": "object", "properties": {"kind": {"const": "x"}, "n": {"type": "integer", "maximum": 99, "minimum": 1}},
         "required": ["kind", "n"], "additionalProperties": False},
        {"type": "object", "properties": {"kind": {"const": "y"}, "ok": {"type": "boolean"}},
         "required": ["kind", "ok"], "additionalProperties": False},
    ]},
    {"$defs": {"leaf": {"enum": ["é", '"quoted"', "日本"]}},
     "type": "object", "properties": {"l": {"$ref": "#/$defs/leaf"}, "r": {"$ref": "#/$defs/leaf"}},
     "required": ["r"], "additionalProperties": False},
]  # fmt: skip
HOT = {"temperature": 3.0, "max_tokens": 200}


@pytest.fixture(scope="module")
def engine(loaded):
    return build_engine(loaded, EngineConfig(model="real", max_model_len=1024, num_kv_blocks=300, max_num_seqs=16))


def run(engine, requests):
    for request in requests:
        engine.add_request(request)
    done = by_id(drain(engine))
    assert engine.stats().used_blocks == 0
    return done


def ask(name, prompt, **params):
    return Request(name, SamplingParams(**params), prompt_token_ids=prompt)


@pytest.mark.real_model
def test_hot_answers_follow_their_schemas(engine, prompts):
    requests = [
        ask(f"{k}:{seed}", prompts[seed], json_schema=schema, seed=seed, **HOT)
        for k, schema in enumerate(SCHEMAS)
        for seed in range(6)
    ]
    done = run(engine, requests)
    for k, schema in enumerate(SCHEMAS):
        for seed in range(6):
            completion = done[f"{k}:{seed}"]
            assert completion.status is RowStatus.SUCCEEDED, completion.error
            value = json.loads(completion.text)
            jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
            assert json.loads(completion.extra["parsed"]) == value
            assert completion.extra["parsed"] == re.sub(r"(?<=[,:]) ", "", completion.text) or " " in str(value)
            assert not re.search(r"\s\s", completion.text) or "  " in str(value)
    assert len({done[f"0:{seed}"].text for seed in range(6)}) == 6


@pytest.mark.real_model
def test_expressions_choices_and_grammars(engine, prompts):
    regexes = [r"\d{3}-[a-f]+!{1,3}", r"(yes|no), (?:[A-Z][a-z]{1,5} ?){1,3}", r"[^a-z/]{4}/[A-Z_]"]
    choices = ["red", "red wine", "blau", '\n"x"\\n', "日本", " é"]
    lark = 'start: "(" start ")" | /[0-9]/'
    gbnf = 'root ::= item ("," item)*\nitem ::= "a" | "b"'
    common = {"temperature": 2.0, "max_tokens": 60}
    requests = [
        *(
            ask(f"r{i}:{s}", prompts[s], guided_regex=r, seed=s, **common)
            for i, r in enumerate(regexes)
            for s in range(4)
        ),
        *(ask(f"c:{s}", prompts[s], guided_choice=choices, seed=s, **common) for s in range(12)),
        *(ask(f"l:{s}", prompts[s], guided_grammar=lark, seed=s, **common) for s in range(3)),
        *(ask(f"g:{s}", prompts[s], guided_grammar=gbnf, seed=s, **common) for s in range(3)),
    ]
    done = run(engine, requests)
    for name, completion in done.items():
        assert completion.status is RowStatus.SUCCEEDED, (name, completion.error)
        assert "parsed" not in completion.extra
        if completion.finish_reason == "length":
            assert completion.warnings == ("guide_incomplete",) or name[0] in "rg"
            continue
        if name[0] == "r":
            assert re.fullmatch(regexes[int(name[1])], completion.text), (name, completion.text)
        elif name[0] == "c":
            assert completion.text in choices
        elif name[0] == "l":
            assert re.fullmatch(r"\(*[0-9]\)*", completion.text)
            assert completion.text.count("(") == completion.text.count(")")
        else:
            assert re.fullmatch("[ab](,[ab])*", completion.text)
    assert sum(c.finish_reason == "stop" for c in done.values()) > len(done) / 2


@pytest.mark.real_model
def test_neighbours_give_the_same_bytes_and_so_do_guided_rows(engine, prompts):
    """Plain rows beside guided ones, and guided ones beside others: all as alone."""
    plain = [ask(f"p{i}", prompts[i], max_tokens=12, temperature=0.9 * (i % 2), seed=i) for i in range(6)]
    guided = [ask(f"g{i}", prompts[i], json_schema=SCHEMAS[i], seed=i, **HOT) for i in range(5)]
    together = run(engine, [*plain, *guided])
    for request in [*plain, *guided]:
        alone = run(engine, [request])[request.request_id]
        beside = together[request.request_id]
        assert (alone.text, alone.token_ids, alone.finish_reason) == (
            beside.text,
            beside.token_ids,
            beside.finish_reason,
        )


@pytest.mark.real_model
def test_forced_tokens_are_not_sampled_and_change_nothing(engine, prompts):
    """A row with log-probabilities samples every token: it must come to the same ones."""
    before = engine.stats()
    requests = [ask(f"j{i}", prompts[i], json_schema=PERSON, seed=i, **HOT) for i in range(6)]
    jumping = run(engine, requests)
    after = engine.stats()
    forced = after.forced_tokens - before.forced_tokens
    generated = sum(len(c.token_ids) for c in jumping.values())
    assert after.completion_tokens - before.completion_tokens == generated
    assert 6 * 8 <= forced < generated
    sampled = run(engine, [ask(f"s{i}", prompts[i], json_schema=PERSON, seed=i, logprobs=0, **HOT) for i in range(6)])
    assert engine.stats().forced_tokens == after.forced_tokens
    for i in range(6):
        assert sampled[f"s{i}"].token_ids == jumping[f"j{i}"].token_ids
        assert len(sampled[f"s{i}"].extra["logprobs"]) == len(sampled[f"s{i}"].token_ids)


@pytest.mark.real_model
def test_forced_text_has_the_tokenizers_own_tokens(engine, loaded, prompts):
    schema = {"const": {"first name": "Ada", "second": ["x", 10.5], "日本": None}}
    done = run(engine, [ask("a", prompts[0], json_schema=schema, max_tokens=60)])["a"]
    text = json.dumps(schema["const"], ensure_ascii=False)
    assert done.text == text
    assert list(done.token_ids) == loaded.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.real_model
def test_small_pools_and_chunks_change_nothing(loaded, prompts, engine):
    """Evictions, a cache that is off, steps of a few tokens: the same answers."""
    requests = [ask(f"{i}", prompts[i][:8], json_schema=PERSON, seed=i, **HOT) for i in range(12)]
    expected = run(engine, requests)
    small = EngineConfig(
        model="real", max_model_len=512, num_kv_blocks=6, max_num_batched_tokens=24, max_num_seqs=8,
        enable_prefix_caching=False,
    )  # fmt: skip
    tight = build_engine(loaded, small)
    tight._scheduler.estimate_remaining = tight._scheduler.waiting._estimate_remaining = lambda _: 1
    for name, completion in run(tight, requests).items():
        assert (completion.text, completion.token_ids) == (expected[name].text, expected[name].token_ids)
        assert completion.usage.cached_tokens == 0
    assert tight.stats().preemptions > 0


@pytest.mark.real_model
def test_samples_penalties_and_least_tokens(engine, prompts):
    done = run(engine, [
        ask("n", prompts[1], json_schema=PERSON, n=3, seed=5, repetition_penalty=1.3, presence_penalty=0.5, **HOT),
        ask("best", prompts[1], json_schema=PERSON, n=1, best_of=3, seed=5, **HOT),
        ask("least", prompts[2], guided_regex="a+", min_tokens=5, max_tokens=9),
        ask("most", prompts[2], guided_choice=["one"], min_tokens=9, max_tokens=9, ignore_eos=True),
        ask("stop", prompts[2], guided_regex="x{3}y.*", stop="xy", max_tokens=9),
    ])  # fmt: skip
    for sample in done["n"].extra["samples"]:
        jsonschema.validate(json.loads(sample["output"]), PERSON)
    assert len({sample["output"] for sample in done["n"].extra["samples"]}) == 3
    jsonschema.validate(json.loads(done["best"].extra["parsed"]), PERSON)
    assert len(done["least"].token_ids) >= 5
    assert re.fullmatch("a+", done["least"].text)
    assert (done["most"].text, done["most"].finish_reason) == ("one", "stop")
    assert done["stop"].text == "xx"


@pytest.mark.real_model
def test_json_that_is_cut_off_is_an_error_and_may_get_twice_the_tokens(engine, prompts):
    long = {"type": "array", "items": {"enum": [1]}, "minItems": 20, "maxItems": 20}
    done = run(engine, [
        ask("cut", prompts[0], json_schema=long, max_tokens=40),
        ask("again", prompts[0], json_schema=long, max_tokens=40, retry_truncated=True),
        ask("whole", prompts[0], json_schema=long, max_tokens=80),
        ask("hopeless", prompts[0], json_schema=long, max_tokens=7, retry_truncated=True),
        ask("stopped", prompts[0], json_schema=long, stop="1, 1, 1"),
        ask("free", prompts[0], max_tokens=3, retry_truncated=True),
    ])  # fmt: skip
    for name, cause in (("cut", "max_tokens (40)"), ("hopeless", "max_tokens (14)"), ("stopped", "a stop string")):
        assert done[name].status is RowStatus.ERRORED
        assert done[name].error.code is ErrorCode.TRUNCATED_JSON
        assert done[name].error.message.startswith(f"{cause}")
    assert done["cut"].usage.completion_tokens == 40
    assert done["cut"].device_ns > 0
    assert done["hopeless"].usage.completion_tokens == 14
    assert done["again"].warnings == ("retried_truncated:80",)
    assert done["again"].token_ids == done["whole"].token_ids
    assert done["whole"].warnings == ()
    assert json.loads(done["again"].text) == [1] * 20
    assert done["free"].finish_reason == "length"


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"json_schema": {"type": "nothing"}}, "json_schema: Invalid type: nothing"),
        ({"json_schema": {"type": "string", "minLength": 5, "maxLength": 2}}, "minLength (5) is greater than maxLength (2)"),
        ({"json_schema": {"not": {}}}, 'Unimplemented keys: ["not"]'),
        ({"guided_regex": "a(?=b)"}, "look-around"),
        ({"guided_regex": r"[^\s\S]"}, "guided_regex: nothing matches it"),
        ({"guided_grammar": "start: thing"}, 'unknown name: "thing"'),
    ],
)  # fmt: skip
def test_an_impossible_guide_is_an_error_row_alone(engine, prompts, params, words):
    done = run(engine, [ask("bad", prompts[0], **params), ask("good", prompts[0], max_tokens=2)])
    assert done["bad"].error.code is ErrorCode.INVALID_SCHEMA
    assert words in done["bad"].error.message
    assert done["good"].status is RowStatus.SUCCEEDED
    # the same without a model, as at submit
    guide = SamplingParams(**params).guide
    assert guide is not None
    assert guide.fault() is not None


@pytest.mark.real_model
def test_rules_that_leave_no_token_end_their_row(engine, prompts):
    done = run(engine, [ask("a", prompts[0], guided_choice=["yes", "no"], allowed_token_ids=[5], max_tokens=4)])
    assert done["a"].error.code is ErrorCode.ENGINE_ERROR


ALPHABET = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@example(["\x7f", "a\x85b", "\x00", "\u2028"])
@given(choices=st.lists(ALPHABET, min_size=1, max_size=5))
def test_any_texts_may_be_choices(choices):
    assert Guide("guided_choice", json.dumps(choices, ensure_ascii=False)).fault() is None
