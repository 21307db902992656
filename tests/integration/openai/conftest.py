"""A server and a worker as processes, and OpenAI's own client, unchanged, on a real socket."""

import json
import time

import openai
import pytest

from tests.processes import Process

MODEL = "tiny"
SETTINGS = {
    "usd_per_hour": "3600",
    "models": json.dumps({MODEL: "org/fake"}),
    "max_file_bytes": 2**20,
    "lease_seconds": 10,
    "heartbeat_seconds": 1,
    "tick_seconds": 0.2,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """URL of a server with a worker beside it, and the settings that others need to join them."""
    home = tmp_path_factory.mktemp("openai")
    settings = SETTINGS | {"home": home, "database_url": f"sqlite:///{home / 'batchinfer.db'}"}
    with Process("serve", "--port", 0, **settings) as serve, Process("worker", **settings):
        line = serve.wait_for(lambda line: "batchinfer serves http" in line)
        yield line.split("serves ")[1].split("/v1")[0]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as made:
        yield made


def chat(custom_id, content, **body):
    """A request line as OpenAI documents it."""
    messages = [{"role": "user", "content": content}]
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODEL, "messages": messages, **body},
    }


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def upload(client, data, name="requests.jsonl"):
    return client.files.create(file=(name, data), purpose="batch")


def wait(client, batch, *statuses):
    """Poll as people do, until the batch has one of the statuses."""
    for _ in range(600):
        found = client.batches.retrieve(batch.id)
        if found.status in statuses:
            return found
        time.sleep(0.1)
    raise AssertionError(found)


def read_lines(client, file_id):
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
