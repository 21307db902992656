"""The ranks' exchange over torch.distributed: NCCL between GPUs, gloo between CPUs, and gloo for a step's numbers."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

_TCP_STORE: Any = vars(dist)["TCPStore"]  # has no annotations
LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(hours=1)
"""How long a rank waits for another, which may be loading. Ranks that die are noticed at once, and ranks that hang by
the engine's parent."""


class Meeting:
    """Where the ranks find each other: a store that listens on the loopback address alone."""

    def __init__(self) -> None:
        # the store's own socket would listen on every address
        listening = socket.create_server((LOOPBACK, 0))
        self.port: int = listening.getsockname()[1]
        self.store: Any = _TCP_STORE(
            LOOPBACK, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )


class TorchCommunicator:
    """A rank's end; implements :class:`~batchinfer.models.parallel.peers.Communicator`. One a process.

    Tensors travel as bytes: every backend takes those, whatever the precision.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: Any) -> None:
        """Returns when all ranks are there."""
        self.rank = rank
        self.size = size
        self._is_gpu = is_gpu = device.type == "cuda"
        # else gloo listens on the address of the host's name, if that can be resolved at all
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=TIMEOUT,
            device_id=device if is_gpu else None,
        )

    @classmethod
    def join(cls, rank: int, size: int, device: torch.device, port: int) -> TorchCommunicator:
        """The end of a rank that did not open the :class:`Meeting`."""
        return cls(rank, size, device, _TCP_STORE(LOOPBACK, port, is_master=False))

    def all_gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """See :meth:`~batchinfer.models.parallel.peers.Communicator.all_gather`."""
        sent = _bytes(x)
        if not sent.numel():
            return [x] * self.size
        found = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(found, sent)
        return [_like(part, x) for part in found]

    def gather(self, x: torch.Tensor) -> Sequence[torch.Tensor] | None:
        """See :meth:`~batchinfer.models.parallel.peers.Communicator.gather`."""
        sent = _bytes(x)
        if not sent.numel():
            return None if self.rank else [x] * self.size
        parts = None if self.rank else [torch.empty_like(sent) for _ in range(self.size)]
        dist.gather(sent, parts, dst=0)
        return None if parts is None else [_like(part, x) for part in parts]

    def all_to_all(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """See :meth:`~batchinfer.models.parallel.peers.Communicator.all_to_all`."""
        sent = _bytes(x)
        if not sent.numel():
            return list(x)
        found = torch.empty_like(sent)
        dist.all_to_all_single(found, sent)
        return list(_like(found, x))

    def broadcast(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rank 0's ``numbers``, in a tensor on the CPU that has their shape and type."""
        dist.broadcast(numbers, src=0)
        return numbers

    def leave(self, *, is_whole: bool = True) -> None:
        """End the exchange, as all ranks do, unless it is not ``is_whole``: NCCL might wait for one that is gone."""
        if is_whole or not self._is_gpu:
            dist.destroy_process_group()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _like(data: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return data.view(x.dtype).view(x.shape)
