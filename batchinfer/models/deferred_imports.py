"""Keeps out of a process what transformers imports and an engine on a CPU never calls.

torch's compiler, with Triton and SymPy behind it, is 150 MB and 1.4 s of CPU time for three decorators and a class;
SciPy's optimisers are 33 MB for one function of a loss. Stand-ins have those names, and become the real modules as soon
as anything else of them is wanted: who compiles models in the same process can go on doing so.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COMPILER, OPTIMIZERS = "torch._dynamo", "scipy.optimize"
WRAPPED_OPS = f"{COMPILER}._trace_wrapped_higher_order_op"


def defer_imports() -> None:
    """Put stand-ins where the real modules are not imported yet. May be called again."""
    if COMPILER not in sys.modules:
        # decorators that matter to what the compiler sees
        _StandIn(COMPILER, disable=_as_it_is, allow_in_graph=_as_it_is, assume_constant_result=_as_it_is)
        _StandIn(WRAPPED_OPS, TransformGetItemToIndex=_later(WRAPPED_OPS, "TransformGetItemToIndex"))
    if OPTIMIZERS not in sys.modules and importlib.util.find_spec("scipy") is not None:
        _StandIn(OPTIMIZERS, linear_sum_assignment=_later(OPTIMIZERS, "linear_sum_assignment"))
    if not any(isinstance(finder, _Submodules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Submodules())


class _StandIn(types.ModuleType):
    """Has some names of a module, and gives the real one's for all others."""

    def __init__(self, name: str, **known: Any) -> None:
        super().__init__(name)
        self.__path__ = []  # a package, whose modules are for _Submodules to find
        vars(self).update(known)
        sys.modules[name] = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by whoever walks over all modules
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


class _Submodules(MetaPathFinder, Loader):
    """Finds modules of a package that is a stand-in still, by importing the package."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """See :meth:`importlib.abc.MetaPathFinder.find_spec`."""
        del path, target
        package = name.rpartition(".")[0]
        if not isinstance(sys.modules.get(package), _StandIn):
            return None
        _real(package)
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """The module itself, imported in the ordinary way."""
        module = importlib.import_module(spec.name)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """It has run already."""
        module.__spec__ = self._own_spec


def _real(name: str) -> types.ModuleType:
    """The module itself, imported now; its package's stand-in goes too."""
    package = COMPILER if name.startswith(COMPILER) else name
    for other in list(sys.modules):
        if other.startswith(package) and isinstance(sys.modules[other], _StandIn):
            del sys.modules[other]
    return importlib.import_module(name)


def _as_it_is(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    return _as_it_is if function is None else function


def _later(module: str, name: str) -> Callable[..., Any]:
    """A function or class of a module that is imported when it is called."""

    def call(*arguments: Any, **named: Any) -> Any:
        return getattr(_real(module), name)(*arguments, **named)

    return call
