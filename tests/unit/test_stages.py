"""What a description of stages may say: each fault is refused before anything runs, with the stage and the way out."""

import json

import pyarrow as pa
import pytest

from batchinfer.cli.options import build_spec, given_fields
from batchinfer.dataset.staged_row import check_stages
from batchinfer.errors import InputError, InvalidSpecError
from batchinfer.jobs.planner import prompt_config, result_schema
from batchinfer.jobs.service import _check_stages
from batchinfer.jobs.spec import JobSpec, parse_spec
from batchinfer.jobs.stage_file import MAX_BYTES, read_stage_file

DRAFT = {"name": "draft", "prompt": "Write of {{ topic }}"}
KEEP = {"name": "keep", "filter": "draft.output | length > 20 and score > 0.5"}
JUDGE = {"name": "judge", "prompt": "Judge {{ draft.output }}", "guided_choice": ["yes", "no"]}
INPUT = pa.schema([("topic", pa.large_string()), ("score", pa.float64())])


def spec(*stages, **fields):
    return parse_spec({"inputs": ["x.parquet"], "model": "m", "stages": list(stages), **fields})


def compile_all(found, schema=INPUT):
    """What submit and planner do with a spec."""
    from batchinfer.dataset.stage_reader import row_reader

    _check_stages(found)
    reader = row_reader(prompt_config(found), schema)
    result_schema(found, schema)
    return reader


def test_a_good_description_becomes_columns():
    """Stages' columns in order, those of their parameters inside; the input's columns that they use."""
    found = spec(DRAFT, KEEP, {**JUDGE, "guided_choice": [], "json_schema": {"type": "object"}}, include_token_ids=True)
    reader = compile_all(found)
    assert reader.columns == ("topic", "score")
    schema = result_schema(found, INPUT).output_schema
    assert schema.names[-4:] == ["stopped_at", "draft", "keep", "judge"]
    assert schema.field("keep").type == pa.bool_()
    draft = [field.name for field in schema.field("draft").type]
    assert draft == ["output", "finish_reason", "error", "usage", "cost_usd", "list_cost_usd", "token_ids"]
    assert [field.name for field in schema.field("judge").type] == [*draft, "parsed"]
    again = json.loads(json.dumps(found.model_dump(mode="json", exclude_unset=True)))
    assert parse_spec(again) == found
    assert found.fingerprint() != spec(DRAFT, KEEP, include_token_ids=True).fingerprint()


def test_a_stages_parameters_lie_over_the_jobs():
    found = spec(
        DRAFT,
        {**JUDGE, "sampling": {"max_tokens": 3, "temperature": 0.5}},
        max_tokens=9,
        json_schema='{"type": "object"}',
    )
    draft, judge = (found.stage_params(stage) for stage in found.stages)
    assert (draft.max_tokens, draft.json_schema) == (9, '{"type":"object"}')
    assert (judge.max_tokens, judge.temperature, judge.guided_choice, judge.json_schema) == (
        3,
        0.5,
        ("yes", "no"),
        None,
    )
    assert found.max_answer_tokens == 12


def test_stages_draw_with_seeds_of_their_own():
    """Two stages with one prompt differ; a stage's seed is what a job's of its own would be."""
    a, b, own = spec(
        {**DRAFT, "name": "a"}, {**DRAFT, "name": "b"}, {**DRAFT, "name": "c", "sampling": {"seed": 7}}
    ).stages
    assert len({a.seed(None), b.seed(None), a.seed(1), b.seed(1)}) == 4
    assert a.seed(None) == a.seed(0)
    assert (own.seed(None), own.seed(5)) == (7, 7)


REFUSED = [
    ([{**DRAFT, "promt": "x"}], "stage 'draft': there is no key 'promt'; there are name, prompt, messages"),
    ([{"prompt": "x"}], "stage 1 has no name"),
    (["x"], "stage 1 is not a table"),
    ([{"name": "my stage", "prompt": "x"}], "'my stage' is no name"),
    ([{"name": "row", "prompt": "x"}], "stage 'row': name: 'row' means something else in templates"),
    ([{"name": "status", "prompt": "x"}], "stage 'status': results have a column of that name already"),
    ([{"name": "Output", "prompt": "x"}], "stage 'Output': results have a column of that name already"),
    ([DRAFT, {**JUDGE, "name": "Draft"}], "stage 'Draft': there is a stage of that name already"),
    ([{"name": "topic", "prompt": "x"}], "stage 'topic': the input has a column of that name"),
    ([{"name": "a"}], "stage 'a': a stage is a prompt, messages or a filter, and this one has none of them"),
    ([{**DRAFT, "filter": "true"}], "stage 'draft': a stage is a prompt, messages or a filter, and this one has prompt and"),
    ([DRAFT, {**KEEP, "sampling": {"max_tokens": 3}}], "stage 'keep': a filter asks no model"),
    ([{**DRAFT, "prompt": " "}], "stage 'draft': the prompt is empty"),
    ([{"name": "a", "messages": []}], "stage 'a': messages is empty"),
    ([{"name": "a", "messages": [{"role": "user", "contnt": "x"}]}], "stage 'a': "),
    ([DRAFT, {"name": "keep", "filter": "{{ score > 1 }}"}], "stage 'keep': a filter is an expression"),
    ([KEEP], "no stage has a prompt or messages"),
    ([{**DRAFT, "name": f"s{i}"} for i in range(17)], "there are 17 stages; at most 16"),
    ([DRAFT, {**JUDGE, "sampling": {"max_token": 3}}], "stage 'judge': sampling: there is no sampling parameter 'max_token'"),
    ([{**DRAFT, "sampling": {"temperature": -1}}], "stage 'draft': sampling: temperature: Input should be greater"),
    ([{**DRAFT, "sampling": {"seed": -1}}], "stage 'draft': sampling: seed: "),
    ([{**DRAFT, "sampling": {"adapter": "/etc"}}], "stage 'draft': sampling: a stage has no adapter of its own"),
    ([{**JUDGE, "prompt": "x", "sampling": {"guided_choice": ["a", "b"]}}], "stage 'judge': guided_choice stands in the stage and"),
    ([{**DRAFT, "json_schema": {"type": "nothing"}}], "stage 'draft': json_schema: "),
    ([{**DRAFT, "prompt": "{{ topic"}], "stage 'draft': template, line 1: "),
    ([{**DRAFT, "prompt": "{% include 'x' %}"}], "stage 'draft': a template cannot include"),
    ([{**DRAFT, "prompt": "{{ topic | nofilter }}"}], "stage 'draft': template, line 1: No filter named 'nofilter'"),
    ([DRAFT, {"name": "keep", "filter": "score >"}], "stage 'keep': template, line 1: "),
    ([DRAFT, {"name": "keep", "filter": "score > 1 score"}], "stage 'keep': template, line 1: more follows the end"),
    ([{**DRAFT, "prompt": "{{ tpic }}"}], "stage 'draft': the template uses 'tpic', but the input has no such column"),
    ([JUDGE, DRAFT], "stage 'judge': it uses the stage 'draft', which comes after it"),
    ([{**DRAFT, "prompt": "{{ draft.output }}"}], "stage 'draft': it uses itself"),
    ([DRAFT, {**JUDGE, "prompt": "{{ draft.outptu }}"}], "stage 'judge': it uses draft.outptu, but draft has output, finish"),
    ([DRAFT, {**JUDGE, "prompt": "{{ draft['parsed'] }}"}], "stage 'judge': it uses draft.parsed, but draft has output"),
    ([DRAFT, KEEP, {**JUDGE, "prompt": "{{ keep.output }}"}], "stage 'judge': it uses keep.output, but keep is a filter"),
]  # fmt: skip


@pytest.mark.parametrize(("stages", "words"), REFUSED, ids=range(len(REFUSED)))
def test_a_faulty_description_is_refused(stages, words):
    with pytest.raises((InvalidSpecError, InputError)) as caught:
        compile_all(spec(*stages))
    assert words in caught.value.message
    assert caught.value.param in ("stages", None)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_column": "topic"}, {"messages_column": "topic"}, {"template": "x"}, {"system": "x"},
        {"reuse_results": True}, {"sentinel": 0.5}, {"parsed": True}, {"include_columns": ["logprobs"]},
        {"task": "score"},
    ],
)  # fmt: skip
def test_what_goes_without_stages_is_refused(fields):
    with pytest.raises(InvalidSpecError, match="stages"):
        spec(DRAFT, **fields)


YAML = """
# a pipeline
stages:
  - name: draft
    prompt: |
      Write of {{ topic }}
    sampling: {max_tokens: 12, temperature: 0.7}
  - name: keep
    filter: draft.output | length > 20
  - name: judge
    messages:
      - {role: user, content: "Is this good? {{ draft.output }} 2024-01-01"}
    guided_choice: [yes, no, 2024-01-01]
"""


def test_a_yaml_file_is_read_and_its_surprises_are_not(tmp_path):
    """``no`` is a word and a date is a text: YAML 1.1 would make False and a date of them."""
    path = tmp_path / "pipeline.yaml"
    path.write_text(YAML)
    found = build_spec({"inputs": ("x.parquet",), "model": "m", "stages": str(path)})
    draft, keep, judge = found.stages
    assert (draft.prompt, draft.sampling) == ("Write of {{ topic }}\n", {"max_tokens": 12, "temperature": 0.7})
    assert (keep.filter, keep.generates) == ("draft.output | length > 20", False)
    assert found.stage_params(judge).guided_choice == ("yes", "no", "2024-01-01")
    assert json.loads(json.dumps(given_fields({"stages": str(path)})["stages"]))[0]["name"] == "draft"


def test_a_json_file_is_the_same(tmp_path):
    path = tmp_path / "pipeline.json"
    path.write_text(json.dumps({"stages": [DRAFT, KEEP, JUDGE]}))
    assert JobSpec(inputs="x", model="m", stages=read_stage_file(str(path))).stages == spec(DRAFT, KEEP, JUDGE).stages


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "stages is not a list"),
        ("stages: 3", "stages is not a list"),
        ("stage: []", "the one key stages, but this has stage"),
        ("stages: []\nmodel: m", "the one key stages"),
        ("stages: [", "line 1: "),
        ("a: &a [1]\nb: *a", "line 2: aliases are not read"),
        ("stages:\n - name: a\n   name: b\n   prompt: x", "has the key 'name' twice"),
        ('{"stages": [{"name": "a", "name": "b"}]}', "has the key 'name' twice"),
        ("stages: !!python/object:os.system x", "could not determine a constructor"),
        ("stages: [{name: a, prompt: x, sampling: {stop: !!binary YQ==}}]", "JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("- " * 50_000, "nested too deeply"),
        ("x" * (MAX_BYTES + 1), "longer than 256 KiB"),
        ("stages: [{name: a, filter: x}]", "no stage has a prompt"),
        ("stages: [{name: a, promtp: x}]", "stage 'a': there is no key 'promtp'"),
    ],
    ids=range(15),
)
def test_a_faulty_file_is_refused_with_its_name(tmp_path, text, words):
    path = tmp_path / "pipeline.yaml"
    path.write_text(text)
    with pytest.raises(InvalidSpecError) as caught:
        given_fields({"stages": str(path)})
    assert words in caught.value.message
    assert caught.value.message.startswith(f"--stages {path}: ")


def test_a_file_that_is_not_there_or_no_text(tmp_path):
    with pytest.raises(InvalidSpecError, match="No such file"):
        read_stage_file(str(tmp_path / "nothing.yaml"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidSpecError, match="not UTF-8"):
        read_stage_file(str(tmp_path / "binary"))


def test_check_stages_needs_no_input():
    """What can be told at submit is told then; columns are the planner's."""
    stages = spec(DRAFT, KEEP, JUDGE).stages
    check_stages(stages, {stage.name: () for stage in stages})
