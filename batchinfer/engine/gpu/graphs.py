"""Work that is captured once, and then launched as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class GraphBackend(Protocol):
    """Captures work on buffers that stay where they are."""

    def capture(self, run: Callable[[], T]) -> Callable[[], T]:
        """What runs the same kernels on the same memory again; its result is the same tensors with new numbers.

        ``run`` must read nothing from the host but what never changes. It runs a few times before.
        """


class CudaGraphs:
    """CUDA graphs that share one memory pool. Capture the largest first: the others then fit in what it has left."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def capture(self, run: Callable[[], T]) -> Callable[[], T]:
        """See :meth:`GraphBackend.capture`."""
        main = torch.cuda.current_stream(self._device)
        stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(main)
        with torch.cuda.stream(
            stream
        ):  # kernels are compiled, and libraries take their workspaces, outside of the capture
            run()
        main.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                output = run()
        except RuntimeError:
            torch.cuda.set_stream(main)  # a capture that fails leaves its own stream behind
            raise
        self._pool = self._pool or graph.pool()

        def replay() -> T:
            graph.replay()
            return output

        return replay
