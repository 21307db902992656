"""Where a step's time goes, found by running now and then through wrappers that look at the clock; else it costs nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

GEMM, ATTENTION, ELEMENTWISE, HEAD = "gemm", "attention", "elementwise", "head"
LINEAR_KINDS = {"__call__": GEMM, "norm": ELEMENTWISE, "convert": ELEMENTWISE, "act_and_mul": ELEMENTWISE}
OPS_KINDS = {
    "paged_attention": ATTENTION,
    "rope_and_kv_write": ELEMENTWISE,
    "rms_norm": ELEMENTWISE,
    "convert": ELEMENTWISE,
}
HEAD_KINDS = {"__call__": HEAD, "norm": ELEMENTWISE}


class Timed:
    """Stands for ``target``; the time of the methods in ``kinds`` is added to ``spent`` (nanoseconds by kind)."""

    def __init__(self, target: Any, kinds: Mapping[str, str], spent: dict[str, int]) -> None:
        self._target = target
        self._spent = spent
        self._methods = {name: self._wrap(getattr(target, name), kind) for name, kind in kinds.items()}

    def __getattr__(self, name: str) -> Any:
        return self._methods.get(name) or getattr(self._target, name)

    def __call__(self, *arguments: Any) -> Any:
        """Call the target."""
        return self._methods["__call__"](*arguments)

    def _wrap(self, method: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter_ns()
            result = method(*arguments, **named)
            self._spent[kind] = self._spent.get(kind, 0) + time.perf_counter_ns() - started
            return result

        return timed
