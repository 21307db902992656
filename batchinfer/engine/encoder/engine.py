"""The engine of encoders and classifiers: rows in, a tile a step, completions out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from batchinfer.engine.answers import failed
from batchinfer.engine.chat import ChatRenderer
from batchinfer.engine.encoder.model import EncoderModel
from batchinfer.engine.encoder.rows import EncoderIngest
from batchinfer.engine.encoder.tiles import TileQueue, tile_of
from batchinfer.engine.metering import split_exactly
from batchinfer.engine.stats import EngineStats
from batchinfer.errors import EngineError, RowFailure
from batchinfer.types import Completion, ErrorCode, RowError, RowStatus, Usage

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchinfer.engine.config import EngineConfig
    from batchinfer.engine.encoder.rows import EncoderRow
    from batchinfer.engine.encoder.tiles import Tile
    from batchinfer.types import Request, SampleProgress

    Text = tuple[EncoderRow, int]
    """A row, and which of its texts."""


def create_encoder_engine(config: EngineConfig) -> EncoderEngine:
    """Load the model that the config names.

    Raises:
        ModelError: it cannot be found, read or run.
    """
    return EncoderEngine(EncoderModel(config))


class EncoderEngine:
    """Implements :class:`~batchinfer.engine.protocol.EngineProtocol` for models that read whole texts at once."""

    def __init__(self, model: EncoderModel, *, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._model: EncoderModel | None = model
        self._ingest = EncoderIngest(model, ChatRenderer(model.tokenizer, model.config.vocab_size))
        self._max_positions = model.max_positions
        self._clock = clock
        self._rows: dict[str, EncoderRow] = {}
        self._queue: TileQueue[Text] = TileQueue()
        self._ended: list[Completion] = []
        self._stats = EngineStats(kernels="torch", layers="transformers")

    @property
    def num_waiting(self) -> int:
        """Requests that are not computed yet."""
        return len(self._rows)

    @property
    def num_running(self) -> int:
        """Nothing outlives a step."""
        return 0

    def has_unfinished(self) -> bool:
        """Whether a further :meth:`step` would return or compute something."""
        return bool(self._rows or self._ended)

    def add_request(self, request: Request) -> None:
        """Queue a request; see :meth:`EngineProtocol.add_request`."""
        if request.request_id in self._rows:
            raise ValueError(f"request {request.request_id!r} is still unfinished; ids must be unique")
        try:
            row = self._ingest.row(request)
        except RowFailure as failure:
            self._stats.errored += 1
            self._ended.append(Completion(request.request_id, RowStatus.ERRORED, error=failure.error))
            return
        self._rows[row.request_id] = row
        for index, text in enumerate(row.texts):
            self._queue.put(tile_of(len(text.token_ids), self._max_positions), (row, index))

    def abort(self, request_id: str) -> None:
        """Stop a request; see :meth:`EngineProtocol.abort`."""
        if row := self._rows.get(request_id):
            self._fail(row, RowError(ErrorCode.JOB_CANCELLED, "the row was aborted before it ended"))

    def step(self) -> list[Completion]:
        """Compute one tile; see :meth:`EngineProtocol.step`."""
        if len(self._queue):
            self._compute()
        ended, self._ended = self._ended, []
        return ended

    def progress(self) -> dict[str, tuple[SampleProgress, ...]]:
        """Nothing is generated, so there is nothing to go on from."""
        return {}

    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        charged = [row.device_ns for row in self._rows.values()] + [c.device_ns for c in self._ended]
        live = {"num_waiting": self.num_waiting, "unfinished_device_ns": sum(charged)}
        return EngineStats.from_dict({**self._stats.to_dict(), **live})

    def check_integrity(self) -> None:
        """Raise AssertionError if a row waits for a text that is not queued."""
        queued = [row for row, _ in self._queue]
        for row in self._rows.values():
            assert queued.count(row) == row.num_missing, f"row {row.request_id} is lost"
        assert all(row.request_id in self._rows for row in queued), "a text of a row that has ended waits"

    def close(self) -> None:
        """Drop the model."""
        self._model = None

    def _compute(self) -> None:
        started = self._clock()
        tile, texts = self._queue.take()
        outputs = self._run(tile, texts)
        sizes = [len(row.texts[index].token_ids) for row, index in texts]
        elapsed = self._clock() - started
        self._count(tile, sizes, elapsed)
        for (row, _), share in zip(texts, split_exactly(elapsed, sizes), strict=True):
            row.device_ns += share
        for (row, index), output in zip(texts, outputs, strict=True):
            if isinstance(output, RowError):
                self._fail(row, output)
            elif row.request_id in self._rows:  # another text of the row may have failed
                self._take(row, index, output)

    def _run(self, tile: Tile, texts: list[Text]) -> list[torch.Tensor | RowError]:
        """Each text's output; where the batch fails, each is computed alone, and fails alone.

        Raises:
            EngineError: none of several can be computed: it is not the texts.
        """
        model = self._model
        assert model is not None, "the engine is closed"
        encoded = [row.texts[index] for row, index in texts]
        started = self._clock()
        try:
            return list(model(tile, encoded)[: len(encoded)])
        except Exception as error:  # noqa: BLE001 -- whatever a model or device raises must cost at most one row
            self._stats.failed_steps += 1
            if len(encoded) == 1:
                return [_engine_error(error)]
        finally:
            self._stats.model_ns += self._clock() - started
        outputs: list[torch.Tensor | RowError] = []
        for text in encoded:
            try:
                outputs.append(model(tile, [text])[0])
            except Exception as error:  # noqa: BLE001 -- as above
                outputs.append(_engine_error(error))
        if not any(isinstance(output, torch.Tensor) for output in outputs):
            raise EngineError(f"none of {len(outputs)} texts can be computed: {outputs[0]}")
        return outputs

    def _take(self, row: EncoderRow, index: int, output: torch.Tensor) -> None:
        """Keep what is wanted of a text; end its row with the last one."""
        try:
            row.taken[index] = row.reading.take(output, len(row.texts[index].token_ids))
            row.num_missing -= 1
            if row.num_missing:
                return
            text, extra = row.reading.result(row.taken)
        except Exception as error:  # noqa: BLE001 -- as in _run
            self._fail(row, _engine_error(error))
            return
        del self._rows[row.request_id]
        self._stats.succeeded += 1
        usage = Usage(row.num_tokens, 0, 0)
        self._ended.append(
            Completion(
                row.request_id, RowStatus.SUCCEEDED, text=text, usage=usage, device_ns=row.device_ns, extra=extra
            )
        )

    def _fail(self, row: EncoderRow, error: RowError) -> None:
        if self._rows.pop(row.request_id, None) is None:
            return
        self._queue.discard(lambda text: text[0] is row)
        completion = failed(row.request_id, error, Usage(row.num_tokens, 0, 0), row.device_ns, None)
        counter = completion.status.value
        setattr(self._stats, counter, getattr(self._stats, counter) + 1)
        self._ended.append(completion)

    def _count(self, tile: Tile, sizes: list[int], elapsed_ns: int) -> None:
        stats = self._stats
        stats.steps += 1
        stats.sequence_steps += len(sizes)
        stats.prompt_tokens += sum(sizes)
        stats.prefill_tokens += sum(sizes)
        stats.padding_tokens += tile.rows * tile.length - sum(sizes)
        stats.step_ns += elapsed_ns


def _engine_error(error: Exception) -> RowError:
    return RowError(ErrorCode.ENGINE_ERROR, f"{type(error).__name__}: {error}")
