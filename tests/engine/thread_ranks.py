"""Ranks of tensor parallelism as threads of one process: what they exchange, without processes."""

import threading

from batchinfer.models.parallel.peers import Peers


class ThreadCommunicator:
    """A rank's end of an exchange in memory."""

    def __init__(self, rank, size, board, barrier, counts):
        self.rank, self.size = rank, size
        self._board, self._barrier, self._counts = board, barrier, counts

    def all_gather(self, x):
        self._count("all_gather", x)
        return self._exchange(x)

    def gather(self, x):
        self._count("gather", x)
        found = self._exchange(x)
        return found if self.rank == 0 else None

    def all_to_all(self, x):
        assert x.dim() == 2
        assert len(x) == self.size
        self._count("all_to_all", x)
        return [other[self.rank] for other in self._exchange(x)]

    def _exchange(self, x):
        self._board[self.rank] = x.clone()
        self._barrier.wait(60)
        found = [other.clone() for other in self._board]
        self._barrier.wait(60)
        assert len({tuple(other.shape) for other in found}) == 1, "shapes differ between ranks"
        assert len({other.dtype for other in found}) == 1
        return found

    def _count(self, kind, x):
        if self.rank == 0:
            self._counts.append((kind, x.nbytes))


def run_ranks(size, work, counts=None, **settings):
    """``work(peers)`` on each rank at once; what each returns, by rank."""
    board, barrier, results, errors = [None] * size, threading.Barrier(size), [None] * size, []

    def run(rank):
        try:
            communicator = ThreadCommunicator(rank, size, board, barrier, counts if counts is not None else [])
            results[rank] = work(Peers(communicator, **settings))
        except Exception as error:  # noqa: BLE001 -- raised again below
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results
