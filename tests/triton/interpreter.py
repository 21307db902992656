"""Makes Triton's interpreter strict enough to stand in for a GPU.

The stock interpreter multiplies the bits of bfloat16 numbers as integers, truncates float32 to bfloat16, ignores accesses
outside of a tensor and gives zeros for masked lanes. :func:`install` patches it so that

- casts to and from bfloat16 and float16 round as torch does, and ``tl.dot`` of half-precision operands is right;
- arithmetic in half precision is refused: this project's kernels compute in float32;
- an access outside of the tensor whose pointer it started from raises IndexError;
- masked lanes of a load without ``other`` hold NaN or the largest integer, as a GPU may give anything there;
- int32 arithmetic that wraps raises OverflowError, a cast of a float that no integer holds raises ValueError;
- two programs that store to the same address raise RuntimeError: on a GPU either could win;
- float32 dots must say how precise they are.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any kernel module is imported

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as stock

Builder = stock.InterpreterBuilder
Handle = stock.TensorHandle
HALF = (tl.bfloat16, tl.float16)
CHECKED_ARITHMETIC = (np.add, np.subtract, np.multiply)
COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)
# operations that keep where a pointer came from
POINTER_KEEPING = ("create_addptr", "create_broadcast", "create_expand_dims", "create_reshape", "create_trans")


class Launch:
    """What is known of the running launch: the extents of its tensors, and who stored where."""

    def __init__(self) -> None:
        self.extents: list[tuple[int, int]] = []
        self.reachable: list[tuple[int, int]] = []
        """Extents of what kernels find by an address in a tensor; tests add to it with :func:`reach`."""
        self.stores: dict[tuple[int, int, int], list[np.ndarray]] = {}
        self.has_other = False
        """Whether the load that runs gave an ``other``: the stock interpreter drops one that is a single zero."""

    def begin(self) -> None:
        """Forget the launch before."""
        self.extents.clear()
        self.stores.clear()

    def check_races(self) -> None:
        """Raise if an address was stored to by two programs."""
        programs = [np.unique(np.concatenate(chunks)) for chunks in self.stores.values()]
        if not programs:
            return
        addresses, counts = np.unique(np.concatenate(programs), return_counts=True)
        if (counts > 1).any():
            raise RuntimeError(f"race: {int((counts > 1).sum())} addresses stored by several programs, "
                               f"the first at {int(addresses[counts > 1][0]):#x}")  # fmt: skip


launch = Launch()


def reach(*tensors: Any) -> None:
    """Let kernels read what they find by an address in a tensor, and nothing else of that kind."""
    launch.reachable[:] = [_extent(tensor) for tensor in tensors]


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(numbers: np.ndarray) -> np.ndarray:
    """Round to nearest even; NaN stays NaN."""
    numbers = np.ascontiguousarray(numbers, dtype=np.float32)
    bits = numbers.view(np.uint32)
    rounded = (bits.astype(np.uint64) + ((bits >> 16) & 1) + 0x7FFF) >> 16
    return np.where(np.isnan(numbers), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def widened(handle: Any) -> Any:
    """A half-precision handle in float32; any other as it is."""
    if handle.dtype.scalar == tl.bfloat16:
        return Handle(bf16_to_f32(handle.data), tl.float32)
    if handle.dtype.scalar == tl.float16:
        return Handle(handle.data.astype(np.float32), tl.float32)
    return handle


def refuse_half(*handles: Any) -> None:
    for handle in handles:
        if handle.dtype.scalar in HALF:
            raise TypeError(f"arithmetic in {handle.dtype.scalar}: cast to float32 first")


def install() -> None:
    """Patch the interpreter; may be called again."""
    if getattr(stock, "_batchinfer_strict", False):
        return
    stock._batchinfer_strict = True
    _patch_casts()
    _patch_arithmetic()
    _patch_dot()
    _patch_memory()
    _patch_other()
    stock.interpreter_builder.options = stock.InterpreterOptions(debug=True, sanitize_overflow=False)


def _patch_casts() -> None:
    stock_cast, stock_float_cast = Builder.cast_impl, Builder.create_fp_to_fp

    def cast(self: Any, source: Any, target_type: Any) -> Any:
        source_dtype, target = source.dtype.scalar, target_type.scalar
        if source_dtype == target:
            return source
        if source_dtype == tl.bfloat16:
            return cast(self, widened(source), target_type)
        if target == tl.bfloat16:
            return Handle(f32_to_bf16(source.data.astype(np.float32)), tl.bfloat16)
        if source_dtype.is_floating() and target.is_int() and target != tl.int1:
            limits = np.iinfo(stock._get_np_dtype(target))
            if not ((source.data >= limits.min) & (source.data <= limits.max)).all():
                raise ValueError(f"a float that {target} cannot hold is cast to it")
        return stock_cast(self, source, target_type)

    def float_cast(self: Any, source: Any, target_type: Any, rounding: Any) -> Any:
        kinds = {source.dtype.scalar, target_type.scalar}
        if kinds & set(HALF) and kinds <= {*HALF, tl.float32, tl.float64} and rounding != stock._ir.ROUNDING_MODE.RTZ:
            return cast(self, source, target_type)
        return stock_float_cast(self, source, target_type, rounding)

    Builder.cast_impl, Builder.create_fp_to_fp = cast, float_cast
    Builder.get_bf16 = lambda self, value: Handle(f32_to_bf16(np.array([value], np.float32)), tl.bfloat16)


def _patch_arithmetic() -> None:
    stock_binary, stock_ternary = Builder.binary_op, Builder.ternary_op

    def binary(self: Any, left: Any, right: Any, op: Any) -> Any:
        refuse_half(left, right)
        kind = left.data.dtype
        if op in CHECKED_ARITHMETIC and kind.kind == "i" and kind.itemsize < 8:
            exact = op(left.data.astype(np.int64), right.data.astype(np.int64))
            narrow = exact.astype(kind)
            if (narrow != exact).any():
                raise OverflowError(f"{op.__name__} wraps around {kind}")
            return Handle(narrow, left.dtype.scalar)
        out = stock_binary(self, left, right, op)
        return Handle(out.data.astype(bool), tl.int1) if op in COMPARISONS else out

    def ternary(self: Any, first: Any, second: Any, third: Any, op: Any) -> Any:
        if op is not np.where:
            refuse_half(first, second, third)
        return stock_ternary(self, first, second, third, op)

    def guarded(method: Any) -> Any:
        @functools.wraps(method)
        def call(self: Any, *handles: Any) -> Any:
            refuse_half(*(handle for handle in handles if isinstance(handle, Handle)))
            return method(self, *handles)

        return call

    Builder.binary_op, Builder.ternary_op = binary, ternary
    for name in ("unary_op", "create_fabs", "create_fma", "create_rsqrt", "create_erf"):
        setattr(Builder, name, guarded(getattr(Builder, name)))
    for operations in (stock.ReduceOps, stock.ScanOps):
        operations.apply_impl = _guarded_reduction(operations.apply_impl)


def _guarded_reduction(method: Any) -> Any:
    @functools.wraps(method)
    def apply(self: Any, tensors: Any) -> Any:
        refuse_half(*(tensor.handle for tensor in tensors))
        return method(self, tensors)

    return apply


def _patch_dot() -> None:
    stock_dot = Builder.create_dot

    def dot(self: Any, a: Any, b: Any, accumulator: Any, precision: Any, *rest: Any) -> Any:
        if a.data.dtype == np.int8 and b.data.dtype == np.int8:
            if accumulator.data.dtype != np.int32:
                raise TypeError("an int8 dot adds up in int32")
            # products of up to 2**14: float32 sums are exact to K = 1024, float64 beyond
            exact = np.float32 if a.data.shape[-1] <= 1024 else np.float64
            product = (a.data.astype(exact) @ b.data.astype(exact)).astype(np.int64) + accumulator.data
            if (np.abs(product) > np.iinfo(np.int32).max).any():
                raise OverflowError("an int8 dot wraps around int32")
            return Handle(product.astype(np.int32), tl.int32)
        if a.dtype.scalar == tl.float32 and precision != stock._ir.INPUT_PRECISION.IEEE:
            raise TypeError('a float32 dot rounds its operands to tf32: say input_precision="ieee"')
        return stock_dot(self, widened(a), widened(b), accumulator, precision, *rest)

    Builder.create_dot = dot


def _patch_memory() -> None:
    stock_convert, stock_call = stock._implicit_cvt, stock.GridExecutor.__call__
    stock_load, stock_store = Builder.create_masked_load, Builder.create_masked_store
    stock_atomic, stock_splat = Builder.create_atomic_rmw, Builder.create_splat

    def convert(argument: Any) -> Any:
        value = stock_convert(argument)
        if hasattr(argument, "untyped_storage"):
            extent = _extent(argument)
            launch.extents.append(extent)
            value.handle.attr["extent"] = extent
        return value

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        launch.begin()
        with np.errstate(all="ignore"):  # infinities and NaN are silent on a GPU
            result = stock_call(self, *args, **kwargs)
        launch.check_races()
        return result

    def load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **kwargs: Any) -> Any:
        _check_bounds(pointers, mask, "load")
        if other is None and not launch.has_other and not mask.data.all():
            other = _poison(pointers)
        return stock_load(self, pointers, mask, other, *rest, **kwargs)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        active = _check_bounds(pointers, mask, "store")
        launch.stores.setdefault(self.grid_idx, []).append(active)
        return stock_store(self, pointers, value, mask, *rest)

    def atomic(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check_bounds(pointers, mask, "atomic")
        return stock_atomic(self, op, pointers, value, mask, *rest)

    def splat(self: Any, result_type: Any, source: Any) -> Any:
        return _with_origin(stock_splat(self, result_type, source), source)

    stock._implicit_cvt, stock.GridExecutor.__call__ = convert, call
    Builder.create_masked_load, Builder.create_masked_store = load, store
    Builder.create_atomic_rmw, Builder.create_splat = atomic, splat
    for name in POINTER_KEEPING:
        setattr(Builder, name, _keeping_origin(getattr(Builder, name)))


def _patch_other() -> None:
    stock_load = TritonSemantic._load_legacy

    def load(self: Any, ptr: Any, mask: Any, other: Any, *rest: Any) -> Any:
        launch.has_other = other is not None
        try:
            return stock_load(self, ptr, mask, other, *rest)
        finally:
            launch.has_other = False

    TritonSemantic._load_legacy = load


def _extent(tensor: Any) -> tuple[int, int]:
    """First and past-the-last byte that a tensor's elements touch."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _with_origin(result: Any, source: Any) -> Any:
    if "extent" in source.attr:
        result.attr["extent"] = source.attr["extent"]
    return result


def _keeping_origin(method: Any) -> Any:
    @functools.wraps(method)
    def call(self: Any, source: Any, *args: Any) -> Any:
        return _with_origin(method(self, source, *args), source)

    return call


def _poison(pointers: Any) -> Any:
    element = pointers.get_element_ty()
    kind = stock._get_np_dtype(element)
    if element == tl.bfloat16:
        value: Any = 0x7FC0
    else:
        value = np.nan if kind.kind == "f" else True if kind.kind == "b" else np.iinfo(kind).max
    return Handle(np.full(pointers.data.shape, value, dtype=kind), element)


def _check_bounds(pointers: Any, mask: Any, what: str) -> np.ndarray:
    """Addresses of the active lanes, all inside of the tensor they started from."""
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    active = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].astype(np.int64)
    if not active.size:
        return active
    allowed = [pointers.attr["extent"]] if "extent" in pointers.attr else [*launch.extents, *launch.reachable]
    lowest, highest = int(active.min()), int(active.max()) + size
    if any(low <= lowest and highest <= high for low, high in allowed):
        return active
    low, high = allowed[0] if allowed else (0, 0)
    where = f"bytes {lowest - low} to {highest - low} of a tensor of {high - low} bytes"
    raise IndexError(f"{what} out of bounds: {where}, program {stock.interpreter_builder.grid_idx}")
