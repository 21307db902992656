"""The public JSON Schema test suite: no instance that a schema forbids can be generated, and nearly all others can."""

import json
from pathlib import Path

import pytest

from batchinfer.engine.guided import GrammarCompiler
from batchinfer.errors import RowFailure
from batchinfer.guided import Guide
from batchinfer.types import ErrorCode
from tests.small_model import tokenizer

SUITE = Path(__file__).parent / "json_schema_suite"
FILES = sorted(path.stem for path in SUITE.glob("*.json"))
MOSTLY_REFUSED = {"if-then-else", "not", "uniqueItems", "oneOf", "patternProperties", "boolean_schema", "allOf"}
"""Files of keywords that the grammar library does not, or not always, understand."""
NARROWER = {"const", "enum", "allOf", "type"}
"""Numbers are written in one way (1, not 1.0), and properties come in the order of the schema."""


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(tokenizer(), 49152, {0, 2})


def spells(answer, text):
    """Whether a text is a whole answer, token after token through the masks that the engine would see."""
    for token in tokenizer().encode(text, add_special_tokens=False):
        mask = answer.mask()
        if not int(mask[token // 32]) >> (token % 32) & 1:
            return False
        answer.accept(token)
    return answer.is_complete


@pytest.mark.real_model
@pytest.mark.parametrize("name", FILES)
def test_a_schema_is_kept_or_refused(name, compiler):
    taken = refused = 0
    for group in json.loads((SUITE / f"{name}.json").read_text()):
        guide = Guide("json_schema", json.dumps(group["schema"]))
        try:
            compiler.start(guide, jumps=True)
        except RowFailure as failure:
            assert failure.error.code is ErrorCode.INVALID_SCHEMA
            assert guide.fault() is not None
            refused += 1
            continue
        assert guide.fault() is None
        taken += 1
        for case in group["tests"]:
            text = json.dumps(case["data"], ensure_ascii=False)
            accepted = spells(compiler.start(guide, jumps=True), text)
            if not case["valid"]:
                assert not accepted, (group["description"], case["description"])
            elif name not in NARROWER:
                assert accepted, (group["description"], case["description"])
    assert taken or name in MOSTLY_REFUSED
    assert not refused or name in MOSTLY_REFUSED | {
        "additionalProperties", "anyOf", "maxItems", "maxLength", "maxProperties", "minItems", "minLength",
        "minProperties", "multipleOf",
    }  # fmt: skip


@pytest.mark.real_model
def test_grammars_are_kept_within_bounds():
    """The least recently used goes; a refused one is remembered, too."""
    compiler = GrammarCompiler(tokenizer(), 49152, {0, 2}, max_bytes=3 * 140_000)
    guides = [Guide("guided_regex", f"[0-9]{{{n}}}") for n in range(1, 5)]
    for guide in (guides[0], guides[1], guides[2], guides[0], guides[3]):
        compiler.start(guide, jumps=True)
    assert list(compiler._compiled) == [guides[2], guides[0], guides[3]]
    for _ in range(2):
        with pytest.raises(RowFailure, match="look-around"):
            compiler.start(Guide("guided_regex", "a(?=b)"), jumps=True)
    assert len(compiler._compiled) == 3


@pytest.mark.real_model
def test_one_rows_answer_does_not_move_anothers(compiler):
    guide = Guide("guided_regex", "ab|cd")
    first, second = compiler.start(guide, jumps=True), compiler.start(guide, jumps=True)
    assert spells(first, "ab")
    assert spells(second, "cd")
