"""What runs in an engine process: build the engine, then step it while requests come and completions go.

The process outlives signals meant for its parent (Ctrl-C, SIGTERM: the parent drains first) but never the parent
itself: when the pipe from it ends, it ends. (``PR_SET_PDEATHSIG`` would not do: it fires when the parent's *thread*
ends that started the child.)
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import queue
import select
import signal
import sys
import threading
import time
import traceback
from typing import IO, TYPE_CHECKING, Any, NoReturn

from batchinfer.engine.config import EngineConfig
from batchinfer.engine.device_faults import DeviceFault, fault_of, first_sentence
from batchinfer.engine.wire import completion_to_json, progress_to_json, read_message, request_from_json, write_message
from batchinfer.errors import DeviceUnhealthyError, EngineError, UserError
from batchinfer.types import Completion, ErrorCode, RowError, RowStatus

if TYPE_CHECKING:
    from batchinfer.engine.protocol import EngineProtocol

STATS_SECONDS = 0.25
"""Steps without a completion report so often."""
PARENT_CHECK_SECONDS = 1.0
CLOSE_SECONDS = 10.0
"""How long a step may still run after the parent said to close."""
EXIT_CODES = {DeviceFault.POISONED: 70, DeviceFault.UNHEALTHY: 71}
"""Of a process whose device failed: it ends at once, since what it still asks of the device may never return."""


def main(read_fd: int, write_fd: int) -> None:
    """Serve the parent at the other ends of two pipes until it says ``close`` or ends."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=receive, args=(read_fd, os.getppid(), inbox), daemon=True).start()
    with os.fdopen(write_fd, "wb") as pipe:
        try:
            engine = _build(inbox.get())
        except BaseException as error:  # noqa: BLE001 -- whatever it is, the parent has to know
            write_message(pipe, failure(error))
            _end_if_device_failed(error)
            return
        try:
            _serve(engine, inbox, pipe)
        except Exception as error:  # noqa: BLE001 -- as above
            write_message(pipe, failure(error))
            _end_if_device_failed(error)
        finally:
            engine.close()


def _build(start: dict[str, Any]) -> EngineProtocol:
    module, _, name = start["factory"].partition(":")
    factory = getattr(importlib.import_module(module), name)
    engine: EngineProtocol = factory(EngineConfig.from_json(start["config"]))
    gc.freeze()  # what is there now stays, and need not be looked through for garbage between steps
    return engine


def _serve(engine: EngineProtocol, inbox: queue.SimpleQueue[dict[str, Any]], pipe: IO[bytes]) -> None:
    write_message(pipe, {"type": "ready", "stats": engine.stats().to_dict()})
    reported = time.monotonic()
    while True:
        refused: list[Completion] = []
        is_asked = False
        while not inbox.empty() or not (engine.has_unfinished() or refused or is_asked):
            message = inbox.get()
            if message["type"] == "close":
                return
            refused += _obey(engine, message)
            is_asked |= bool(message.get("progress"))
        if is_asked:
            rows = {request_id: progress_to_json(samples) for request_id, samples in engine.progress().items()}
            write_message(pipe, {"type": "progress", "rows": rows, "stats": engine.stats().to_dict()})
        completions = refused + (engine.step() if engine.has_unfinished() else [])
        now = time.monotonic()
        if completions or now - reported >= STATS_SECONDS or not engine.has_unfinished():
            reported = now
            report = [completion_to_json(completion) for completion in completions]
            write_message(pipe, {"type": "step", "completions": report, "stats": engine.stats().to_dict()})


def _obey(engine: EngineProtocol, message: dict[str, Any]) -> list[Completion]:
    """Do what a message says; return the error rows of requests that the engine would not even queue."""
    for request_id in message.get("abort", ()):
        engine.abort(request_id)
    refused = []
    for data in message.get("submit", ()):
        try:
            engine.add_request(request_from_json(data))
        except Exception as error:  # noqa: BLE001 -- one row must not cost its neighbours
            row_error = RowError(ErrorCode.ENGINE_ERROR, f"{type(error).__name__}: {error}")
            refused.append(Completion(data["request_id"], RowStatus.ERRORED, error=row_error))
    return refused


def _end_if_device_failed(error: BaseException) -> None:
    fault = _device_fault(error)
    if fault in EXIT_CODES:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_CODES[fault])


def _device_fault(error: BaseException) -> DeviceFault | None:
    return DeviceFault.UNHEALTHY if isinstance(error, DeviceUnhealthyError) else fault_of(error)


def failure(error: BaseException) -> dict[str, Any]:
    """The message that tells a parent why this process ends; the traceback goes to the output."""
    traceback.print_exception(error)
    if _device_fault(error) is DeviceFault.UNHEALTHY and not isinstance(error, (UserError, DeviceUnhealthyError)):
        error = DeviceUnhealthyError(f"the device is not well: {first_sentence(error)}")
    is_deliberate = isinstance(error, (UserError, EngineError))
    return {
        "type": "failed",
        "kind": type(error).__name__ if is_deliberate else "EngineError",
        "message": str(error) if is_deliberate else f"{type(error).__name__}: {' '.join(str(error).split())}",
        "code": getattr(error, "code", None),
        "param": getattr(error, "param", None),
    }


def receive(read_fd: int, parent: int, inbox: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Pass the parent's messages on; end the process when the parent is gone."""

    def read(size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            # another child of the parent may hold the pipe open, so its end is not the only sign
            while not select.select([read_fd], [], [], PARENT_CHECK_SECONDS)[0]:
                if os.getppid() != parent:
                    return b""
            part = os.read(read_fd, min(size - len(parts), 1 << 20))
            if not part:
                return b""
            parts += part
        return bytes(parts)

    while (message := read_message(read)) is not None:
        inbox.put(message)
        if message["type"] == "close":
            time.sleep(CLOSE_SECONDS)
            break
    end_now()


def end_now() -> NoReturn:
    """End this process and what it started, such as compilers, without another word."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
