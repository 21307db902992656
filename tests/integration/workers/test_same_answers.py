"""The same job gives the same bytes, tokens and log-probabilities, whoever runs it and however it is cut."""

import random
import threading

import pyarrow as pa
import pytest

from batchinfer.jobs.dispatch import NullDispatcher
from batchinfer.jobs.ledger import Ledger
from batchinfer.jobs.status import JobState
from batchinfer_workers.node import WorkerNode
from tests.inline_engine import InlineEngine
from tests.tiny_model import write_tiny_model

NUM_ROWS = 24
SHARED = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="module")
def rows():
    """Prompts of 1 to 90 words, a third of which begin alike; every other row is drawn by its own seed."""
    rng = random.Random(5)

    def words(number):
        return [f"w{rng.randrange(3, 96)}" for _ in range(number)]

    head = words(SHARED)
    prompts = [words(rng.randint(1, 90)) if at % 3 else head + words(rng.randint(1, 20)) for at in range(NUM_ROWS)]
    return [
        {"id": f"r{at}", "prompt": " ".join(prompt), "temperature": float(at % 2), "seed": at}
        for at, prompt in enumerate(prompts)
    ]


class Workers:
    """Runs one job with some workers at once, each with a real engine of its own."""

    def __init__(self, bench, monkeypatch):
        self._bench = bench
        self._monkeypatch = monkeypatch
        self.num_jobs = 0

    def run(self, rows, *, workers=1, stop_after=None, changes=None, settings=None, **spec):
        """Answers by id. All workers have loaded before any goes on; ``stop_after`` steps the only one is drained."""
        self.num_jobs += 1
        table = pa.Table.from_pylist(rows)
        job_id = self._bench.submit(
            table, file=f"input{self.num_jobs}.parquet", max_tokens=14, logprobs=2, include_token_ids=True,
            output=str(self._bench.folder / f"out{self.num_jobs}"), id_column="id", **spec,
        )  # fmt: skip
        if stop_after is not None:
            self._work(job_id, 1, changes, settings, stop_after)
            job = self._bench.ledger.get_job(job_id)
            assert job.state is JobState.IN_PROGRESS, "the first worker has left something to do"
        names = self._work(job_id, workers, changes, settings)
        assert names == workers, "each has run a shard"
        assert self._bench.check(job_id).counts.succeeded == len(rows)
        found = {row["id"]: (row["token_ids"], row["logprobs"], row["output"]) for row in self._bench.rows(job_id)}
        assert len(found) == len(rows)
        return found

    def _work(self, job_id, number, changes, settings, stop_after=None):
        nodes = []
        all_loaded = threading.Barrier(number)

        def start(_factory, config, _is_cancelled, **_options):
            def on_step(num_steps):
                if num_steps == stop_after:
                    nodes[0].drain()

            return InlineEngine(config, changes=changes or {}, on_load=lambda: all_loaded.wait(60), on_step=on_step)

        self._monkeypatch.setattr("batchinfer_workers.node.EngineProcess", start)
        for _ in range(number):
            ledger = Ledger(self._bench._engine)
            nodes.append(WorkerNode(self._bench.settings(**settings or {}), ledger, NullDispatcher(), job_id=job_id))
            nodes[-1].start()
        try:
            nodes[0].plan_jobs()
            threads = [threading.Thread(target=node.run_shards) for node in nodes for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
            nodes[0].finalize_jobs()
        finally:
            for node in nodes:
                node.close()
        return len({attempt.worker_id for attempt in self._bench.ledger.attempts(job_id)} & {node.id for node in nodes})


@pytest.mark.parametrize(
    "precision",
    [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"}],
    ids=["float32", "bfloat16", "int8"],
)
def test_the_same_bytes_whoever_runs_it(bench, monkeypatch, model, rows, precision):
    """One worker and one shard; two workers, small shards, another order; no prefix cache, chunks of 16 tokens and
    three rows at a time, with guesses; a worker that is stopped in the middle of answers, and the one that goes on."""
    workers = Workers(bench, monkeypatch)
    spec = {"model": model, "shard_rows": NUM_ROWS, **precision}
    truth = workers.run(rows, **spec)
    shuffled = random.Random(1).sample(rows, len(rows))
    assert len({tuple(tokens) for tokens, _, _ in truth.values()}) > NUM_ROWS / 2, "rows differ"
    assert workers.run(shuffled, workers=2, **spec | {"shard_rows": 3}) == truth
    small = {"max_num_seqs": 3, "max_num_batched_tokens": 16}
    without = workers.run(
        rows[::-1], settings=small, changes={"enable_prefix_caching": False, "speculation": "ngram"},
        **spec | {"shard_rows": 7},
    )  # fmt: skip
    assert without == truth
    assert workers.run(rows, stop_after=6, settings={"max_num_seqs": 8}, **spec | {"shard_rows": 12}) == truth
