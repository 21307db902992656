"""Rows of two stages in one real engine give the bytes of two runs by hand, one after the other."""

import pyarrow as pa
import pytest

from batchinfer.dataset.stage_reader import row_reader
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.engine import create_engine
from batchinfer.jobs.planner import prompt_config
from batchinfer.jobs.spec import JobSpec
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Request, RowStatus
from batchinfer_workers.engine_session import row_of
from batchinfer_workers.result_rows import ResultRows, with_seed
from batchinfer_workers.row_pump import RowPump, Window
from tests.tiny_model import write_tiny_model
from tests.unit.workers.test_row_pump import Checkpoint, lease_of

TOPICS = [f"w{3 + 7 * row % 90} w{row}" for row in range(12)]
DRAFT = {"max_tokens": 9, "temperature": 0.8}
JUDGE = {"max_tokens": 6, "logprobs": 0}
DULL = (2, 7)


class Session:
    """An engine in this process, as the pump sees it; ids get a session's number, as of the host."""

    def __init__(self, engine):
        self.engine = engine
        self.prompts = []

    @property
    def num_outstanding(self):
        return int(self.engine.has_unfinished())

    def submit(self, requests):
        for request in requests:
            self.prompts.append(request.prompt)
            self.engine.add_request(Request(f"1:{request.request_id}", request.params, request.prompt))

    def poll(self, _timeout):
        return self.engine.step()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    made = create_engine(
        EngineConfig(model=str(write_tiny_model(tmp_path_factory.mktemp("tiny"))), device="cpu", num_kv_blocks=400)
    )
    yield made
    made.close()


def by_hand(engine, prompts, seed, **params):
    """Row by row alone: a job of one prompt a row, with this seed."""
    found = []
    for row, prompt in enumerate(prompts):
        chosen = with_seed(SamplingParams(ignore_eos=True, **params), seed, row)
        engine.add_request(Request(f"0:{row}", chosen, prompt))
        done = []
        while not done:
            done = engine.step()
        assert (row_of(done[0]), done[0].status) == (row, RowStatus.SUCCEEDED)
        found.append(done[0])
    return found


def test_stages_give_the_bytes_of_separate_runs(engine):
    """Drafts are drawn with the stage's seed, judges see them; two rows are filtered by what their drafts say."""
    drafts = by_hand(engine, [f"w5 w17 w33 {topic}" for topic in TOPICS], 11, **DRAFT)
    assert len({draft.text for draft in drafts}) == len(TOPICS)
    judges = by_hand(engine, [f"w5 w17 w2 {d.text} {t}" for d, t in zip(drafts, TOPICS, strict=True)], None, **JUDGE)
    stages = [
        {"name": "draft", "prompt": "w5 w17 w33 {{ topic }}", "sampling": {**DRAFT, "seed": 11}},
        {"name": "keep", "filter": "draft.usage.completion_tokens == 9 and draft.output != dull"},
        {"name": "judge", "prompt": "w5 w17 w2 {{ draft.output }} {{ topic }}", "sampling": JUDGE},
    ]
    spec = JobSpec(inputs="x", model="m", stages=stages, ignore_eos=True, include_token_ids=True)
    dull = [drafts[row].text if row in DULL else "" for row in range(len(TOPICS))]
    batch = pa.table({"topic": TOPICS, "dull": dull}).to_batches()[0]
    inputs = iter(row_reader(prompt_config(spec), batch.schema).read(batch, 0))
    checkpoint, session = Checkpoint(), Session(engine)
    pump = RowPump(
        inputs,
        ResultRows(lease_of(spec), None),
        checkpoint,
        Window(5, 10**6),
        open_session=lambda _: session,
        job_seed=None,
    )
    pump.run(check_stop=lambda: None, on_commit=lambda: None)
    engine.check_integrity()
    first_judge = next(at for at, prompt in enumerate(session.prompts) if prompt.startswith("w5 w17 w2 "))
    assert any(prompt.startswith("w5 w17 w33 ") for prompt in session.prompts[first_judge:]), (
        "drafts go on beside judges"
    )
    for index, (draft, judge) in enumerate(zip(drafts, judges, strict=True)):
        row, _ = checkpoint.rows[index]
        assert (row.extra["draft"]["output"], tuple(row.extra["draft"]["token_ids"])) == (draft.text, draft.token_ids)
        if index in DULL:
            assert (row.status, "judge" in row.extra) == (RowStatus.FILTERED, False)
            continue
        assert row.status is RowStatus.SUCCEEDED
        assert (row.output, tuple(row.extra["judge"]["token_ids"])) == (judge.text, judge.token_ids)
        assert row.extra["judge"]["logprobs"] == judge.extra["logprobs"]
        assert row.extra["judge"]["finish_reason"] == judge.finish_reason
