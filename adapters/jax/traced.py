"""One call of a communicator as a primitive of JAX, which XLA makes through its FFI.

Calls have an ordered effect: XLA makes them in the order of the program, also inside ``scan``,
``cond`` and ``while_loop``. ``handler.c`` gets a call's number from XLA, and calls
:func:`_made` with it.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import core, effects
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from collective.communicator import Communicator
from collective.errors import CollectiveError
from collective.request import in_thread

from .xla.library import built

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


def bind(x: Any, call: Call, shape: Sequence[int]) -> Any:
    """Return the result, of a shape, of a call with array ``x``; make or trace the call."""
    _register()
    return _primitive.bind(x, call=call, shape=tuple(shape))


@functools.lru_cache(maxsize=1024)
def _compiled(call: Call, shape: tuple[int, ...]) -> Any:
    return jax.jit(functools.partial(_primitive.bind, call=call, shape=shape))


@_primitive.def_impl  # type: ignore[untyped-decorator,unused-ignore]
def _run(x: Any, *, call: Call, shape: tuple[int, ...]) -> Any:
    return _compiled(call, shape)(x)


@_primitive.def_effectful_abstract_eval  # type: ignore[untyped-decorator,unused-ignore]
def _abstract(x: Any, *, call: Call, shape: tuple[int, ...]) -> Any:
    return core.ShapedArray(shape, x.dtype), {_EFFECT}


def _batch(args: Any, dims: Any, *, call: Call, shape: tuple[int, ...]) -> Any:
    """Make one call for a batch: its dimension becomes the last, behind the call's axis."""
    (x,), (dim,) = args, dims
    x = jax.numpy.moveaxis(x, dim, -1)
    return _primitive.bind(x, call=call, shape=(*shape, x.shape[-1])), len(shape)


batching.primitive_batchers[_primitive] = _batch


def _lower(ctx: Any, x: Any, *, call: Call, shape: tuple[int, ...]) -> Any:
    """Lower to a custom call whose last operand and result are the effect's token."""
    (aval,) = ctx.avals_in
    number = _number(call, aval.shape, shape, np.dtype(aval.dtype))
    inner = ctx.replace(
        avals_in=(aval, core.abstract_token), avals_out=(*ctx.avals_out, core.abstract_token)
    )
    rule = jax.ffi.ffi_lowering(_TARGET, has_side_effect=True)
    result, token = rule(inner, x, ctx.tokens_in.get(_EFFECT), call=np.int64(number))
    ctx.set_tokens_out(mlir.TokenSet({_EFFECT: token}))
    return [result]


mlir.register_lowering(_primitive, _lower, platform="cpu")


# -- calls by number, which XLA makes ----------------------------------------------------------

_Entry = tuple[Call, tuple[int, ...], tuple[int, ...], np.dtype[Any]]
_entries: list[_Entry] = []
_numbers: dict[_Entry, int] = {}
_table = threading.Lock()
_of_thread = threading.local()


def _number(*entry: Any) -> int:
    """Return the number of a call with the shapes of its arrays; equal calls share one."""
    with _table:
        number = _numbers.setdefault(entry, len(_entries))
        if number == len(_entries):
            _entries.append(entry)
    return number


def _view(address: int | None, shape: tuple[int, ...], kind: np.dtype[Any]) -> Array:
    """Return XLA's buffer at an address as an array, without a copy."""
    nbytes = math.prod(shape) * kind.itemsize
    if not address or not nbytes:
        return np.empty(shape, kind)
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    flat: Array = np.frombuffer(memory, np.uint8).view(kind)
    return flat.reshape(shape)


def _made(number: int, source: int | None, target: int | None) -> int | None:
    """Make a call for XLA; return None, or the address of the text of an error."""
    try:
        call, given, shape, kind = _entries[number]
        in_thread.site = call.site
        try:
            call.make(_view(source, given, kind), _view(target, shape, kind))
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
    file = Path(__file__).with_name("libcollective_ffi.so")
    handler = ctypes.CDLL(str(built(file, "the handler for calls inside jit")))
    handler.collective_ffi_install(_function)
    jax.ffi.register_ffi_target(
        _TARGET, jax.ffi.pycapsule(handler.collective_ffi_call), platform="cpu"
    )
