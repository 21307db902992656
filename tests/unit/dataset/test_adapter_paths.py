"""Which adapter a row means: its column, the job's, a name in a folder; and where adapters may lie."""

import pyarrow as pa
import pytest

from batchinfer.dataset.prompt import PromptConfig, RowReader
from batchinfer.dataset.roots import Roots
from batchinfer.errors import InvalidSpecError, ModelError
from batchinfer.jobs.paths import resolve_paths
from batchinfer.jobs.spec import JobSpec, parse_spec
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import ErrorCode
from tests.adapter_folder import make_adapter


def read(adapters, **config):
    batch = pa.record_batch({"prompt": ["p"] * len(adapters), "adapter": pa.array(adapters, pa.string())})
    reader = RowReader(PromptConfig(**config), batch.schema)
    return [row.request.params.adapter if row.request else row.error for row in reader.read(batch, 0)]


def test_a_row_overrides_the_job_and_an_empty_text_is_the_model_alone():
    params = SamplingParams(adapter="/job")
    assert read([None, "/own", ""], params=params) == ["/job", "/own", None]
    assert read([None, "", "/own"]) == [None, None, "/own"]


def test_names_are_looked_up_in_the_folder():
    assert read(["french", "a/b", "/abs"], adapter_folder="/adapters/") == ["/adapters/french", "/adapters/a/b", "/abs"]


@pytest.mark.parametrize(("name", "folder", "said"), [
    ("french", None, "--adapter-folder"),
    ("../secret", "/adapters", "has no '..'"),
    ("a/../../secret", "/adapters", "has no '..'"),
    ("s3://bucket/adapter", "/adapters", "local folder"),
    ("/a\0b", "/adapters", "local folder"),
])  # fmt: skip
def test_a_name_that_leads_nowhere_is_an_error_row(name, folder, said):
    error, other = read([name, "/fine"], adapter_folder=folder)
    assert error.code is ErrorCode.ADAPTER_NOT_FOUND
    assert said in error.message
    assert other == "/fine"


def test_adapters_lie_where_models_may(tmp_path):
    """Links are followed; a row that leaves the tenant's folders is an error row."""
    for name in ("mine", "theirs"):
        (tmp_path / name / "a").mkdir(parents=True)
    (tmp_path / "mine" / "link").symlink_to(tmp_path / "theirs" / "a")
    roots = Roots((), (), (str(tmp_path / "mine"),))
    asked = [f"{tmp_path}/mine/a", f"{tmp_path}/theirs/a", f"{tmp_path}/mine/link", f"{tmp_path}/mine/../theirs/a", "a"]
    found = read(asked, roots=roots, adapter_folder=f"{tmp_path}/mine")
    assert [found[0], found[4]] == [f"{tmp_path}/mine/a"] * 2
    assert {error.code for error in found[1:4]} == {ErrorCode.ADAPTER_NOT_FOUND}
    assert "outside of what this tenant may use" in found[1].message


def spec(**fields):
    return JobSpec(**{"inputs": ("s3://b/in.parquet",), "model": "org/name"} | fields)


def resolve(asked, base, *, must_exist=True):
    return resolve_paths(asked, base=base, job_id="job_1", must_exist=must_exist)


def test_a_jobs_adapter_is_checked_at_submit(tmp_path):
    make_adapter(tmp_path / "good")
    found = resolve(spec(adapter="good", adapter_folder="."), tmp_path)
    assert (found.adapter, found.adapter_folder) == (f"{tmp_path}/good", str(tmp_path))
    with pytest.raises(ModelError, match="there is no adapter") as missing:
        resolve(spec(adapter="gone"), tmp_path)
    assert (missing.value.param, missing.value.code) == ("adapter", "adapter_not_found")
    make_adapter(tmp_path / "dora", use_dora=True)
    with pytest.raises(ModelError, match="DoRA") as unfit:
        resolve(spec(adapter="dora"), tmp_path)
    assert unfit.value.code == "invalid_adapter"
    assert resolve(spec(adapter="/gone"), tmp_path, must_exist=False).adapter == "/gone"
    with pytest.raises(ModelError, match="no folder"):
        resolve(spec(adapter_folder="gone"), tmp_path)


@pytest.mark.parametrize("name", ["adapter", "adapter_folder"])
def test_adapters_are_local_folders(tmp_path, name):
    with pytest.raises(InvalidSpecError, match="no local folder"):
        resolve(spec(**{name: "s3://b/adapter"}), tmp_path)
    with pytest.raises(InvalidSpecError, match="relative path"):
        resolve(spec(**{name: "adapter"}), None)


def test_the_sentinel_has_no_adapters():
    with pytest.raises(InvalidSpecError, match="sentinel goes without adapter"):
        parse_spec({"inputs": ["a.parquet"], "model": "m", "sentinel": 0.1, "adapter": "/a"})
