"""Attempts to read or write outside of a tenant's roots, at submit and where workers open files."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.dataset.roots import Roots, is_below
from batchinfer.errors import InputError
from batchinfer.jobs.caller import Caller, Role
from batchinfer.jobs.installed_roots import InstalledRoots
from batchinfer.jobs.service import JobService
from batchinfer.jobs.spec import JobSpec
from batchinfer.jobs.status import JobState
from batchinfer.settings import Settings
from batchinfer_workers.planning import run_planning
from batchinfer_workers.shard_files import ShardFiles
from tests.adapter_folder import make_adapter
from tests.played import WORKER, lease


@pytest.fixture
def house(tmp_path):
    """A folder for the tenant red, and one beside it that is none of red's business."""
    for name in ("red/in", "red/out", "other"):
        (tmp_path / name).mkdir(parents=True)
    for path in ("red/in/a.parquet", "other/secret.parquet"):
        pq.write_table(pa.table({"prompt": ["hello"]}), tmp_path / path)
    return tmp_path


@pytest.fixture
def service(house, sqlite_url):
    roots = InstalledRoots(own=str(house / "files"))
    made = JobService.connect(sqlite_url, "memory://", roots=roots)
    made.tenants.add(
        Caller.operator(), "red",
        input_roots=[str(house / "red"), "s3://data/red"], output_roots=[str(house / "red/out"), "s3://data/red/out"],
    )  # fmt: skip
    yield made.acting_for(Caller("red", Role.SUBMITTER, "somekey"))
    made.close()


def submit(service, house, **fields):
    values = {"inputs": [str(house / "red/in/a.parquet")], "model": "org/name", "output": str(house / "red/out/o")}
    return service.submit(JobSpec(**values | fields), base=None)[0]


def test_inside_of_the_roots_all_is_well(service, house):
    for number, path in enumerate(("red/in/a.parquet", "red/in", "red/in/*.parquet")):
        submit(service, house, inputs=[str(house / path)], output=str(house / f"red/out/{number}"))
    submit(service, house, inputs=["file://" + str(house / "red/in/a.parquet")])
    submit(service, house, inputs=["s3://data/red/x/*.parquet", "S3://data/red"], output="s3://data/red/out/1")


@pytest.mark.parametrize(
    "path",
    [
        "{house}/other/secret.parquet", "file://{house}/other/secret.parquet", "FILE://{house}/other/secret.parquet",
        "{house}/red/../other/secret.parquet", "{house}/red/in/../../other/*.parquet", "/etc/passwd", "file:///etc/passwd",
        "/proc/self/environ", "{house}/redder/a.parquet", "{house}/*/secret.parquet", "{house}/r*d/../other/secret.parquet",
        "s3://data/redder/x", "s3://data/red/../blue/x", "s3://data", "s3://data/re*", "s3://other/red/x", "s3://*/red",
        "gs://data/red/x", "s3://data@evil/red/x", "http://169.254.169.254/x.parquet", "hdfs://host/x", "//etc/passwd",
        "{house}/files/uploads/file-1",
    ],
)  # fmt: skip
def test_paths_outside_are_refused_at_submit(service, house, path):
    path = path.format(house=house)
    with pytest.raises(InputError) as caught:
        submit(service, house, inputs=[path])
    assert (caught.value.param, caught.value.code) in (("inputs", "path_not_allowed"), ("inputs", "invalid_input"))
    if not path.startswith(f"{house}/redder"):
        with pytest.raises(InputError):
            submit(service, house, output=path)
    assert service.list_jobs().data == []


@pytest.mark.parametrize("output", ["red/in/o", "other/o", "red/out/../../other/o", "red/outer"])
def test_outputs_have_roots_of_their_own(service, house, output):
    with pytest.raises(InputError) as caught:
        submit(service, house, output=f"{house}/{output}")
    assert (caught.value.param, caught.value.code) == ("output", "path_not_allowed")


def test_links_are_followed_before_they_are_judged(service, house):
    (house / "red/in/link.parquet").symlink_to(house / "other/secret.parquet")
    (house / "red/in/folder").symlink_to(house / "other")
    (house / "red/out/away").symlink_to(house / "other")
    (house / "red/in/loop").symlink_to(house / "red/in/loop")
    for path in ("link.parquet", "folder/secret.parquet", "folder/*.parquet", "folder", "loop"):
        with pytest.raises(InputError):
            submit(service, house, inputs=[str(house / "red/in" / path)])
    with pytest.raises(InputError):
        submit(service, house, output=str(house / "red/out/away/o"))
    assert not (house / "other/o").exists()


def test_models_are_read_too(service, house):
    (house / "other/m.gguf").write_bytes(b"GGUF")
    (house / "red/m.gguf").write_bytes(b"GGUF")
    submit(service, house, model=str(house / "red/m.gguf"))
    for model in (house / "other/m.gguf", "s3://other/m"):
        with pytest.raises(InputError):
            submit(service, house, model=str(model))


def test_adapters_lie_where_models_may(service, house):
    for folder in ("red/adapter", "other/adapter"):
        make_adapter(house / folder)
    submit(service, house, adapter=str(house / "red/adapter"), adapter_folder=str(house / "red"))
    for field, folder in (("adapter", "other/adapter"), ("adapter_folder", "other")):
        with pytest.raises(InputError) as caught:
            submit(service, house, **{field: str(house / folder)})
        assert (caught.value.param, caught.value.code) == ("adapter", "path_not_allowed")


def test_a_tenant_without_roots_goes_nowhere_and_a_machine_without_keys_anywhere(service, house, tmp_path):
    service.tenants.add(Caller.operator(), "new")
    for caller in (Caller("new", Role.ADMIN, "k"), Caller("new", Role.ADMIN), Caller("default", Role.ADMIN, "k")):
        with pytest.raises(InputError, match="tenants set"):
            submit(service.acting_for(caller), house)
    submit(service.acting_for(Caller.operator()), house, inputs=[str(house / "other/secret.parquet")])


# -- what changes after the submit ------------------------------------------------------------------------------------
def plan(service):
    found = service.ledger.lease_planning(WORKER)
    tenant = service.tenants.get(Caller.operator(), "red")
    roots = InstalledRoots(own="/nowhere").of(tenant, has_key=False)
    return run_planning(service.ledger, found, worker_id="w", lease_seconds=60, roots=roots), roots


def test_a_link_that_appears_after_the_submit_is_found_by_the_planner(service, house):
    submit(service, house, inputs=[str(house / "red/in")])
    (house / "red/in/b.parquet").symlink_to(house / "other/secret.parquet")
    job, _ = plan(service)
    assert (job.state, job.error_code) == (JobState.FAILED, "path_not_allowed")
    assert "b.parquet" in job.error_message


def test_an_output_that_became_a_link_is_not_written_to(service, house):
    submit(service, house)
    (house / "red/out/o").symlink_to(house / "other")
    job, _ = plan(service)
    assert (job.state, job.error_code) == (JobState.FAILED, "path_not_allowed")
    assert sorted(path.name for path in (house / "other").iterdir()) == ["secret.parquet"]


def test_a_file_that_became_a_link_after_planning_is_not_read(service, house):
    submit(service, house)
    job, roots = plan(service)
    assert job.state is JobState.QUEUED
    path = house / "red/in/a.parquet"
    path.unlink()
    path.symlink_to(house / "other/secret.parquet")
    files = ShardFiles(service.ledger, lease(service.ledger), roots)
    with pytest.raises(InputError) as caught:
        list(files.read(files.remaining()))
    assert caught.value.code == "path_not_allowed"


@pytest.mark.parametrize(
    ("uri", "root", "expected"),
    [
        ("/a/b", "/a", True), ("/a", "/a/", True), ("/ab", "/a", False), ("a/b", "/a", False), ("/a/b\0", "/a", False),
        ("s3://b/k", "s3://b/", True), ("s3://b", "s3://b", True), ("s3://bb/k", "s3://b", False),
        ("gs://b/k", "gs://b", True), ("gs://b/k?endpoint_override=evil", "gs://b", False), ("gs://b/%2e%2e/k", "gs://b", False),
        ("s3://b/./k", "s3://b", False), ("/a/b", "s3://a", False), ("s3://a/b", "/", False),
    ],
)  # fmt: skip
def test_below(uri, root, expected):
    assert is_below(uri, root) is expected


def test_roots_in_the_environment(monkeypatch):
    monkeypatch.setenv("BATCHINFER_INPUT_ROOTS", "/data, s3://bucket/in,")
    assert Settings.load().input_roots == ("/data", "s3://bucket/in")
    Roots().check_input("/anything/../at/all")
