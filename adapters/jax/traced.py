"""One call of a communicator as a primitive of JAX, which XLA makes through its FFI.

Calls have an ordered effect: XLA makes them in the order of the program, also inside ``scan``,
``cond`` and ``while_loop``. ``handler.c`` gets a call's number from XLA, and calls
:func:`_made` with it.

The primitive's parameters name a call and its adjoint, which are linear. JAX differentiates with
both: a tangent goes through the call, and a gradient goes through the adjoint.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import math
import threading
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import core, effects
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from collective.communicator import Communicator
from collective.communicator.repeated import RepeatedCall
from collective.errors import CollectiveError, UnsupportedError
from collective.request import in_thread

from .xla.library import handler, runner

__all__ = ["Call", "bind"]

_TARGET = "collective_ffi_call"
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Call:
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

    def with_(self, **arguments: Any) -> Call:
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

    def __repr__(self) -> str:  # JAX's refusal of several devices prints it
        return "calls of collective.adapters.jax.functional: each rank may use one device"

    __str__ = __repr__


_EFFECT = _Ordered()
for _kinds in (
    effects.ordered_effects, effects.lowerable_effects, effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
):  # fmt: skip
    _kinds.add_type(_Ordered)

_primitive = Primitive("collective")


def bind(x: Any, call: Call, adjoint: Call | None, shape: Sequence[int]) -> Any:
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
def _abstract(x: Any, *, call: Call, adjoint: Call | None, shape: tuple[int, ...]) -> Any:
    return core.ShapedArray(shape, x.dtype), {_EFFECT}


def _batch(
    args: Any, dims: Any, *, call: Call, adjoint: Call | None, shape: tuple[int, ...]
) -> Any:
    """Make one call for a batch: its dimension becomes the last, behind the call's axis."""
    (x,), (dim,) = args, dims
    x = jax.numpy.moveaxis(x, dim, -1)
    return bind(x, call, adjoint, (*shape, x.shape[-1])), len(shape)


def _forward(
    primals: Any, tangents: Any, *, call: Call, adjoint: Call | None, shape: tuple[int, ...]
) -> Any:
    """Make the call with the tangents as well."""
    if adjoint is None:
        raise UnsupportedError(
            f"{call.name}: a {call.name} has no derivative. Gather the arrays with all_gather and "
            "compute the result from them, which JAX differentiates."
        )
    return [bind(x, call, adjoint, shape) for x in (*primals, *tangents)]


def _transposed(g: Any, x: Any, *, call: Call, adjoint: Call, shape: tuple[int, ...]) -> Any:
    """Make the adjoint call with the gradient of the result."""
    return [ad.Zero(x.aval) if type(g) is ad.Zero else bind(g, adjoint, call, x.aval.shape)]


def _lower(ctx: Any, x: Any, *, call: Call, adjoint: Call | None, shape: tuple[int, ...]) -> Any:
    """Lower to a custom call whose last operand and result are the effect's token."""
    (aval,) = ctx.avals_in
    entry = _entered(call, aval.shape, shape, np.dtype(aval.dtype))
    ctx.module_context.add_keepalive(entry)
    inner = ctx.replace(
        avals_in=(aval, core.abstract_token), avals_out=(*ctx.avals_out, core.abstract_token)
    )
    rule = jax.ffi.ffi_lowering(_TARGET, has_side_effect=True)
    result, token = rule(inner, x, ctx.tokens_in.get(_EFFECT), call=np.int64(entry.number))
    ctx.set_tokens_out(mlir.TokenSet({_EFFECT: token}))
    return [result]


ad.primitive_jvps[_primitive] = _forward
ad.primitive_transposes[_primitive] = _transposed
batching.primitive_batchers[_primitive] = _batch
mlir.register_lowering(_primitive, _lower, platform="cpu")


# -- calls by number, which XLA makes ----------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    """Call of a compiled program, which keeps it alive: with the shapes and dtype of its arrays."""

    call: Call
    given: tuple[int, ...]
    shape: tuple[int, ...]
    kind: np.dtype[Any]
    number: int
    repeated: RepeatedCall


_entries: weakref.WeakValueDictionary[int, _Entry] = weakref.WeakValueDictionary()
_ordinals = itertools.count()
_of_thread = threading.local()
# The second number of every call, for the native core; as in handler.c.
_SECOND = -1


def _entered(
    call: Call, given: tuple[int, ...], shape: tuple[int, ...], kind: np.dtype[Any]
) -> _Entry:
    """Give a call a number, which is in no other program's executable except by its description.

    An executable that another process stored has that process's numbers. So a number has the
    checksum of what the call does to memory, which must not be done with other arrays.
    """
    facts = (call.name, call.arguments, call.delegate, given, shape, str(kind))
    number = zlib.crc32(repr(facts).encode()) << 31 | next(_ordinals)
    repeated = RepeatedCall(call.comm, (number, _SECOND), clears=call.delegate)
    _entries[number] = entry = _Entry(call, given, shape, kind, number, repeated)
    weakref.finalize(entry, repeated.forget).atexit = False
    return entry


def _view(address: int | None, shape: tuple[int, ...], kind: np.dtype[Any]) -> Array:
    """Return XLA's buffer at an address as an array, without a copy."""
    nbytes = math.prod(shape) * kind.itemsize
    if not address or not nbytes:
        return np.empty(shape, kind)
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    flat: Array = np.frombuffer(memory, np.uint8).view(kind)
    return flat.reshape(shape)


def _made(number: int, source: int | None, target: int | None) -> int | None:
    """Make a call for XLA; return None, or the address of the text of an error.

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
        in_thread.site = entry.call.site
        try:
            x, out = _view(source, entry.given, entry.kind), _view(target, entry.shape, entry.kind)
            entry.repeated.make(functools.partial(entry.call.make, x, out), x, out)
        finally:
            in_thread.site = None  # the slot in C outlives the thread
        return None
    except BaseException as error:  # C cannot receive an exception
        text = str(error) if isinstance(error, CollectiveError) else repr(error)
        _of_thread.text = ctypes.create_string_buffer(f"{type(error).__name__}: {text}".encode())
        return ctypes.addressof(_of_thread.text)


_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
_function = _FUNCTION(_made)  # lives as long as the process


@functools.cache
def _register() -> None:
    """Register the handler with XLA.

    Raises:
        BackendUnavailableError: the handler is not built.
    """
    library = ctypes.CDLL(str(handler()))
    library.collective_ffi_install(_function, runner())
    jax.ffi.register_ffi_target(
        _TARGET, jax.ffi.pycapsule(library.collective_ffi_call), platform="cpu"
    )
