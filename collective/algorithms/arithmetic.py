"""Arithmetic of reductions: ``fold(op, dtype)`` returns a function for ``out = a op b`` on arrays.

All transports that fold in Python share this module, so they all round alike: the result of each
step is rounded to the dtype of the arrays. ``avg`` is the sum divided by the number of ranks. Only
float16 is divided before the sum, because sums of float16 overflow at 65504. Integers wrap.
Overflow and NaN behave as in IEEE 754. The caller silences NumPy's warnings about them
(``np.errstate``), once an operation rather than once a fold.

``min`` and ``max`` of floats are the minimum and maximum of IEEE 754-2019 (section 9.6): -0 is
less than +0, and the result is NaN if an operand is NaN. The standard does not say which NaN. Here
it is always the quiet NaN without sign and payload, so the result has the same bits in any order.

A thread may flush subnormal numbers to zero (``torch.set_flush_denormal``, libraries built with
``-ffast-math``), or round in another direction. If only some ranks did so, a call that each rank
folds itself would have other bits on them. So all folds of floats compute in the default mode
(:func:`steady`), in C as well.

A boolean is true if its byte is not 0, and the byte of a result is 0 or 1. This also holds for a
user's function, and for a single rank, which folds nothing: there :func:`post` changes the bytes.

The folds in this module are the reference. Where the native core is in use, :func:`fold` returns a
fold in C instead (:func:`collective.native.fold`), with the same bits. NumPy still computes three
things: products of complex numbers, which it rounds differently on processors with fused
multiply-add; scaling; and users' functions. If both operands of a sum or product are NaN, NumPy's
loops choose one of them by the place in the array, and C takes the left one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from collective import native
from collective.errors import DtypeError, InvalidArgumentError
from collective.memory.buffer import Buffer
from collective.memory.dtypes import DType
from collective.ops import ReduceOp
from collective.platform import default_floats

if TYPE_CHECKING:
    from collective.deadline import Deadline

Array = np.ndarray[Any, Any]
T = TypeVar("T")

# To a fold these two operators are sums. The scaling comes before or after the fold.
_FOLDED_AS = {"avg": "sum", "premul_sum": "sum"}


class Fold(Protocol):
    """``fold(a, b, out=c)`` on one-dimensional storage arrays of one length; c may be a or b."""

    def __call__(self, a: Array, b: Array, /, *, out: Array) -> Any: ...


#: ``scale(x, out)``: function of one input array that sets ``out``, which may be ``x``.
Scale = Callable[[Array, Array], Any]

_UFUNCS: dict[str, Any] = {
    "sum": np.add,
    "avg": np.add,
    "premul_sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": np.logical_and,
    "lor": np.logical_or,
}
# Dtype kinds for which each operator is defined, as in MPI 4.1, section 6.9.2, with NumPy's bool as
# MPI's C++ bool. Complex numbers have no order, so min and max do not take them.
_KINDS: dict[str, str] = {
    "sum": "iufc",
    "prod": "iufc",
    "avg": "fc",
    "premul_sum": "fc",
    "min": "biuf",
    "max": "biuf",
    "band": "biu",
    "bor": "biu",
    "bxor": "biu",
    "land": "biuf",
    "lor": "biuf",
    "user": "biufc",
}
_REMEDY = {
    "avg": "use op='sum' and divide, or cast to a floating dtype",
    "premul_sum": "cast to a floating dtype",
}
# Number of bfloat16 elements that are widened at a time: two float32 blocks of this length stay in
# a second-level cache of 1 MiB. Measured in GB/s of one operand, with blocks of 4,096,
# 16,384 and 65,536 elements: 0.7, 1.5, 2.0.
_BLOCK = 1 << 16
# Numbers that show the floating-point mode of a thread. The smallest normal number times 0.5 is 0
# if the mode flushes small numbers. 1 plus half a unit is 1, and 1 plus three quarters is more, if
# the mode rounds to the nearest. They are in a list, so that no compiler computes with them before.
_PROBES = [sys.float_info.min, 0.5, 1.0, 2.0**-53, 1.5 * 2.0**-53]


def check(op: ReduceOp, dtype: DType) -> None:
    """Check that an operator is defined for a dtype.

    Raises:
        DtypeError: it is not, such as the bitwise or of floats, the sum of booleans, or a
            ``premul_sum`` whose factor the dtype cannot hold.
    """
    if dtype.kind not in _KINDS[op.name]:
        names = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}
        allowed = ", ".join(names[k] for k in _KINDS[op.name])
        remedy = _REMEDY.get(op.name, "cast first, or use another op")
        raise DtypeError(f"op {op}: dtype {dtype}; it is defined for {allowed}; {remedy}.")
    if op.factor is not None and not np.isfinite(_rounded(op.factor, dtype)):
        raise DtypeError(
            f"op {op}: the factor is infinite in dtype {dtype}; take a smaller one, or cast "
            "the array to a wider dtype."
        )


def fold(op: ReduceOp, dtype: DType) -> Fold:
    """Return the function that sets ``out`` to ``a op b``, elementwise."""
    if op.function is not None:  # no cache, which would keep the user's closures alive
        function = _user(op, op.function)
        return steady(_in_float32(function) if dtype.name == "bfloat16" else function)
    return _named_fold(op.name, dtype, native.chosen.extension)


def schedule(
    op: ReduceOp, dtype: DType, inputs: int, scratch: int, results: int, steps: bytes
) -> Callable[[list[Array], list[Array]], bool] | None:
    """Return a function in C that makes several folds at once; see :func:`native.schedule`.

    Its folds have the bits of :func:`fold`. The result is None if there is no such function.
    """
    if op.function is not None:
        return None
    return native.schedule(folded_as(op.name), dtype.code, inputs, scratch, results, steps)


def folded_as(name: str) -> str:
    """Return the operator that folds for the built-in operator ``name``."""
    return _FOLDED_AS.get(name, name)


@cache
def _named_fold(name: str, dtype: DType, extension: object) -> Fold:
    """Return the fold of the native core, or the one in Python if ``extension`` is None."""
    return native.fold(folded_as(name), dtype.code, reference(name, dtype))


@cache
def reference(name: str, dtype: DType) -> Fold:
    """Return the Python fold of a built-in operator; the fold in C gives the same bits."""
    function: Fold = _UFUNCS[name]
    if dtype.kind not in "fc":
        return function
    narrow = dtype.name == "bfloat16"
    if name in ("min", "max"):
        function = _Extreme(name, np.float32 if narrow else dtype.storage)
    elif name == "prod" and dtype.kind == "c":
        function = _complex_product
    return steady(_in_float32(function) if narrow else function)


def steady(function: Callable[..., T]) -> Callable[..., T]:
    """Return ``function`` with arithmetic in the default floating-point mode on any thread."""

    def apply(*arguments: Any, **options: Any) -> T:
        normal, half, one, tie, more = _PROBES
        if normal * half > 0.0 and one + tie == one and one + more > one:
            return function(*arguments, **options)
        with default_floats():
            return function(*arguments, **options)

    return apply


class _Extreme:
    """Minimum or maximum of floats, with the same bits for any order of the operands.

    If an operand is NaN, NumPy returns a NaN with the sign and payload of that operand. For two
    zeros NumPy returns the left or the right one, depending on the processor. So this class
    replaces each NaN. Where a -0 occurs, which is seldom, it computes the sign of the result from
    the signs of the operands. A maximum is negative if both operands are, a minimum if either is.

    Args:
        name: ``"min"`` or ``"max"``.
        storage: a floating-point type of NumPy.
    """

    def __init__(self, name: str, storage: Any) -> None:
        floating = np.dtype(storage)
        self._pick = _UFUNCS[name]
        self._signed = np.dtype(f"i{floating.itemsize}")
        limits = np.iinfo(self._signed)
        self._minus_zero = limits.min  # the bits of -0 are the least integer
        self._nan = _quiet_nan(floating, self._signed)
        both: tuple[Any, Any, int] = np.bitwise_and, np.bitwise_or, limits.max
        either: tuple[Any, Any, int] = np.bitwise_or, np.bitwise_and, limits.min
        self._signs, self._only, self._rest = both if name == "max" else either

    def __call__(self, a: Array, b: Array, /, *, out: Array) -> None:
        if not 0 < out.size <= _BLOCK:
            for start in range(0, out.size, _BLOCK):
                part = slice(start, start + _BLOCK)
                self(a[part], b[part], out=out[part])
            return
        signed = self._signed
        left, right = a.view(signed), b.view(signed)
        # argmin and argmax are NumPy's fastest ways to find one element. Examine both inputs before
        # writing to out, which may be one of them.
        if self._minus_zero in (left.item(left.argmin()), right.item(right.argmin())):
            signs = self._signs(left, right)
            self._only(signs, self._rest, out=signs)
            self._pick(a, b, out=out)
            self._signs(out.view(signed), signs, out=out.view(signed))
        else:
            self._pick(a, b, out=out)
        if _has_nan(out):
            out.view(signed)[np.isnan(out)] = self._nan


def _has_nan(x: Array) -> bool:
    if x.itemsize == 2:  # argmax compares float16 one by one; isnan tests the bits
        return bool(np.isnan(x).any())
    largest: float = x.item(x.argmax())  # this is a NaN if x contains one
    return largest != largest


def _quiet_nan(floating: np.dtype[Any], bits: np.dtype[Any]) -> Any:
    """Return, as an integer, the NaN that :class:`_Extreme` writes for a floating-point type."""
    # The bits are those of infinity, whose exponent is all ones, and the highest fraction bit.
    fraction = np.finfo(floating).nmant
    return np.array(np.inf, floating).view(bits)[()] | bits.type(1 << (fraction - 1))


def _complex_product(a: Array, b: Array, /, *, out: Array) -> None:
    """Multiply complex numbers, with the same rounding for one number in place as for several.

    NumPy would treat one number in place as a reduction of one number. The loop for that has no
    fused multiply-add, and its result differs in the last bit.
    """
    if out.size != 1:
        np.multiply(a, b, out=out)
        return
    product = np.empty_like(out)
    try:
        np.multiply(a, b, out=product)
    finally:  # np.errstate can turn NumPy's warnings into errors
        out[:] = product


def pre(op: ReduceOp, dtype: DType, size: int) -> Scale | None:
    """Return the function that a rank applies to its input before the fold, or None."""
    if op.factor is not None:
        return steady(_scale(np.multiply, _rounded(op.factor, dtype), dtype))
    if op.name == "avg" and dtype.name == "float16":
        return steady(_scale(np.divide, np.float32(size), dtype))
    return None


def post(op: ReduceOp, dtype: DType, size: int) -> Scale | None:
    """Return the function to apply to the folded result of ``size`` ranks, or None."""
    # A single rank folds nothing: the result would have the bytes of its input.
    if size == 1 and dtype.kind == "b":
        return _truth_of_bytes
    if op.name in ("land", "lor") and dtype.kind != "b":
        return steady(_truth_in_float32 if dtype.name == "bfloat16" else _truth)
    if size == 1 and op.name in ("min", "max") and dtype.kind == "f":
        extreme = _named_fold(op.name, dtype, native.chosen.extension)
        return lambda x, out: extreme(x, x, out=out)
    if op.name != "avg" or dtype.name == "float16":
        return None
    return steady(_scale(np.divide, np.float64(size), dtype))


@steady
def _rounded(factor: float, dtype: DType) -> Any:
    """Round a real factor to a dtype; return a scalar that needs no further rounding."""
    with np.errstate(over="ignore", under="ignore"):
        if dtype.name == "bfloat16":
            bits = float32_to_bfloat16(np.array([factor], np.float32))
            return bfloat16_to_float32(bits)[0]
        return _real(np.empty(0, dtype.storage)).dtype.type(factor)


def _scale(function: Any, scalar: Any, dtype: DType) -> Scale:
    """Return ``scale(x, out)`` that sets ``out`` to ``function(x, scalar)``."""
    if dtype.name == "bfloat16":
        narrow = np.float32(scalar)
        lifted = _in_float32(lambda x, /, *, out: function(x, narrow, out=out))
        return lambda x, out: lifted(x, out=out)
    if dtype.name != "float16":  # float16 is scaled in float32, and rounded once
        scalar = _real(np.empty(0, dtype.storage)).dtype.type(scalar)
    return lambda x, out: function(_real(x), scalar, out=_real(out))


def _real(array: Array) -> Array:
    """View complex numbers as pairs of reals, so that inf times a real factor is not NaN."""
    return array.view(array.real.dtype) if array.dtype.kind == "c" else array


def _truth(x: Array, out: Array) -> Any:
    return np.not_equal(x, 0, out=out, casting="unsafe")


def _truth_of_bytes(x: Array, out: Array) -> Any:
    """Set ``out`` to the booleans ``x`` with bytes of 0 and 1; ``x`` may have any bytes."""
    return np.not_equal(x.view(np.uint8), 0, out=out)


def _truth_in_float32(x: Array, out: Array) -> Any:
    return _in_float32(lambda x, /, *, out: _truth(x, out))(x, out=out)


def _user(op: ReduceOp, function: Callable[[Array, Array], Array]) -> Fold:
    def apply(a: Array, b: Array, /, *, out: Array) -> None:
        result = np.asarray(function(_read_only(a), _read_only(b)))
        if result.shape != a.shape:
            raise InvalidArgumentError(
                f"{op}: returned shape {result.shape} for inputs of shape {a.shape}; "
                "it must return an array of the same length."
            )
        if result.dtype == out.dtype == np.bool_:
            _truth_of_bytes(result, out)
        else:
            np.copyto(out, result, casting="unsafe")

    return apply


def _read_only(array: Array) -> Array:
    """Return a read-only view, to protect a rank's input from a function that folds in place."""
    view = array.view()
    view.flags.writeable = False
    return view


def _in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lift a function of float32 arrays to bfloat16, a block at a time."""

    def apply(*inputs: Array, out: Array) -> None:
        block = np.empty((max(2, len(inputs)), min(_BLOCK, out.size)), np.uint32)
        for start in range(0, out.size, _BLOCK):
            stop = min(start + _BLOCK, out.size)
            room = block[:, : stop - start]
            wide = [_widen(x[start:stop], r) for x, r in zip(inputs, room, strict=False)]
            function(*wide, out=wide[0])
            _narrow(wide[0], room[1], out[start:stop])

    return apply


def bfloat16_to_float32(bits: Array) -> Array:
    """Widen bfloat16 bits (uint16) to float32, without rounding."""
    return _widen(bits, np.empty(bits.shape, np.uint32))


def float32_to_bfloat16(values: Array) -> Array:
    """Round float32 to bfloat16 bits (uint16), to nearest, ties to even; NaN stays NaN."""
    out = np.empty(values.shape, np.uint16)
    _narrow(values, np.empty(values.shape, np.uint32), out)
    return out


def _widen(bits: Array, room: Array) -> Array:
    """Write bfloat16 ``bits`` as float32 into ``room`` (uint32); return ``room`` as float32."""
    room[...] = bits
    np.left_shift(room, 16, out=room)
    return room.view(np.float32)


def _narrow(values: Array, room: Array, out: Array) -> None:
    """Round float32 ``values`` to bfloat16 bits in ``out`` (uint16), with scratch ``room``."""
    bits = values.view(np.uint32)
    # Adding 0x7FFF and the lowest kept bit carries exactly when the value must round up.
    np.right_shift(bits, 16, out=room)
    np.bitwise_and(room, 1, out=room)
    np.add(room, 0x7FFF, out=room)
    np.add(room, bits, out=room)
    np.right_shift(room, 16, out=room)
    nan = np.isnan(values)
    if nan.any():
        room[nan] = (bits[nan] >> 16) | 0x40  # the carry could have made NaN an infinity
    np.copyto(out, room, casting="same_kind")


def around(
    plan: Callable[..., Any],
    scale: Scale | None,
    finish: Scale | None,
) -> Callable[..., Any]:
    """Return a plan that scales its input before ``plan``, and finishes its output afterwards.

    Args:
        plan: function of an input, an output and a deadline.
        scale: function that scales a copy of the input; None if nothing is to be scaled.
        finish: function that finishes the output in place, or None.
    """
    if scale is None and finish is None:
        return plan
    return partial(_around, plan, scale, finish)


def _around(
    plan: Callable[..., Any],
    scale: Scale | None,
    finish: Scale | None,
    src: Buffer,
    dst: Buffer | None,
    deadline: Deadline,
) -> None:
    with np.errstate(all="ignore"):
        if scale is not None:
            scaled = Buffer(np.empty_like(src.array), src.dtype)
            scale(src.array, scaled.array)
            src = scaled
        plan(src, dst, deadline)
        if finish is not None and dst is not None:
            finish(dst.array, dst.array)
