"""The ranks beside this one, as rank 0 has them: their processes, their steps, their end."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from batchinfer.engine.child_process import ChildProcess
from batchinfer.engine.parallel.communicator import Meeting, TorchCommunicator
from batchinfer.engine.parallel.devices import config_of_rank, use_device
from batchinfer.errors import EngineError, ModelError, UserError
from batchinfer.models.parallel.peers import Peers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchinfer.engine.config import EngineConfig

CLOSE_SECONDS = 5.0
LOSS_SECONDS = 2.0
"""How long a failed exchange waits to be told which rank has ended."""
STUCK_SECONDS = 5.0
"""How long a step may go on after a rank has ended; NCCL would wait for it, and nothing else can interrupt that."""


class Ranks:
    """Starts the other ranks and meets them. They compute what :meth:`start_step` tells, while rank 0 computes it too.

    Raises:
        EngineError: a rank could not start, or ended.
        ModelError: a rank says that it cannot load the model.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        """``device`` is that of rank 0."""
        self._size = config.tensor_parallel_size
        self._changed = threading.Condition()
        self._num_started = 0
        self._reports: dict[int, dict[str, Any]] = {}
        self._loss: Exception | None = None
        self._is_closing = False
        self._is_computing = False
        self._num_threads = torch.get_num_threads()
        self._processes: dict[int, ChildProcess] = {}
        meeting = Meeting()
        try:
            for rank in range(1, self._size):
                self._start(rank, config_of_rank(config, rank), meeting.port)
            self._wait_until_started()
            use_device(device, self._size)
            self._communicator = TorchCommunicator(0, self._size, device, meeting.store)
        except BaseException:
            self._is_closing = True
            self._end(0.0)
            raise
        self.peers = Peers(self._communicator)
        """The exchange with them."""

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [process.pid for process in self._processes.values()]

    def start_step(self, numbers: torch.Tensor) -> None:
        """Tell the step of :func:`~batchinfer.engine.parallel.step.write_step`; all begin to compute it."""
        for process in self._processes.values():
            process.send({"type": "step", "size": len(numbers)})
        self._communicator.broadcast(numbers)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What all ranks do at once. Whatever fails in it ends the engine: the ranks are out of step.

        Raises:
            EngineError: which rank has ended, or what failed here.
        """
        self._is_computing = True
        try:
            with self._changed:
                self._check()
            yield
        except (UserError, EngineError):
            raise
        except Exception as error:
            raise self._explain(error) from error
        finally:
            self._is_computing = False

    def close(self) -> None:
        """End the ranks. May be called twice."""
        if self._is_closing:
            return
        self._is_closing = True
        for process in self._processes.values():
            process.send({"type": "close"})
        self._communicator.leave(is_whole=self._loss is None)
        self._end(CLOSE_SECONDS)

    def _start(self, rank: int, config: EngineConfig, port: int) -> None:
        with self._changed:  # what it says waits until it is known here
            process = ChildProcess(
                lambda message: self._hear(rank, message),
                lambda: self._note_end(rank),
                module="batchinfer.engine.parallel.rank_child",
                has_own_session=False,  # whoever kills the engine's group ends all ranks
            )
            self._processes[rank] = process
            process.send({"type": "start", "config": config.to_json(), "rank": rank, "port": port})

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        with self._changed:
            if message["type"] == "started":
                self._num_started += 1
            else:
                self._reports[rank] = message
            self._changed.notify_all()

    def _wait_until_started(self) -> None:
        with self._changed:
            while self._num_started < self._size - 1:
                self._check()
                self._changed.wait()

    def _check(self) -> None:
        if self._loss is not None:
            raise self._loss

    def _note_end(self, rank: int) -> None:
        """A rank's pipe has ended; called from the thread that read it."""
        with self._changed:
            process = self._processes[rank]
        if self._is_closing:
            return
        if not process.wait(LOSS_SECONDS):
            process.kill()
        with self._changed:
            self._loss = self._loss or self._describe(rank, process)
            self._changed.notify_all()
        self._end_if_stuck()

    def _describe(self, rank: int, process: ChildProcess) -> Exception:
        report = self._reports.get(rank)
        if report is not None and report["kind"] == "ModelError":
            return ModelError(report["message"], param=report["param"])
        how = f"failed: {report['message']}" if report else f"ended with {process.describe_end()}"
        return EngineError(f"rank {rank} of {self._size} (process {process.pid}) {how}")

    def _end_if_stuck(self) -> None:
        """End this process if it still waits for a rank that is gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or not self._is_computing, STUCK_SECONDS)
            is_stuck = self._is_computing and not self._is_closing
        if is_stuck:
            sys.stderr.write(f"{self._loss}; this process waited for it and ends\n")
            sys.stderr.flush()
            os._exit(1)

    def _explain(self, error: Exception) -> Exception:
        with self._changed:
            if self._changed.wait_for(lambda: self._loss is not None, LOSS_SECONDS):
                assert self._loss is not None
                return self._loss
        return EngineError(
            f"rank 0 failed, and the other ranks cannot go on without it: {type(error).__name__}: {error}"
        )

    def _end(self, patience: float) -> None:
        for process in self._processes.values():
            process.wait(patience)
            process.close()
        torch.set_num_threads(self._num_threads)
