"""The unchanged ``openai`` client, a server and a worker with the real engine."""

import json
from pathlib import Path

import openai
import pytest

from tests.integration.openai.conftest import chat, lines, read_lines, upload, wait
from tests.processes import Process

MODEL = Path(__file__).resolve().parents[2] / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.real_model
@pytest.mark.service
def test_questions_are_answered(tmp_path):
    settings = {
        "home": tmp_path,
        "models": json.dumps({"tiny": str(MODEL)}),
        "engine_factory": "batchinfer.engine.engine:create_engine",
        "tick_seconds": 0.2,
    }
    with Process("serve", "--port", 0, **settings) as serve, Process("worker", **settings):
        url = serve.wait_for(lambda line: "batchinfer serves http" in line).split("serves ")[1].split("/v1")[0]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            question = "What is the capital of France? Answer in one short sentence."
            file = upload(client, lines([chat("capital", question, temperature=0, max_tokens=24)]))
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="1h"
            )
            done = wait(client, batch, "completed", "failed")
            (line,) = read_lines(client, done.output_file_id)
            assert "Paris" in line["response"]["body"]["choices"][0]["message"]["content"]
            assert done.usage.output_tokens == line["response"]["body"]["usage"]["completion_tokens"] > 0
