"""The engine's door: built from a config, or used from Python alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, cast

from batchinfer.engine.attention import ATTENTION_NAME, register_attention
from batchinfer.engine.attention_backend import choose_backend
from batchinfer.engine.block_pool import BlockPool
from batchinfer.engine.calibration import Calibration
from batchinfer.engine.chat import ChatRenderer
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.core import EngineCore
from batchinfer.engine.detokenizer import Detokenizer
from batchinfer.engine.encoder.engine import EncoderEngine, create_encoder_engine
from batchinfer.engine.generate import generate
from batchinfer.engine.guided import GrammarCompiler
from batchinfer.engine.ingest import Ingest
from batchinfer.engine.lengths import LengthHistory
from batchinfer.engine.memory import give_back_memory
from batchinfer.engine.model_runner import ModelRunner, cache_dtype, layer_shapes
from batchinfer.engine.parallel.devices import config_of_rank, place_weights
from batchinfer.engine.parallel.lead_runner import LeadRunner
from batchinfer.engine.parallel.ranks import Ranks
from batchinfer.engine.probe import probe_layers
from batchinfer.engine.sampler import Sampler
from batchinfer.engine.scheduler import Scheduler
from batchinfer.engine.speculation import Speculator, StepCosts
from batchinfer.engine.startup import start_up
from batchinfer.errors import ModelError
from batchinfer.model_kind import ModelKind, model_kind, sentence_config
from batchinfer.models.deferred_imports import defer_imports
from batchinfer.models.load import LoadedModel, choose_device, find_model, load_model
from batchinfer.models.parallel.shard import Shard
from batchinfer.tasks import Pooling

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from batchinfer.engine.generate import Prompt
    from batchinfer.engine.gpu.pipeline import QueueingRunner
    from batchinfer.models.parallel.peers import Peers
    from batchinfer.sampling_params import SamplingParams
    from batchinfer.types import Completion

WINDOW = 4
"""Requests pulled ahead, as a multiple of ``max_num_seqs``: enough to refill a batch, little memory."""


def create_engine(config: EngineConfig) -> EngineCore | EncoderEngine:
    """Load the model that the config names and build its engine, which depends on the model's kind.

    Raises:
        ModelError: the model cannot be found, read or run.
    """
    if choose_device(config.device).type == "cpu":
        defer_imports()
    register_attention()
    folder = find_model(config)[0]
    is_decoder = not folder.is_dir() or model_kind(folder) is ModelKind.DECODER
    if config.tensor_parallel_size > 1:
        return _create_parallel_engine(config, is_decoder=is_decoder)
    if not is_decoder:
        return create_encoder_engine(config)
    model = load_model(config, ATTENTION_NAME, may_defer=True)
    engine = build_engine(model, config, owns_model=True, calibrate=config.calibrate)
    del model
    give_back_memory()
    return engine


def _create_parallel_engine(config: EngineConfig, *, is_decoder: bool) -> EngineCore:
    """The engine of rank 0, and the processes of the others."""
    if not is_decoder:
        raise ModelError(
            f"{config.model} is an encoder, which runs on one device; use tensor_parallel_size 1, and a worker a device",
            param="tensor_parallel_size",
        )
    own = config_of_rank(config, 0)
    # the weights stay in their files: what can be refused is refused before processes start
    loaded = load_model(own, ATTENTION_NAME, may_defer=True, shard=Shard(0, config.tensor_parallel_size))
    ranks = Ranks(config, loaded.device)
    try:
        with ranks.together():
            place_weights(loaded)
            engine = build_engine(loaded, own, owns_model=True, ranks=ranks)
    except BaseException:
        ranks.close()
        raise
    del loaded
    give_back_memory()
    return engine


def build_engine(
    loaded: LoadedModel,
    config: EngineConfig,
    *,
    owns_model: bool = False,
    calibrate: bool = False,
    ranks: Ranks | None = None,
) -> EngineCore:
    """An engine around a model that is loaded already; with ``owns_model`` the model is of no use to others after.

    With ``calibrate`` what is not known of its speed here is measured first; but not on a queueing runner, whose cache was
    sized for a token budget already. With ``ranks`` the model is rank 0's share, and the engine ends them when it is
    closed.
    """
    runner = make_runner(loaded, config, owns_model=owns_model, peers=None if ranks is None else ranks.peers)
    found = start_up(runner, loaded, config) if calibrate and not runner.is_queueing else None
    calibration = found.calibration if found else Calibration()
    runner.share_prefixes(calibration.least_shared())
    max_num_seqs = config.max_num_seqs_on(loaded.device.type)
    measured = calibration.batched_tokens(max_num_seqs) if found else runner.default_batched_tokens
    scheduler = Scheduler(
        BlockPool(runner.num_blocks, config.block_size, max_unproven=runner.max_unproven),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or measured,
        enable_prefix_caching=config.enable_prefix_caching,
        history=LengthHistory(warm_up=2 * max_num_seqs),
        speculator=_speculator(config, runner, calibration),
    )
    ingest = Ingest(
        ChatRenderer(loaded.tokenizer, loaded.hf_config.vocab_size),
        Detokenizer(loaded.tokenizer),
        loaded.eos_token_ids,
        max_model_len=loaded.max_model_len,
        max_kv_tokens=runner.num_blocks * config.block_size,
        seed=config.seed,
        adapters=runner.adapters,
        grammars=GrammarCompiler(loaded.tokenizer, loaded.hf_config.vocab_size, loaded.eos_token_ids),
        embedding_size=loaded.hf_config.hidden_size,
        pooling=sentence_config(config.model).pooling or Pooling.LAST,
    )
    sampler = Sampler(loaded.eos_token_ids)
    bound = found.bound if found else None
    if not runner.is_queueing or scheduler.speculator is not None:
        return EngineCore(
            runner if ranks is None else LeadRunner(runner, ranks),
            scheduler,
            ingest,
            sampler,
            about=runner.about,
            profile=runner.profile,
            bound=bound,
            on_close=ranks.close if ranks else lambda: None,
        )
    # on a CPU, where only tests have a queueing runner, nothing is gained
    overlaps = loaded.device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
    queueing = cast("QueueingRunner", runner)
    return _pipelined(queueing, scheduler, ingest, sampler, device=loaded.device, overlaps=overlaps)


def _pipelined(
    runner: QueueingRunner, scheduler: Scheduler, ingest: Ingest, sampler: Sampler, *, device: torch.device, overlaps: bool
) -> EngineCore:  # fmt: skip
    """The core of a device with a queue."""
    from batchinfer.engine.gpu.pipeline import PipelinedCore  # noqa: PLC0415 -- nobody else needs it
    from batchinfer.engine.gpu.sampler import DeviceSampler  # noqa: PLC0415 -- as above

    return PipelinedCore(
        runner,
        scheduler,
        ingest,
        sampler,
        device_sampler=DeviceSampler(sampler, device),
        overlaps=overlaps,
        about=runner.about,
        profile=runner.profile,
    )


def make_runner(
    loaded: LoadedModel, config: EngineConfig, *, owns_model: bool = False, peers: Peers | None = None
) -> ModelRunner:
    """The runner for the model's device; with ``peers`` for a rank's share, every step kernel by kernel.

    Raises:
        ModelError: as :class:`ModelRunner`, or ``async_scheduling`` is asked for where it cannot be.
    """
    if peers is not None:
        return ModelRunner(loaded, config, owns_model=owns_model, peers=peers)
    wants_triton = config.attention_backend == "triton"
    if wants_triton or (config.attention_backend == "auto" and loaded.device.type == "cuda"):
        register_attention()
        loaded.model.set_attn_implementation(ATTENTION_NAME)
        layers = layer_shapes(probe_layers(loaded.model, loaded.device, loaded.name))
        name, _ = choose_backend(
            layers, config.block_size, cache_dtype(loaded, config), loaded.device, wanted=config.attention_backend
        )
        if name == "triton":
            from batchinfer.engine.gpu.runner import GpuRunner  # noqa: PLC0415 -- needs Triton

            return GpuRunner(loaded, config, owns_model=owns_model)
    if config.async_scheduling:
        raise ModelError(
            f"async_scheduling needs a GPU and attention by Triton, and the engine runs on {loaded.device} without; "
            "leave it out, which schedules step by step here",
            param="async_scheduling",
        )
    return ModelRunner(loaded, config, owns_model=owns_model)


def _speculator(config: EngineConfig, runner: ModelRunner, calibration: Calibration) -> Speculator | None:
    """Guesses by themselves only where a step's bytes are known not to depend on how many tokens it computes.

    And not where steps overlap, which pays more: guesses need the tokens before them.
    """
    if config.speculation == "auto":
        about = runner.about
        is_safe = about["layers"] == "fused" and about["kernels"] != "torch" and not runner.is_queueing
        return Speculator(costs=StepCosts(calibration.decode)) if is_safe else None
    return Speculator(always=True) if config.speculation == "ngram" else None


class Engine:
    """A model on this machine, for use from Python.

    ::

        with Engine("SmolLM2-135M-Instruct.Q4_1.gguf", max_num_seqs=32) as engine:
            for completion in engine.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
                print(completion.request_id, completion.text)

    ``settings`` are the fields of :class:`EngineConfig`. Not thread-safe, and one :meth:`generate` at a time.

    Raises:
        InvalidSpecError: a setting is out of range.
        ModelError: the model cannot be found, read or run.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        config = EngineConfig(model=model, **settings)
        self.core = create_engine(config)
        self._window = WINDOW * config.max_num_seqs_on(choose_device(config.device).type)

    def generate(self, requests: Iterable[Prompt], params: SamplingParams | None = None) -> Iterator[Completion]:
        """Yield one completion a request, as they end; requests are pulled lazily.

        A request is a :class:`~batchinfer.types.Request`, a text to complete, or a list of chat messages; the latter
        two get their index as id, and ``params``.
        """
        return generate(self.core, requests, params, self._window)

    def close(self) -> None:
        """Free the model and its cache."""
        self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
