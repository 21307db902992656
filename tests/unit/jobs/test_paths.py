"""Paths of a job mean the same on every machine that works on it."""

import pytest

from batchinfer.errors import ConflictError, InputError, InvalidSpecError, ModelError
from batchinfer.jobs.paths import check_output_is_free, default_output, is_uri, resolve_paths
from batchinfer.jobs.spec import JobSpec


def spec(**fields):
    return JobSpec(**{"inputs": ("s3://b/in.parquet",), "model": "org/name"} | fields)


def resolve(asked, base, *, must_exist=True):
    return resolve_paths(asked, base=base, job_id="job_1", must_exist=must_exist)


def test_relative_paths_start_where_the_person_is(tmp_path):
    (tmp_path / "in.parquet").touch()
    (tmp_path / "m.gguf").touch()
    found = resolve(spec(inputs=("in.parquet",), model="m.gguf", output="out/"), tmp_path)
    assert found.inputs == (f"{tmp_path}/in.parquet",)
    assert (found.model, found.output) == (f"{tmp_path}/m.gguf", f"{tmp_path}/out/")


def test_the_home_folder_may_be_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "in.parquet").touch()
    (tmp_path / "m.gguf").touch()
    found = resolve(spec(inputs=("~/in.parquet",), model="~/m.gguf"), tmp_path / "elsewhere")
    assert (found.inputs[0], found.model) == (f"{tmp_path}/in.parquet", f"{tmp_path}/m.gguf")


def test_uris_and_hub_ids_stay_as_they_are(tmp_path):
    asked = spec(output="gs://b/out")
    assert resolve(asked, tmp_path) == asked
    assert resolve(asked, None) == asked
    assert is_uri("s3://b/x")
    assert not is_uri("/a/s3://b")


@pytest.mark.parametrize("model", ["org/name", "name", "Qwen/Qwen3-0.6B", "a.b/c_d-e.1"])
def test_hub_ids(tmp_path, model):
    assert resolve(spec(model=model), tmp_path).model == model
    assert resolve(spec(model=model), None).model == model


@pytest.mark.parametrize("model", ["./m", "../m", "m.gguf", "a/b/c", "a/b.gguf", "/nowhere/m.gguf", "~/m", "a b", "-m"])
def test_a_model_that_is_neither_here_nor_a_hub_id(tmp_path, model):
    with pytest.raises(ModelError) as caught:
        resolve(spec(model=model), tmp_path)
    assert caught.value.param == "model"


def test_a_folder_that_is_here_wins_over_a_hub_id_of_the_same_name(tmp_path):
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve(spec(), tmp_path).model == f"{tmp_path}/org/name"


@pytest.mark.parametrize("field", ["inputs", "output"])
def test_a_servers_folder_means_nothing_to_its_clients(field):
    asked = spec(**{field: ("in.parquet",) if field == "inputs" else "out"})
    with pytest.raises(InvalidSpecError, match="relative") as caught:
        resolve(asked, None)
    assert caught.value.param == field


def test_inputs_must_be_there_only_where_the_workers_see_the_same_disk(tmp_path):
    asked = spec(inputs=(str(tmp_path / "no.parquet"),), model="/models/m.gguf")
    assert resolve(asked, None, must_exist=False).inputs == asked.inputs
    with pytest.raises(InputError, match="does not exist"):
        resolve(asked.model_copy(update={"model": "org/name"}), None)


@pytest.mark.parametrize(("pattern", "is_there"), [("*.parquet", True), ("**/c.parquet", True), ("d/*.parquet", True), ("x*", False), ("z/*", False)])  # fmt: skip
def test_a_glob_must_match_something(tmp_path, pattern, is_there):
    (tmp_path / "d").mkdir()
    (tmp_path / "a.parquet").touch()
    (tmp_path / "d" / "c.parquet").touch()
    asked = spec(inputs=(pattern,))
    if is_there:
        assert resolve(asked, tmp_path).inputs == (f"{tmp_path}/{pattern}",)
    else:
        with pytest.raises(InputError, match="matches no file"):
            resolve(asked, tmp_path)


def test_a_file_whose_name_looks_like_a_glob_is_a_file(tmp_path):
    (tmp_path / "a[1].parquet").touch()
    assert resolve(spec(inputs=("a[1].parquet",)), tmp_path).inputs == (f"{tmp_path}/a[1].parquet",)


@pytest.mark.parametrize(
    ("first_input", "output"),
    [
        ("/d/p.parquet", "/d/p.parquet.results/job_1"),
        ("/d/folder/", "/d/folder.results/job_1"),
        ("s3://b/prefix/", "s3://b/prefix.results/job_1"),
        ("/d/2026-*/x?.parquet", "/d.results/job_1"),
        ("s3://b/k/*.parquet", "s3://b/k.results/job_1"),
    ],
)
def test_default_outputs_lie_beside_the_first_input(first_input, output):
    assert default_output(first_input, "job_1") == output


def test_an_input_is_never_written_over(tmp_path):
    (tmp_path / "in.parquet").touch()
    with pytest.raises(InvalidSpecError, match="also an input"):
        resolve(spec(inputs=("in.parquet",), output="in.parquet"), tmp_path)


@pytest.mark.parametrize("field", ["model", "output", "inputs"])
def test_a_nul_is_in_no_path(tmp_path, field):
    text = "/a\0b"
    with pytest.raises(InvalidSpecError, match="NUL"):
        resolve(spec(**{field: (text,) if field == "inputs" else text}), tmp_path)


def test_an_output_that_holds_something_is_not_free(tmp_path):
    folder, file = tmp_path / "out", tmp_path / "out.parquet"
    check_output_is_free(str(folder))
    check_output_is_free(str(file))
    folder.mkdir()
    check_output_is_free(str(folder))
    (folder / "x").touch()
    file.touch()
    for path in (folder, file):
        with pytest.raises(ConflictError) as caught:
            check_output_is_free(str(path))
        assert caught.value.code == "output_exists"
