"""How fast a device could run a workload: two bounds from its data sheet, sequential and overlapped. No torch.

A step's matrix products, attention, activations and head take operations (over the device's peak), bytes (over its
bandwidth) and, with several devices, bytes between them (over their link). *Sequential* sums the three, as if none hid
another; *overlap* takes the largest of the three, as if the others hid behind it. Real engines lie near the sequential
bound: kernels follow each other, and each is bound by one of the two. Launches, sampling, scheduling and the host are not
in it, nor is a device below its peak clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchinfer.errors import InvalidSpecError

if TYPE_CHECKING:
    from batchinfer.engine.devices import Device
    from batchinfer.engine.model_shape import ModelShape

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2 / 128}
"""Of a weight. INT4 has a 16-bit scale every 128 weights; scales a channel are too few to count."""
ACTIVATION_BYTES = 2
LOGIT_BYTES = 4
KV_SCALE_BYTES = 4
"""One float32 a token, head and layer, for keys and again for values, beside INT8."""
MEMORY_SHARE = 0.9
"""Of a device's memory that weights and KV cache may fill."""
GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Precision:
    """Of weights, of what they are multiplied with, of the KV cache and of the head's matrix."""

    weights: str = "bf16"
    activations: str = "bf16"
    kv: str = "bf16"
    head: str = "bf16"

    @property
    def unit(self) -> str:
        """The matrix unit of the layers' products: the weights' if activations are as narrow, else :attr:`wide_unit`."""
        return self.weights if self.weights == self.activations else self.wide_unit

    @property
    def wide_unit(self) -> str:
        """The unit of attention, and of products whose weights are narrower than their rows."""
        return "fp32" if "fp32" in (self.activations, self.kv) else "bf16"

    @property
    def head_unit(self) -> str:
        """The unit of the product with the vocabulary."""
        return self.head if self.head == self.activations else self.wide_unit


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows of equal lengths in tokens, ``num_groups`` sets of which share a prefix of ``shared`` tokens each."""

    num_rows: float
    prompt: float
    """With the shared prefix."""
    output: float
    shared: float = 0.0
    num_groups: float = 1.0
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    """Tokens of a prefill step."""
    reads_shared_once: bool = True
    """Attention reads a prefix once a step for all rows of its group; otherwise once a row."""

    def __post_init__(self) -> None:
        if not 0 <= self.shared <= self.prompt or self.num_rows <= 0 or self.num_groups < 1 or self.output < 0:
            raise ValueError("a workload needs rows, and a shared prefix no longer than the prompt")

    @property
    def own(self) -> float:
        """Prompt tokens of a row that no other has."""
        return self.prompt - self.shared


@dataclass(frozen=True, slots=True)
class Phase:
    """Seconds of prefill or decode: computing, reading and writing memory, and speaking to other devices."""

    compute: float = 0.0
    memory: float = 0.0
    link: float = 0.0

    @property
    def sequential(self) -> float:
        """None hides another."""
        return self.compute + self.memory + self.link

    @property
    def overlap(self) -> float:
        """The longest hides the others."""
        return max(self.compute, self.memory, self.link)

    def __add__(self, other: Phase) -> Phase:
        return Phase(self.compute + other.compute, self.memory + other.memory, self.link + other.link)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a workload takes at least."""

    workload: Workload
    batch: float
    """Rows that run at once."""
    prefill: Phase
    decode: Phase

    @property
    def total(self) -> Phase:
        """Both phases."""
        return self.prefill + self.decode

    @property
    def output_tokens_per_second(self) -> tuple[float, float]:
        """By the sequential and by the overlap bound."""
        tokens = self.workload.num_rows * self.workload.output
        return tokens / self.total.sequential, tokens / self.total.overlap


def kv_bytes_per_token(shape: ModelShape, kv: str) -> float:
    """Bytes of a token's keys and values in all layers; INT8 has a scale a head beside them."""
    if kv != "int8":
        return shape.kv_values_per_token * BYTES[kv]
    return shape.kv_values_per_token + shape.kv_values_per_token / shape.head_dim * KV_SCALE_BYTES


def weight_bytes(shape: ModelShape, precision: Precision) -> float:
    """Bytes that the model takes: layers, the head, and an embedding in bfloat16 where it is another matrix."""
    head = shape.head_weights * BYTES[precision.head]
    # a tied head of another precision is a second copy
    embedding = 0.0 if shape.is_tied and precision.head == "bf16" else shape.head_weights * BYTES["bf16"]
    return shape.layer_weights * BYTES[precision.weights] + head + embedding


def activation_bytes_per_token(shape: ModelShape) -> float:
    """Bytes that a token's activations move between kernels, in all layers, each kernel reading and writing once.

    With hidden size h, query width q, KV width k and MLP width m (of all experts of a token): norms ``8 h`` (two, each
    reads the residual and its input and writes both), the products ``4 h + 2 q + 2 k + 3 m``, rotation ``2 q + 2 k``,
    attention ``2 q``, activation function ``3 m``; together ``12 h + 6 q + 4 k + 6 m`` values of two bytes.
    """
    q, k = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    mlp = shape.mlp_size * (shape.experts_per_token or 1) + shape.shared_mlp_size
    return ACTIVATION_BYTES * shape.num_layers * (12 * shape.hidden_size + 6 * q + 4 * k + 6 * mlp)


def batch_size(device: Device, shape: ModelShape, precision: Precision, work: Workload) -> float:
    """Rows that fit at once: each holds its own prompt and half of its answer on the average, a group its prefix once.

    Raises:
        InvalidSpecError: the weights, or one whole row beside them, do not fit.
    """
    memory = MEMORY_SHARE * device.memory * device.num_devices
    # KV heads are divided over the devices; each has at least one
    copies = max(1.0, device.num_devices / shape.num_kv_heads)
    per_token = kv_bytes_per_token(shape, precision.kv) * copies
    room = (memory - weight_bytes(shape, precision)) / per_token
    if room < work.prompt + work.output:
        needs = (weight_bytes(shape, precision) + (work.prompt + work.output) * per_token) / GIGA
        raise InvalidSpecError(
            f"{device.name} has {memory / GIGA:.0f} GB for the model and its KV cache, and {needs:.0f} GB are the least; "
            "take more devices (h200x2), a larger one, or INT8 weights",
            param="device",
        )
    row = max(1.0, work.own + work.output / 2)
    spread = room / (row + work.shared * work.num_groups / work.num_rows)
    return max(1.0, min(work.num_rows, work.max_num_seqs, spread, (room - work.shared) / row))


def predict(device: Device, shape: ModelShape, precision: Precision, work: Workload) -> Prediction:
    """Both bounds of a workload, prefill and decode apart (a step that mixes them reads the weights once for both).

    Raises:
        InvalidSpecError: it does not fit, or the device lacks a unit.
    """
    batch = batch_size(device, shape, precision, work)
    costs = Costs(device, shape, precision)
    return Prediction(work, batch, _prefill(costs, work), _decode(costs, work, batch))


def _prefill(costs: Costs, work: Workload) -> Phase:
    """Every prompt token once, a shared prefix once a group, in steps of ``max_num_batched_tokens``.

    Row i's own tokens see ``shared + (own + 1) / 2`` tokens on the average, a prefix' tokens ``(shared + 1) / 2``. The
    step reads the prefix of its rows once (or once a row), and each row's own tokens once.
    """
    groups = work.num_groups
    tokens = work.num_rows * work.own + groups * work.shared
    steps = max(1.0, tokens / work.max_num_batched_tokens)
    pairs = work.num_rows * work.own * (work.shared + (work.own + 1) / 2) + groups * work.shared * (work.shared + 1) / 2
    readers = min(work.num_rows, max(steps, groups)) if work.reads_shared_once else work.num_rows
    read = work.num_rows * work.own + readers * work.shared
    return costs.phase(tokens=tokens, steps=steps, sampled=work.num_rows, pairs=pairs, kv_read=read)


def _decode(costs: Costs, work: Workload, batch: float) -> Phase:
    """Each answer token but the first in a step of ``batch`` rows, at a context of prompt and half of the answer."""
    tokens = work.num_rows * max(0.0, work.output - 1)
    steps = tokens / batch
    if not tokens:
        return Phase()
    pairs = tokens * (work.prompt + work.output / 2)
    prefixes = max(1.0, batch * work.num_groups / work.num_rows) if work.reads_shared_once else batch
    read = tokens * (work.own + work.output / 2) + steps * min(batch, prefixes) * work.shared
    return costs.phase(tokens=tokens, steps=steps, sampled=tokens, pairs=pairs, kv_read=read)


def restore_seconds(device: Device, shape: ModelShape, precision: Precision, tokens: float) -> tuple[float, float]:
    """A prefix' KV cache fetched from the host, and computed again in one step (overlap bound).

    Fetching moves its bytes over each device's PCIe; computing runs its tokens through the layers, not the head.
    """
    fetch = tokens * kv_bytes_per_token(shape, precision.kv) / (device.pcie * device.num_devices)
    costs = Costs(device, shape, precision)
    phase = costs.phase(tokens=tokens, steps=1, sampled=0, pairs=tokens * (tokens + 1) / 2, kv_read=0)
    return fetch, phase.overlap


class Costs:
    """Seconds of counted work on a device."""

    def __init__(self, device: Device, shape: ModelShape, precision: Precision) -> None:
        self._device = device
        self._shape = shape
        self._precision = precision

    def phase(self, *, tokens: float, steps: float, sampled: float, pairs: float, kv_read: float) -> Phase:
        """``pairs``: of a query and a token of its context; ``kv_read``: tokens of context read, over all steps."""
        device, shape, number = self._device, self._shape, self._device.num_devices
        precision = self._precision
        products = 2 * tokens * shape.layer_weights_per_token / device.peak(precision.unit)
        head = 2 * sampled * shape.head_weights / device.peak(precision.head_unit)
        attention = pairs * shape.attention_operations / device.peak(precision.wide_unit)

        layers = steps * shape.layer_weights_read(tokens / steps) * BYTES[precision.weights]
        heads = (steps if sampled else 0) * shape.head_weights * BYTES[
            precision.head
        ] + 2 * sampled * shape.vocab_size * LOGIT_BYTES
        copies = max(1.0, number / shape.num_kv_heads)
        cache = (kv_read + tokens) * kv_bytes_per_token(shape, precision.kv) * copies
        moved = tokens * activation_bytes_per_token(shape)
        return Phase(
            compute=(products + head + attention) / number,
            memory=(layers + heads + cache + moved) / number / device.bandwidth,
            link=self._link(tokens, sampled),
        )

    def _link(self, tokens: float, sampled: float) -> float:
        """Two all-reduces a layer of a token's hidden state, and a gather of its logits.

        A ring moves ``2 (n - 1) / n`` of the bytes through each device's link and direction, a gather ``(n - 1) / n``.
        """
        number, shape = self._device.num_devices, self._shape
        reduced = 2 * shape.num_layers * tokens * shape.hidden_size * ACTIVATION_BYTES * 2
        gathered = sampled * shape.vocab_size * LOGIT_BYTES
        return (reduced + gathered) * (number - 1) / number / self._device.peer
