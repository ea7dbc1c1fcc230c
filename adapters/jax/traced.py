"""One call of a communicator as a primitive of JAX, which XLA makes through its FFI.

Calls have an ordered effect: XLA makes them in the order of the program, also inside ``scan``,
``cond`` and ``while_loop``. ``handler.c`` gets a call's number from XLA, and calls
:func:`_make_call` with it.

XLA runs a program in the background. The program's later calls outside ``jit`` on the same
communicator wait for it: see :func:`_drain`.

The primitive's parameters name a call and its adjoint, which are linear. JAX differentiates with
both: a tangent goes through the call, and a gradient goes through the adjoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np
from jax._src import core, effects
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from collective import CollectiveError, Communicator, UnsupportedError
from collective.communicator.repeated import RepeatedCall, view
from collective.request import in_thread

from .xla.library import handler, runner

_TARGET = "collective_ffi_call"
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class JitCall:
    """Call of a communicator, without its array.

    Attributes:
        name: method of the communicator.
        comm: the communicator.
        arguments: the method's arguments by name, without ``out``.
        site: place in the program that traced the call.
        delegate: whether this rank has no result, so that the result is a zero.
    """

    name: str
    comm: Communicator
    arguments: tuple[tuple[str, Any], ...]
    site: str
    delegate: bool = False

    def with_(self, **arguments: Any) -> JitCall:
        """Return the same call with more arguments."""
        return dataclasses.replace(self, arguments=(*self.arguments, *arguments.items()))

    def make(self, x: Array, out: Array) -> None:
        """Make the call with an array, and write its result into ``out``."""
        method, arguments = getattr(self.comm, self.name), dict(self.arguments)
        if self.name == "barrier":
            method()
        elif self.name == "recv":
            method(out, **arguments)
        elif self.name in ("broadcast", "scatter") and arguments["root"] != self.comm.rank:
            method(None, out=out, **arguments)
        elif self.delegate:
            method(x, **arguments)
        else:
            method(x, out=out, **arguments)
        if self.delegate:
            out[...] = 0


class _Ordered(effects.Effect):  # type: ignore[misc,unused-ignore]
    """Effect that keeps the calls of a program in order."""

    def __eq__(self, other: object) -> bool:
        return type(other) is _Ordered

    def __hash__(self) -> int:
        return hash(_Ordered)

    def __repr__(self) -> str:  # JAX's refusals of several devices and of remat print it
        return (
            "ordered calls of collective.adapters.jax.functional, which need one device for each "
            "rank and cannot be made twice, as jax.checkpoint would"
        )

    __str__ = __repr__


_EFFECT = _Ordered()
for _kinds in (
    effects.ordered_effects, effects.lowerable_effects, effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
):  # fmt: skip
    _kinds.add_type(_Ordered)

_primitive = Primitive("collective")


def bind(x: Any, call: JitCall, adjoint: JitCall | None, shape: Sequence[int]) -> Any:
    """Return the result of a call with array ``x``; make or trace the call.

    Args:
        x: array.
        call: the call.
        adjoint: the transposed call, from the gradient of the result to that of ``x``; None for a
            call without derivatives.
        shape: shape of the result.
    """
    _register()
    return _primitive.bind(x, call=call, adjoint=adjoint, shape=tuple(shape))


_compiled = jax.jit(_primitive.bind, static_argnames=("call", "adjoint", "shape"))
_primitive.def_impl(_compiled)


@_primitive.def_effectful_abstract_eval  # type: ignore[untyped-decorator,unused-ignore]
def _abstract(x: Any, *, call: JitCall, adjoint: JitCall | None, shape: tuple[int, ...]) -> Any:
    return core.ShapedArray(shape, x.dtype), {_EFFECT}


def _batch(
    args: Any, dims: Any, *, call: JitCall, adjoint: JitCall | None, shape: tuple[int, ...]
) -> Any:
    """Make one call for a batch: its dimension becomes the last, behind the call's axis."""
    (x,), (dim,) = args, dims
    x = jax.numpy.moveaxis(x, dim, -1)
    return bind(x, call, adjoint, (*shape, x.shape[-1])), len(shape)


def _forward(
    primals: Any, tangents: Any, *, call: JitCall, adjoint: JitCall | None, shape: tuple[int, ...]
) -> Any:
    """Make the call with the tangents as well."""
    if adjoint is None:
        raise UnsupportedError(
            f"{call.name}: a {call.name} has no derivative. Gather the arrays with all_gather and "
            "compute the result from them, which JAX differentiates."
        )
    return [bind(x, call, adjoint, shape) for x in (*primals, *tangents)]


def _transposed(g: Any, x: Any, *, call: JitCall, adjoint: JitCall, shape: tuple[int, ...]) -> Any:
    """Make the adjoint call with the gradient of the result."""
    return [ad.Zero(x.aval) if type(g) is ad.Zero else bind(g, adjoint, call, x.aval.shape)]


def _lower(
    ctx: Any, x: Any, *, call: JitCall, adjoint: JitCall | None, shape: tuple[int, ...]
) -> Any:
    """Lower to a custom call whose last operand and result are the effect's token."""
    (aval,) = ctx.avals_in
    executable = _Executable()
    number = _enter(call, aval.shape, shape, np.dtype(aval.dtype), executable)
    ctx.module_context.add_keepalive(executable)
    inner = ctx.replace(
        avals_in=(aval, core.abstract_token), avals_out=(*ctx.avals_out, core.abstract_token)
    )
    rule = jax.ffi.ffi_lowering(_TARGET, has_side_effect=True)
    result, token = rule(inner, x, ctx.tokens_in.get(_EFFECT), call=np.int64(number))
    ctx.set_tokens_out(mlir.TokenSet({_EFFECT: token}))
    return [result]


def _refuse(ctx: Any, x: Any, *, call: JitCall, **_: Any) -> Any:
    """Refuse to lower for other platforms than the CPU."""
    raise UnsupportedError(
        f"{call.name}: a call inside jit for {', '.join(ctx.module_context.platforms)}; only the "
        "CPU can make it. Compile the program for jax.devices('cpu'), or make the call outside jit."
    )


ad.primitive_jvps[_primitive] = _forward
ad.primitive_transposes[_primitive] = _transposed
batching.primitive_batchers[_primitive] = _batch
mlir.register_lowering(_primitive, _lower, platform="cpu")
mlir.register_lowering(_primitive, _refuse)


# -- calls by number, which XLA makes ----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _CompiledCall:
    """Call of a compiled program: with the shapes and dtype of its arrays."""

    call: JitCall
    input_shape: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    number: int
    repeated: RepeatedCall


class _Executable:
    """Object that an executable keeps alive, and whose end tells that the executable is gone."""

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "jax: a compiled program with calls of a communicator cannot be stored, since the "
            "communicator is bound to this process. Compile the program in each process."
        )


class _ThreadState(threading.local):
    """State of a thread: whether it makes a call for XLA."""

    makes = False


_entries: dict[int, _CompiledCall] = {}
# Entries of executables that are gone. XLA may still run their programs in the background.
_released: deque[_CompiledCall] = deque()
# Number of released entries at which this module waits for the programs.
_MOST_RELEASED = 64
_ordinals = itertools.count()
# The second number of every call, for the native core; as in handler.c.
_SECOND = -1
_thread = _ThreadState()


def _enter(
    call: JitCall,
    input_shape: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    executable: _Executable,
) -> int:
    """Make an entry for a call of an executable, and return its number.

    The number combines a checksum of the call with an ordinal. So an executable that another
    process stored, with that process's numbers, cannot make a call on arrays of other shapes.
    """
    if len(_released) >= _MOST_RELEASED:
        _drain()
    facts = (call.name, call.arguments, call.delegate, input_shape, shape, str(dtype))
    number = zlib.crc32(repr(facts).encode()) << 31 | next(_ordinals)
    repeated = RepeatedCall(call.comm, (number, _SECOND), clears=call.delegate, drain=_drain)
    entry = _entries[number] = _CompiledCall(call, input_shape, shape, dtype, number, repeated)
    weakref.finalize(executable, _released.append, entry).atexit = False
    return number


def _drain() -> None:
    """Wait until the compiled programs have ended that this thread has started.

    Otherwise a call of the program and one of XLA would race for the communicator. With equal
    shapes and operators on all ranks, one would get the numbers of the other. A failed program does
    not raise its error here: its results do.
    """
    if _thread.makes:
        return  # XLA makes this call
    ended = list(_released)
    with contextlib.suppress(Exception):
        jax.effects_barrier()
    for entry in ended:
        with contextlib.suppress(ValueError):  # another thread has removed it
            _released.remove(entry)
        _entries.pop(entry.number, None)
        entry.repeated.forget()


def _make_call(ticket: int, number: int, source: int | None, target: int | None) -> int:
    """Make a call for XLA; return what ``call_function`` in ``handler.c`` returns.

    The handler makes later calls of this number by itself, if the native core can.
    """
    try:
        entry = _entries.get(number)
        if entry is None:
            raise UnsupportedError(
                "jax: a call that this process did not compile, or whose compiled function is "
                "gone. Let JAX compile the program instead of loading an executable, and keep the "
                "function."
            )
        x = view(source, entry.input_shape, entry.dtype)
        out = view(target, entry.shape, entry.dtype)
        in_thread.site, _thread.makes = entry.call.site, True
        try:
            entry.repeated.make(functools.partial(entry.call.make, x, out), x, out)
        finally:
            # The slot in C outlives the thread.
            in_thread.site, _thread.makes = None, False
        return ~ticket
    except BaseException as error:  # C cannot receive an exception
        text = str(error) if isinstance(error, CollectiveError) else repr(error)
        _library().collective_ffi_fail(
            f"{type(error).__name__}: {text}".encode(errors="replace"),
            isinstance(error, KeyboardInterrupt),
        )
        return ticket


_FUNCTION = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p
)
_function = _FUNCTION(_make_call)  # lives as long as the process


@functools.cache
def _library() -> ctypes.CDLL:
    """Return the library of the handler.

    Raises:
        BackendUnavailableError: the handler is not built.
    """
    return ctypes.CDLL(str(handler()))


@functools.cache
def _register() -> None:
    """Register the handler with XLA.

    Raises:
        BackendUnavailableError: the handler is not built.
    """
    library = _library()
    library.collective_ffi_install(_function, runner())
    jax.ffi.register_ffi_target(
        _TARGET, jax.ffi.pycapsule(library.collective_ffi_call), platform="cpu"
    )
