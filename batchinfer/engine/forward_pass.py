"""What turns a step's tokens into logits: fused layers for the families that have them, else transformers' modules."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from batchinfer.engine.head_output import HeadOutput
from batchinfer.engine.native_attention import NativeAttention
from batchinfer.engine.quantization import linears
from batchinfer.errors import ModelError
from batchinfer.models.deferred import read_all
from batchinfer.models.fused.convert import convert
from batchinfer.models.fused.families import FAMILIES, describe
from batchinfer.models.parallel.modules import share_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchinfer.engine.attention_backend import AttentionBackend
    from batchinfer.models.fused.adapted import AdapterGroup, AdapterSlots
    from batchinfer.models.fused.spec import DecoderSpec, LayerAttention
    from batchinfer.models.load import LoadedModel
    from batchinfer.models.parallel.peers import Peers

PROFILE_STEPS = 32
"""One step in so many is timed in parts."""
_log = logging.getLogger(__name__)


class ForwardPass(Protocol):
    """The model, whichever way it runs."""

    @property
    def name(self) -> str:
        """Which way: ``fused`` or ``transformers``."""

    @property
    def recipe(self) -> str:
        """How the weights are quantised; empty if they are not."""

    @property
    def adapters(self) -> AdapterSlots | None:
        """What LoRA adapters can change; None if it takes none."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        sampling: torch.Tensor,
        context: Any,
        kept: Sequence[int],
        *,
        hidden: torch.Tensor | None = None,
        groups: Sequence[AdapterGroup] = (),
    ) -> HeadOutput:
        """The best token of each row in ``sampling``, and the logits of those at the places ``kept`` of it.

        ``token_ids`` and ``positions`` are int64 with a row each of the packed batch; ``context`` is the attention
        backend's for this step. ``hidden`` are rows whose hidden states after the last norm are wanted, ``groups`` those
        that use adapters.
        """

    def profile(self) -> dict[str, int]:
        """Nanoseconds of the parts of the model in the steps that were timed; see the fields of ``EngineStats``."""


class TransformersPass:
    """transformers' own modules: any decoder it has, and the reference of all others."""

    name = "transformers"
    recipe = ""
    adapters = None

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        sampling: torch.Tensor,
        context: Any,
        kept: Sequence[int],
        *,
        hidden: torch.Tensor | None = None,
        groups: Sequence[AdapterGroup] = (),
    ) -> HeadOutput:
        """See :class:`ForwardPass`."""
        assert not groups, "rows with adapters were refused before"
        states: list[torch.Tensor] = []
        hook = None
        if hidden is not None:
            body = self._model.base_model
            hook = body.register_forward_hook(lambda _m, _i, output: states.append(output.last_hidden_state[0]))
        try:
            logits: torch.Tensor = self._model(
                input_ids=token_ids.unsqueeze(0),
                attention_mask=_no_look_at_positions(token_ids),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=sampling,
                paged_context=context,
            ).logits[0]
        finally:
            if hook is not None:
                hook.remove()
        output = HeadOutput.of_logits(logits, kept)
        if hidden is None:
            return output
        return replace(output, hidden=states[0].index_select(0, hidden).float())

    def profile(self) -> dict[str, int]:
        """See :meth:`ForwardPass.profile`: transformers' modules are not taken apart."""
        return {}


def _no_look_at_positions(token_ids: torch.Tensor) -> torch.Tensor | None:
    """A mask that hides nothing: without one, transformers looks for packed sequences in the positions.

    On a GPU each such look would wait for everything that is queued.
    """
    if token_ids.device.type == "cpu":
        return None
    return token_ids.new_ones((1, len(token_ids)), dtype=torch.bool)


class FusedPass:
    """The layers of :mod:`batchinfer.models.fused`; every :data:`PROFILE_STEPS` steps the parts' time is taken."""

    name = "fused"

    def __init__(
        self,
        decoder: Any,
        recipe: str = "",
        *,
        takes_adapters: bool = True,
        context_of: Callable[[Any], Any] | None = None,
    ) -> None:
        """``context_of`` makes the layers' context of the attention's; where it does, clocks on the host see nothing."""
        self._decoder = decoder
        self._takes_adapters = takes_adapters
        self.recipe = recipe
        self._context_of = context_of
        self._spent: dict[str, int] = {}
        self._timed = None if context_of else decoder.timed(self._spent)
        self._num_calls = 0
        self._profiled_ns = 0

    @property
    def adapters(self) -> AdapterSlots | None:
        """See :class:`ForwardPass`."""
        slots: AdapterSlots = self._decoder.adapters
        return slots if self._takes_adapters else None

    def profile(self) -> dict[str, int]:
        """See :meth:`ForwardPass.profile`."""
        if self._timed is None:
            return {}
        return {f"{kind}_ns": ns for kind, ns in self._spent.items()} | {"profiled_ns": self._profiled_ns}

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        sampling: torch.Tensor,
        context: Any,
        kept: Sequence[int],
        *,
        hidden: torch.Tensor | None = None,
        groups: Sequence[AdapterGroup] = (),
    ) -> HeadOutput:
        """See :class:`ForwardPass`."""
        self._num_calls += 1
        if self._context_of is not None:
            context = self._context_of(context)
        if hidden is not None:
            reduce, states = self._decoder.with_hidden(token_ids, positions, context, hidden, groups=groups)
            return replace(HeadOutput.of_reduction(reduce(sampling, kept)), hidden=states)
        if self._timed is None or self._num_calls % PROFILE_STEPS:
            return HeadOutput.of_reduction(self._decoder(token_ids, positions, sampling, context, kept, groups=groups))
        started = time.perf_counter_ns()
        output = HeadOutput.of_reduction(self._timed(token_ids, positions, sampling, context, kept, groups=groups))
        self._profiled_ns += time.perf_counter_ns() - started
        return output


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """What fused layers run on beside an attention."""

    ops: Any
    dtype: torch.dtype
    """Of queries."""
    context_of: Callable[[Any], Any] | None = None
    """See :class:`FusedPass`."""
    why_not: Callable[[DecoderSpec], str | None] = lambda _: None
    """Why the kernels cannot run a decoder; None if they can."""


def _layer_kernels(attention: AttentionBackend, loaded: LoadedModel) -> LayerKernels | None:
    """None if there are none beside this attention."""
    if isinstance(attention, NativeAttention):
        return LayerKernels(attention.ops, attention.dtype)
    if attention.name != "triton":
        return None
    from batchinfer.engine import triton_layers  # noqa: PLC0415 -- needs Triton

    ops = triton_layers.ops_of(attention, loaded.device)
    return LayerKernels(ops, ops.dtype, triton_layers.LayerContext, triton_layers.why_not_fused)


def choose_forward(
    loaded: LoadedModel,
    layers: Sequence[LayerAttention],
    attention: AttentionBackend,
    quantization: str = "none",
    *,
    owns_model: bool = False,
    peers: Peers | None = None,
) -> ForwardPass:
    """The fastest way this model can run on this attention.

    With ``owns_model`` its weights are given up as the fused layers take them over. With ``peers`` it is a rank's share
    of a model.

    Raises:
        ModelError: quantisation is asked for, and the model has no fused layers to quantise.
    """
    kernels = _layer_kernels(attention, loaded)
    spec = None if kernels is None else describe(loaded.model, layers, loaded.max_model_len)
    reason = None if kernels is None or spec is None else kernels.why_not(spec)
    if kernels is not None and spec is not None and reason is None:
        make = linears(quantization, loaded, spec, kernels.ops)
        decoder = convert(kernels.ops, spec, kernels.dtype, make, releases_weights=owns_model, peers=peers)
        _log.info("model %s runs in fused layers, quantization %s", loaded.name, make.recipe or "none")
        return FusedPass(decoder, make.recipe, takes_adapters=peers is None, context_of=kernels.context_of)
    if quantization != "none":
        raise ModelError(
            f"quantization {quantization} needs the fused layers, which are for the CPU and for Triton's attention, a "
            f"block_size of a multiple of 16 and the families {', '.join(sorted(FAMILIES))}"
            f"{f': {reason}' if reason else ''}; use quantization none",
            param="quantization",
        )
    read_all(loaded.model)
    if peers is not None:
        share_modules(loaded.model, peers)
    _log.info("model %s runs in transformers' modules", loaded.name)
    return TransformersPass(loaded.model)
