"""The loop of a shard: rows of several stages go through one engine without waiting for each other."""

from collections import deque
from types import SimpleNamespace

import pyarrow as pa

from batchinfer.dataset.stage_reader import row_reader
from batchinfer.jobs.planner import prompt_config
from batchinfer.jobs.spec import JobSpec
from batchinfer.types import Completion, FinishReason, RowStatus, Usage
from batchinfer_workers.result_rows import ResultRows
from batchinfer_workers.row_pump import RowPump, Window

STAGES = (
    {"name": "draft", "prompt": "draft {{ topic }}"},
    {"name": "keep", "filter": "topic != 'dull'"},
    {"name": "judge", "prompt": "judge {{ draft.output }}"},
)


class Engine:
    """A session that answers what the test releases; each prompt is answered in capitals."""

    def __init__(self, script):
        self.script = deque(script)
        self.log = []
        self.waiting = {}

    @property
    def num_outstanding(self):
        return len(self.waiting)

    def submit(self, requests):
        for request in requests:
            assert request.request_id not in self.waiting, "one request a row at a time"
            self.waiting[request.request_id] = request
            self.log.append(f"submit {request.prompt}")

    def poll(self, _timeout):
        """The rows that the script has next, if they are there; at the end of the script all."""
        rows = self.script.popleft() if self.script else list(self.waiting)
        done = [self.waiting.pop(row) for row in rows]
        self.log += [f"end {request.prompt}" for request in done]
        return [
            Completion(
                f"1:{request.request_id}", RowStatus.SUCCEEDED, text=request.prompt.upper(), usage=Usage(2, 1, 3),
                finish_reason=FinishReason.STOP, device_ns=1000,
            )
            for request in done
        ]  # fmt: skip


class Checkpoint:
    is_due = False

    def __init__(self):
        self.rows = {}

    def add(self, row, device_ns=0):
        assert row.row_index not in self.rows
        self.rows[row.row_index] = (row, device_ns)


def lease_of(spec):
    return SimpleNamespace(job=SimpleNamespace(model="m", spec=spec), attempt_number=1, nanos_per_hour=3_600_000_000)


def pump(topics, script, **window):
    spec = JobSpec(inputs="x", model="m", stages=STAGES)
    table = pa.table({"topic": topics}).to_batches()[0]
    inputs = iter(row_reader(prompt_config(spec), table.schema).read(table, 0))
    engine, checkpoint = Engine(script), Checkpoint()
    RowPump(
        inputs, ResultRows(lease_of(spec), None), checkpoint, Window(**{"rows": 64, "chars": 10**6, **window}),
        open_session=lambda _requests: engine, job_seed=None,
    ).run(check_stop=lambda: None, on_commit=lambda: None)  # fmt: skip
    assert not engine.waiting
    return engine.log, checkpoint.rows


def test_a_judge_goes_to_the_engine_while_drafts_still_run():
    """Row 1's draft ends first: its judge is submitted, and ends, before row 0's draft does."""
    log, rows = pump(["slow", "fast", "dull"], [["1"], ["1"], ["2"], ["0"]])
    assert log == [
        "submit draft slow", "submit draft fast", "submit draft dull",
        "end draft fast", "submit judge DRAFT FAST", "end judge DRAFT FAST",
        "end draft dull", "end draft slow", "submit judge DRAFT SLOW", "end judge DRAFT SLOW",
    ]  # fmt: skip
    assert {index: row.status for index, (row, _) in rows.items()} == {0: "succeeded", 1: "succeeded", 2: "filtered"}
    slow, dull = rows[0][0], rows[2][0]
    assert (slow.output, slow.extra["draft"]["output"]) == ("JUDGE DRAFT SLOW", "DRAFT SLOW")
    assert (slow.usage, slow.cost_nanos, rows[0][1]) == (Usage(4, 2, 6), 2, 2000)
    assert (dull.output, dull.extra["stopped_at"], dull.extra["keep"], "judge" in dull.extra) == (
        None,
        "keep",
        False,
        False,
    )
    assert dull.extra["draft"]["output"] == "DRAFT DULL"


def test_the_window_counts_rows_not_requests():
    """A row keeps its place until it has ended: no more rows than the window are ever held."""
    log, rows = pump([f"t{i}" for i in range(40)], [], rows=4)
    assert len(rows) == 40
    held = most = 0
    for line in log:
        held += line.startswith("submit draft")
        held -= line.startswith("end judge")
        most = max(most, held)
    assert most == 4
    drafts = [line for line in log if line.startswith("submit draft")]
    assert drafts == [f"submit draft t{i}" for i in range(40)]
