"""Check every case against its oracle on the device, then time it, and torch's own beside it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.case import TINY, Sizes, UnsupportedError
from benchmarks.gpu.catalogue import chosen_cases
from benchmarks.gpu.hardware import hardware, known_device
from benchmarks.gpu.timing import Stopwatch, copy_bandwidth

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from batchinfer.engine.devices import Device
    from benchmarks.gpu.case import Call, Case

Message = dict[str, Any]


def run_kernels(options: argparse.Namespace, first: int, deadline: float) -> Iterator[Message]:
    """Messages: what this machine is and the names of the cases, then each case's begin and result.

    Begins with case ``first``; cases that begin after ``deadline`` (of ``time.monotonic``) are named as skipped. Ends
    early if the device takes no more work, for a fresh process to go on.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = chosen_cases(Sizes() if device.type == "cuda" else TINY, options.only, is_quick=options.quick)
    watch = Stopwatch(device, seconds=0.05 if options.quick else 0.15) if device.type == "cuda" else None
    about = hardware(device)
    sheet = known_device(about["device"])
    if not first:
        about["data_sheet"] = sheet and sheet.name
        about["copy_bytes_per_second"] = watch and copy_bandwidth(device, watch)
    yield {"type": "machine", "about": about, "cases": [[case.op, case.name, case.goal] for case in cases]}
    for index in range(first, len(cases)):
        case = cases[index]
        yield {"type": "begin", "index": index}
        if time.monotonic() > deadline:
            yield {"type": "case", "index": index, "status": "skipped", "detail": "the time is up"}
            continue
        yield {"type": "case", "index": index, **run_case(case, device, sheet, watch)}
        if not _is_well(device):
            return


def run_case(case: Case, device: torch.device, sheet: Device | None, watch: Stopwatch | None) -> Message:
    """One case's verdict and, with a watch, its figures; whatever it raises is its verdict."""
    try:
        call = case.build(device)
        with torch.inference_mode():
            found = call.run()
            with torch.device(device):  # oracles make tensors where the default is
                error = call.error(found, call.expected())
    except UnsupportedError as reason:
        return {"status": "unsupported", "detail": str(reason)}
    except Exception as failure:  # noqa: BLE001 -- one kernel's failure must not hide the others' results
        return {"status": "failed", "detail": f"{type(failure).__name__}: {' '.join(str(failure).split())[:500]}"}
    del found
    verdict: Message = {"status": "ok" if error <= 1 else "wrong", "error": error}
    try:
        with torch.inference_mode():
            verdict |= {} if watch is None else _figures(call, sheet, watch)
            verdict |= {} if call.peer is None else _peer(*call.peer, watch)
    except Exception as failure:  # noqa: BLE001 -- as above
        verdict |= {"status": "failed", "detail": f"while timed, {type(failure).__name__}: {str(failure)[:300]}"}
    return verdict


def _figures(call: Call, sheet: Device | None, watch: Stopwatch) -> Message:
    seconds = watch.seconds(call.run)
    figures: Message = {
        "seconds": seconds,
        "bytes_per_second": call.work.num_bytes / seconds,
        "operations_per_second": call.work.operations / seconds,
    }
    if sheet is not None:
        least, waits_for = call.work.seconds(sheet)
        figures |= {"least_seconds": least, "waits_for": waits_for, "share": least / seconds}
    return figures


def _peer(name: str, run: Callable[[], object], watch: Stopwatch | None) -> Message:
    try:
        run()
        return {"peer": name} if watch is None else {"peer": name, "peer_seconds": watch.seconds(run)}
    except Exception as failure:  # noqa: BLE001 -- torch's own may lack a type or a shape
        return {"peer": name, "peer_error": f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"}


def _is_well(device: torch.device) -> bool:
    """Whether the device takes further work: after a fault CUDA refuses everything until the process ends."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True
