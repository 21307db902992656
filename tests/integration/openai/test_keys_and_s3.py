"""The ``openai`` client where a key is needed, and files that lie in S3."""

import boto3
import openai
import pytest

from batchinfer.jobs.caller import Caller, Role
from batchinfer.jobs.files import FileStore
from batchinfer.jobs.service import JobService
from tests.integration.openai.conftest import chat, lines
from tests.processes import Process

pytestmark = pytest.mark.service


def test_keys_are_the_clients_authentication(sqlite_url, tmp_path):
    service = JobService.connect(sqlite_url, "memory://")
    operator = Caller.operator()
    tokens = {
        role: service.keys.create(operator, tenant="default", role=role)[1] for role in (Role.VIEWER, Role.SUBMITTER)
    }
    hasty = service.keys.create(operator, tenant="default", role=Role.VIEWER, rate_per_minute=1)[1]
    service.close()
    with Process("serve", "--port", 0, database_url=sqlite_url, home=tmp_path) as serve:
        url = serve.wait_for(lambda line: "batchinfer serves http" in line).split("serves ")[1].split("/v1")[0] + "/v1"
        data = ("a.jsonl", lines([chat("a", "hi")]))
        with openai.OpenAI(base_url=url, api_key="bi_wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as refused:
                client.files.list()
            assert refused.value.code == "invalid_api_key"
        with openai.OpenAI(base_url=url, api_key=hasty, max_retries=0) as client:
            assert client.files.list().data == []
            with pytest.raises(openai.RateLimitError) as refused:
                client.files.list()
            assert refused.value.code == "rate_limited"
            assert 1 <= int(refused.value.response.headers["Retry-After"]) <= 60
        with openai.OpenAI(base_url=url, api_key=tokens[Role.VIEWER], max_retries=0) as client:
            assert client.files.list().data == []
            with pytest.raises(openai.PermissionDeniedError):
                client.files.create(file=data, purpose="batch")
        with openai.OpenAI(base_url=url, api_key=tokens[Role.SUBMITTER], max_retries=0) as client:
            assert client.files.create(file=data, purpose="batch").status == "processed"


def test_files_lie_in_s3_and_appear_whole(database_url, s3_endpoint):
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="team")
    service = JobService.connect(database_url, "memory://")
    store = FileStore(service.ledger, "s3://team/batch/", max_bytes=2**20)

    def keys():
        return [found["Key"] for found in s3.list_objects_v2(Bucket="team").get("Contents", [])]

    upload = store.receive("a.jsonl")
    upload.write(b'{"a"')
    assert keys() == []
    upload.write(b": 1}\n")
    file = upload.finish("default", "batch")
    assert keys() == [f"batch/uploads/{file.id}.jsonl"]
    me = Caller("default", Role.SUBMITTER)
    assert (
        b"".join(store.read(me, file.id)[1])
        == s3.get_object(Bucket="team", Key=keys()[0])["Body"].read()
        == b'{"a": 1}\n'
    )
    broken = store.receive("b.jsonl")
    broken.write(b"x")
    broken.abandon()
    store.delete(me, file.id)
    # pyarrow leaves an empty marker where a folder was
    assert [key for key in keys() if not key.endswith("/")] == []
    service.close()
