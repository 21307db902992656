"""Jobs on an engine of two ranks: a rank that dies costs time and no row."""

import os
import signal
from types import SimpleNamespace

import psutil

from batchinfer.engine.config import EngineConfig
from batchinfer.engine.process import EngineProcess
from batchinfer.jobs.status import AttemptState, JobState, Outcome
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Request, RowStatus
from tests.engine.small_decoder import small_model
from tests.engine.test_load import words_tokenizer
from tests.engine.test_process import wait_until_dead


def ranks():
    """Engine processes of this one, and the ranks that they started."""
    found = SimpleNamespace(engines=[], ranks=[])
    for process in psutil.Process().children(recursive=True):
        command = " ".join(process.cmdline())
        if "process_child" in command:
            found.engines.append(process.pid)
        elif "rank_child" in command:
            found.ranks.append(process.pid)
    return found


def test_a_job_whose_rank_is_killed_goes_on_in_a_new_engine_and_no_rank_outlives_an_engine(bench, tmp_path):
    """First a rank is killed, then the engine that came in its place: every row succeeds, once."""
    folder = tmp_path / "small"
    small_model("llama", vocab_size=97, max_position_embeddings=256).save_pretrained(folder)
    words_tokenizer().save_pretrained(folder)
    killed = []

    def on_progress(progress):
        done = progress.job.counts.total
        if done >= 8 and not killed:
            killed.append(ranks().ranks[0])
            os.kill(killed[0], signal.SIGKILL)

    job_id = bench.submit(
        [f"w{row} w{row % 7} w5" for row in range(400)],
        model=str(folder), max_tokens=24, temperature=0, ignore_eos=True, shard_rows=100,
    )  # fmt: skip
    settings = {"tensor_parallel_size": 2, "num_kv_blocks": 64, "max_num_seqs": 4, "checkpoint_rows": 4}
    job = bench.run(
        job_id, on_progress, engine_factory="batchinfer.engine.engine:create_engine", device="cpu", calibrate=False,
        stall_seconds=60, lease_seconds=30, window_rows=8, **settings,
    )  # fmt: skip
    assert killed
    assert (job.state, job.outcome, job.counts.succeeded) == (JobState.COMPLETED, Outcome.SUCCEEDED, 400)
    bench.check(job_id)
    failed = [attempt for attempt in bench.ledger.attempts(job_id) if attempt.state is AttemptState.FAILED]
    assert failed
    assert any(f"rank 1 of 2 (process {killed[0]}) ended with SIGKILL" in str(attempt.error) for attempt in failed)
    left = ranks()
    assert (left.engines, left.ranks) == ([], [])


def test_ranks_end_with_an_engine_that_is_killed_alone(tmp_path):
    """Not its group, and without a word: what rank 1 hears is the end of its pipe."""
    folder = tmp_path / "small"
    small_model("llama", vocab_size=97).save_pretrained(folder)
    words_tokenizer().save_pretrained(folder)
    config = EngineConfig(
        str(folder), tensor_parallel_size=2, device="cpu", num_kv_blocks=8, calibrate=False,
        quantization="int8-weight-only", kv_cache_dtype="int8",
    )  # fmt: skip
    engine = EngineProcess("batchinfer.engine.engine:create_engine", config)
    try:
        engine.submit([Request("0", SamplingParams(max_tokens=4), prompt="w1 w2")])
        assert [completion.status for completion in engine.poll(60)] == [RowStatus.SUCCEEDED]
        (rank,) = ranks().ranks
        os.kill(engine.pid, signal.SIGKILL)
        wait_until_dead(rank)
    finally:
        engine.close()
