"""What runs in the process of a rank other than 0: load a share of the model, then compute the steps that rank 0 tells.

It ends when rank 0 does, and like an engine process it leaves signals to its parent.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import threading
from typing import IO, TYPE_CHECKING, Any

import torch

from batchinfer.engine.attention import ATTENTION_NAME, register_attention
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.memory import give_back_memory
from batchinfer.engine.model_runner import ModelRunner
from batchinfer.engine.parallel.communicator import TorchCommunicator
from batchinfer.engine.parallel.devices import place_weights, use_device
from batchinfer.engine.parallel.step import read_step
from batchinfer.engine.process_child import failure, receive
from batchinfer.engine.wire import write_message
from batchinfer.models.load import load_model
from batchinfer.models.parallel.peers import Peers
from batchinfer.models.parallel.shard import Shard

if TYPE_CHECKING:
    Inbox = queue.SimpleQueue[dict[str, Any]]


def main(read_fd: int, write_fd: int) -> None:
    """Serve rank 0 at the other ends of two pipes until it says ``close`` or ends."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=receive, args=(read_fd, os.getppid(), inbox), daemon=True).start()
    with os.fdopen(write_fd, "wb") as pipe:
        try:
            _serve(inbox, pipe)
        except BaseException as error:  # noqa: BLE001 -- whatever it is, rank 0 has to know
            write_message(pipe, failure(error))


def _serve(inbox: Inbox, pipe: IO[bytes]) -> None:
    start = inbox.get()
    if start["type"] == "close":
        return
    config, rank = EngineConfig.from_json(start["config"]), start["rank"]
    size = config.tensor_parallel_size
    register_attention()
    loaded = load_model(config, ATTENTION_NAME, may_defer=True, shard=Shard(rank, size))
    use_device(loaded.device, size)
    write_message(pipe, {"type": "started"})
    communicator = TorchCommunicator.join(rank, size, loaded.device, start["port"])
    place_weights(loaded)
    runner = ModelRunner(loaded, config, owns_model=True, peers=Peers(communicator))
    del loaded
    give_back_memory()
    while (message := inbox.get())["type"] == "step":
        numbers = communicator.broadcast(torch.empty(message["size"], dtype=torch.int64))
        runner.execute(*read_step(numbers))
    communicator.leave()
