"""The unchanged ``openai`` client runs the whole flow; the documents are those that its types describe."""

import base64
import hashlib
import json
import struct

import numpy as np
import openai
import pytest
from openai.types import Batch, Completion, CreateEmbeddingResponse, FileDeleted, FileObject, Model
from openai.types.chat import ChatCompletion

from tests.fakes import answer
from tests.integration.openai.conftest import MODEL, chat, lines, read_lines, upload, wait
from tests.program import batchinfer

pytestmark = pytest.mark.service


def strict(kind, document):
    """The document read by OpenAI's own type, strictly: a missing or mistyped field fails."""
    return kind.model_validate(document, strict=True)


def test_a_batch_from_upload_to_answers(client, server, monkeypatch):
    """Every request has one line, with its custom_id, in the output or in the error file."""
    requests = [chat(f"r-{number}", f"row {number} says hello ☾", temperature=0) for number in range(20)]
    bad = [
        chat("empty", "ERROR please"),
        chat("unsupported", "hi", functions=[{"name": "f"}]),
        chat("hot", "hi", temperature=-1),
        chat("short", "one two three four five", max_completion_tokens=2),
    ]
    data = lines(requests + bad)
    file = upload(client, data)
    assert (file.bytes, file.filename, file.purpose, file.status) == (len(data), "requests.jsonl", "batch", "processed")
    assert client.files.content(file.id).content == data

    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"team": "search"}
    )
    assert batch.id.startswith("batch_")
    assert batch.status in {"validating", "in_progress", "finalizing", "completed"}
    done = wait(client, batch, "completed")
    strict(Batch, json.loads(done.model_dump_json()))
    assert done.metadata == {"team": "search"}
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (24, 21, 3)
    assert done.model == MODEL
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    assert done.expires_at - done.created_at in {24 * 3600, 24 * 3600 - 1}
    assert [done.failed_at, done.expired_at, done.cancelling_at, done.cancelled_at, done.errors] == [None] * 5

    answers = read_lines(client, done.output_file_id)
    assert [line["custom_id"] for line in answers] == [f"r-{number}" for number in range(20)] + ["short"]
    for line, request in zip(answers, requests, strict=False):
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert (line["error"], line["response"]["status_code"]) == (None, 200)
        completion = ChatCompletion.model_validate(line["response"]["body"])
        assert completion.model == MODEL
        assert completion.choices[0].message.content == answer(request["body"]["messages"][0]["content"])
        assert completion.choices[0].finish_reason == "stop"
    short = ChatCompletion.model_validate(answers[-1]["response"]["body"])
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("five four", "length")
    assert (short.usage.prompt_tokens, short.usage.completion_tokens, short.usage.total_tokens) == (5, 2, 7)
    assert len({line["id"] for line in answers}) == len({line["response"]["body"]["id"] for line in answers}) == 21

    errors = {line["custom_id"]: line["response"] for line in read_lines(client, done.error_file_id)}
    assert {name: response["status_code"] for name, response in errors.items()} == {
        "empty": 500, "unsupported": 400, "hot": 400,
    }  # fmt: skip
    assert "functions" in errors["unsupported"]["body"]["error"]["message"]
    total = sum(line["response"]["body"]["usage"]["total_tokens"] for line in answers)
    assert done.usage.total_tokens == total + 2  # the row that failed in the engine had two words

    # the same job, at the other door
    monkeypatch.setenv("BATCHINFER_DATABASE_URL", f"sqlite:///{_home(done, client)}/batchinfer.db")
    job = batchinfer("status", done.job_id, "--json").json
    assert (job["state"], job["outcome"], job["tags"]) == ("completed", "partial", {"team": "search"})
    assert job["usage"]["prompt_tokens"] == done.usage.input_tokens
    assert batchinfer("verify", done.job_id).stdout.startswith("verified: 24 rows")
    output = client.files.retrieve(done.output_file_id)
    content = client.files.content(done.output_file_id).content
    assert (output.purpose, output.bytes) == ("batch_output", len(content))
    assert output.sha256 == hashlib.sha256(content).hexdigest()


def _home(batch, client):
    response = client._client.get(f"{str(client.base_url).removesuffix('/v1/')}/v1/jobs/{batch.job_id}")
    return response.json()["output"].partition("/files/")[0]


def test_text_completions_have_their_own_shape(client):
    requests = [
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": "b a"}},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": "x " * 40}},
    ]
    file = upload(client, lines(requests))
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    first, second = read_lines(client, wait(client, batch, "completed").output_file_id)
    completion = Completion.model_validate(first["response"]["body"])
    assert (completion.object, completion.choices[0].text) == ("text_completion", "a b")
    # like OpenAI's, this endpoint stops after 16 tokens where the request does not say
    assert second["response"]["body"]["usage"]["completion_tokens"] == 16


def test_embeddings(client):
    """Vectors of texts and of token ids, as numbers and as base64, cut; bad requests fail alone."""

    def request(custom_id, given, **body):
        body = {"model": MODEL, "input": given, **body}
        return {"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": body}

    requests = [
        request("text", "one two"),
        request("list", ["one two", "three"], encoding_format="float", user="me"),
        request("base64", ["one two", "three"], encoding_format="base64"),
        request("tokens", [[11, 22, 33], [4]], dimensions=1),
        request("chat", None, messages=[{"role": "user", "content": "hi"}]),
        request("format", "x", encoding_format="hex"),
        request("broken", ["fine", "ERROR"]),
    ]
    file = upload(client, lines(requests))
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    done = wait(client, batch, "completed")
    answers = {line["custom_id"]: line["response"] for line in read_lines(client, done.output_file_id)}
    assert [response["status_code"] for response in answers.values()] == [200] * 4
    found = {
        name: strict(CreateEmbeddingResponse, response["body"])
        for name, response in answers.items()
        if name != "base64"
    }
    vectors = [[2.0, np.float32(7 / 3)], [1.0, np.float32(5 / 3)]]
    assert [item.embedding for item in found["text"].data] == vectors[:1]
    assert [(item.index, item.object, item.embedding) for item in found["list"].data] == [
        (index, "embedding", vector) for index, vector in enumerate(vectors)
    ]
    assert (found["list"].model, found["list"].object) == (MODEL, "list")
    assert (found["list"].usage.prompt_tokens, found["list"].usage.total_tokens) == (3, 3)
    assert [item.embedding for item in found["tokens"].data] == [[3.0], [1.0]]
    data = answers["base64"]["body"]["data"]
    assert [struct.unpack("<2f", base64.b64decode(item["embedding"])) for item in data] == [tuple(v) for v in vectors]
    assert [item["index"] for item in data] == [0, 1]

    errors = {line["custom_id"]: line["response"] for line in read_lines(client, done.error_file_id)}
    assert {name: response["status_code"] for name, response in errors.items()} == {
        "chat": 400, "format": 400, "broken": 500,
    }  # fmt: skip
    assert done.usage.output_tokens == 0
    with pytest.raises(openai.BadRequestError, match="no option 'task'"):
        client.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h",
            extra_body={"job": {"task": "generate"}},
        )  # fmt: skip


def test_lines_that_are_no_requests_fail_the_batch_with_their_numbers(client):
    """Blank lines count, as in an editor."""
    good = json.dumps(chat("a", "hi"))
    broken = [
        good,
        "",
        "{not json",
        "[1]",
        json.dumps(chat("", "hi")),
        json.dumps(chat("m", "hi", model="other")),
        json.dumps(chat("u", "hi") | {"url": "/v1/embeddings"}),
        json.dumps(chat("g", "hi") | {"method": "GET"}),
        json.dumps(chat("n", "hi") | {"body": None}),
    ]
    batch = client.batches.create(
        input_file_id=upload(client, "\n".join(broken).encode()).id,
        endpoint="/v1/chat/completions",
        completion_window="7d",
    )
    failed = wait(client, batch, "failed")
    assert [(fault.line, fault.code, fault.param) for fault in failed.errors.data] == [
        (3, "invalid_json_line", None),
        (4, "invalid_json_line", None),
        (5, "missing_required_parameter", "custom_id"),
        (6, "mismatched_model", "body.model"),
        (7, "invalid_url", "url"),
        (8, "invalid_method", "method"),
        (9, "missing_required_parameter", "body"),
    ]
    assert failed.failed_at is not None
    assert (failed.output_file_id, failed.error_file_id) == (None, None)
    assert failed.request_counts.total == 0


def test_a_custom_id_twice_is_named_by_both_lines(client):
    data = b"\n".join(json.dumps(chat(name, "hi")).encode() for name in ("a", "b", "a")).replace(b"\n", b"\n\n", 1)
    batch = client.batches.create(
        input_file_id=upload(client, data).id, endpoint="/v1/chat/completions", completion_window="1h"
    )
    (fault,) = wait(client, batch, "failed").errors.data
    assert (fault.line, fault.code) == (4, "duplicate_custom_id")
    assert "line 1" in fault.message


def test_a_file_without_a_model_or_without_requests_fails(client):
    for data, code in ((b"\n \n", "empty_file"), (b'{"custom_id": "a"}\n', "invalid_method")):
        batch = client.batches.create(
            input_file_id=upload(client, data).id, endpoint="/v1/chat/completions", completion_window="1h"
        )
        assert wait(client, batch, "failed").errors.data[0].code == code


def test_a_cancelled_batch_keeps_what_ended(client):
    """Rows that never end are cut off; each request has a line all the same."""
    requests = [chat("done", "b a"), *(chat(f"spin-{number}", "SPIN") for number in range(3))]
    batch = client.batches.create(
        input_file_id=upload(client, lines(requests)).id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    running = wait(client, batch, "in_progress")
    with pytest.raises(openai.ConflictError) as conflict:
        client.files.delete(running.input_file_id)
    assert conflict.value.code == "file_in_use"
    assert client.batches.cancel(batch.id).status in {"cancelling", "cancelled"}
    cancelled = wait(client, batch, "cancelled")
    assert cancelled.cancelling_at <= cancelled.cancelled_at
    assert cancelled.request_counts.total == 4
    errors = {line["custom_id"]: line for line in read_lines(client, cancelled.error_file_id)}
    assert errors["spin-0"]["response"] is None
    assert errors["spin-0"]["error"]["code"] == "batch_cancelled"
    answered = read_lines(client, cancelled.output_file_id) if cancelled.output_file_id else []
    assert len(errors) + len(answered) == 4
    assert client.batches.cancel(batch.id).status == "cancelled"
    assert client.files.delete(running.input_file_id).deleted


def test_options_of_a_job_pass_through_extra_body(client):
    batch = client.batches.create(
        input_file_id=upload(client, lines([chat("a", "x y z")])).id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        extra_body={"job": {"max_tokens": 1, "priority": 7}},
    )
    (line,) = read_lines(client, wait(client, batch, "completed").output_file_id)
    assert line["response"]["body"]["choices"][0]["message"]["content"] == "z"
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(
            input_file_id=batch.input_file_id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            extra_body={"job": {"output": "/etc"}},
        )
    assert refused.value.param == "job.output"


def test_lists_page_as_the_client_expects(client):
    files = [upload(client, lines([chat("a", str(number))]), f"{number}.jsonl") for number in range(5)]
    wanted = [file.id for file in files]
    assert [file.id for file in client.files.list(order="asc", limit=2, after=wanted[0])][:4] == wanted[1:]
    assert [file.id for file in client.files.list(limit=2)][:5] == wanted[::-1]
    assert all(file.purpose == "batch_output" for file in client.files.list(purpose="batch_output"))
    strict(FileObject, json.loads(files[0].model_dump_json()))

    made = [
        client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h").id
        for file in files[:3]
    ]
    assert [batch.id for batch in client.batches.list(limit=2)][:3] == made[::-1]
    deleted = client.files.delete(files[4].id)
    strict(FileDeleted, json.loads(deleted.model_dump_json()))
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(files[4].id)
    for batch_id in made:
        wait(client, client.batches.retrieve(batch_id), "completed")


def test_models_can_be_listed_and_looked_at(client):
    names = {model.id for model in client.models.list()}
    assert MODEL in names
    strict(Model, json.loads(client.models.retrieve(MODEL).model_dump_json()))
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("org/nothing")
    assert missing.value.code == "model_not_found"


def test_errors_are_the_clients_exceptions(client):
    """Each with a message that says what to do, and the field at fault."""
    file = upload(client, lines([chat("a", "hi")]))
    good = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    for change, param in (
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
        ({"extra_body": {"job": {"temperature": -1}}}, "job.temperature"),
        ({"extra_body": {"unknown": 1}}, "unknown"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.batches.create(**good | change)
        assert refused.value.param == param, refused.value
    for call in (
        lambda: client.files.retrieve("file-nothing"),
        lambda: client.files.content("file-nothing"),
        lambda: client.files.delete("../../etc/passwd"),
        lambda: client.files.list(after="file-nothing"),
        lambda: client.batches.retrieve("batch_nothing"),
        lambda: client.batches.retrieve("job_nothing"),
        lambda: client.batches.cancel("batch_nothing"),
        lambda: client.batches.list(after="batch_nothing"),
        lambda: client.batches.create(**good | {"input_file_id": "file-nothing"}),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=("a.jsonl", b"{}"), purpose="fine-tune")
    assert refused.value.param == "purpose"
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=("a.jsonl", b""), purpose="batch")
    assert refused.value.code == "empty_file"
    with pytest.raises(openai.APIStatusError) as refused:
        client.files.create(file=("a.jsonl", b"x" * (2**20 + 1)), purpose="batch")
    assert (refused.value.status_code, refused.value.code) == (413, "file_too_large")
    output_like = client.files.create(file=("a.parquet", b"PAR1"), purpose="input")
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(**good | {"input_file_id": output_like.id})
    assert refused.value.param == "input_file_id"


async def _flow(url):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        file = await client.files.create(file=("a.jsonl", lines([chat("a", "hi")])), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        return (await client.batches.retrieve(batch.id)).input_file_id == file.id


def test_the_async_client_works_as_well(server):
    import asyncio

    assert asyncio.run(_flow(server))
