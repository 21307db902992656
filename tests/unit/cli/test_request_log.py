"""Lines about requests: all of them, as other lines look, and few writes."""

import asyncio
import json
import logging
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.cli import redact, request_log
from batchinfer.cli.connect import set_up_logs
from batchinfer.log_context import bound

LOG = logging.getLogger(request_log.LOGGER)


class Stderr(list):
    """What is written, a string a write."""

    write = list.append

    def flush(self):
        pass


@pytest.fixture(autouse=True)
def _logs_as_before():
    yield
    logging.basicConfig(force=True)


def test_lines_are_written_together_soon_and_the_rest_at_the_end(monkeypatch):
    monkeypatch.setattr(sys, "stderr", writes := Stderr())
    monkeypatch.setattr(request_log, "WRITE_SECONDS", 0.01)
    set_up_logs("info", "json")

    async def serve():
        for number in range(50):
            with bound(request=f"req_{number}"):
                LOG.info("GET %d", number)
        assert writes == []
        await asyncio.sleep(0.3)
        assert len(writes) == 1
        LOG.info("last")

    with request_log.requests_logged_together():
        asyncio.run(serve())
        logging.getLogger("other").warning("at once")
        assert "at once" in "".join(writes)
    lines = [json.loads(line) for line in "".join(writes).splitlines()]
    assert [line["message"] for line in lines] == [*(f"GET {n}" for n in range(50)), "at once", "last"]
    assert [line.get("request") for line in lines] == [*(f"req_{n}" for n in range(50)), None, None]
    LOG.info("as before")
    assert "as before" in "".join(writes)


def test_a_busy_server_keeps_few_lines(monkeypatch):
    monkeypatch.setattr(sys, "stderr", writes := Stderr())
    monkeypatch.setattr(request_log, "MAX_LINES", 10)
    set_up_logs("info")

    async def serve():
        for number in range(25):
            LOG.info("%d bi_abcdefghijkl_%s", number, "S" * 43)
        assert [text.count("\n") for text in writes] == [10, 10]

    with request_log.requests_logged_together():
        asyncio.run(serve())
    assert "".join(writes).count("\n") == 25
    assert "SSSS" not in "".join(writes)


SECRETS = st.sampled_from(
    ["bi_abcdefghijkl_" + "S" * 43, "whsec_" + "x" * 9, "Bearer " + "y" * 9, "BASIC zzzzzzzz", "redis://u:p@h", "plain"]
)


@given(st.lists(st.one_of(SECRETS, st.text(max_size=5)), max_size=4), st.sampled_from([str, str.upper, str.title]))
def test_what_is_passed_over_holds_no_secret(parts, change):
    """Lines that show none of a secret's signs are not searched: the search would have found nothing."""
    text = change(" ".join(parts))
    found = re.search(redact._SECRETS, text)
    assert (redact.redact(text) == text) == (found is None)
