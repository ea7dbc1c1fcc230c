"""Kinds of arrays: they let the suite, whose checks use NumPy, test arrays of other frameworks.

A check knows only NumPy. Its ranks get a communicator that makes an array of the kind for each
array of a call, over the same memory if possible. It makes the call, checks that the result is of
the kind, and returns the result as NumPy's. So each check works for any kind, also for a kind that
a user defines::

    mine = Kind("mine", of=mylib.asarray, read=mylib.to_numpy, type=mylib.Array, like="mylib")
    run_checks("shm", kind=mine)
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from collective import BackendUnavailableError, CollectiveError, Communicator, InvalidArgumentError
from collective.inner import install, nested

from .frameworks import framework
from .samples import has

Array = np.ndarray[Any, Any]

#: The names of the built-in kinds.
NAMES = ("numpy", "torch", "jax", "chainer", "dlpack", "cupy", "cuda")
_CALLS = """
    send recv sendrecv broadcast reduce all_reduce scatter gather all_gather reduce_scatter
    all_to_all scan
""".split()
_GROUPS = ("split", "group", "dup", "shrink", "grow")
_SIGNATURES = {name: inspect.signature(getattr(Communicator, name)) for name in _CALLS}


@dataclass(frozen=True)
class Kind:
    """Kind of array. All of it must be picklable, because ranks may be processes.

    Attributes:
        name: name for reports.
        of: function that makes an array of the kind from NumPy's, with its dtype and shape, over
            its memory or a copy. Raises ``TypeError`` for an array that the kind cannot hold; the
            call then gets NumPy's array.
        read: function that returns NumPy's array for one of the kind, over its memory or a copy.
        type: class of the arrays that calls return.
        like: value of ``like=`` for calls without an array.
        immutable: whether the arrays never change. Then ``out``, and memory of ``empty()`` for the
            program to write to, are NumPy's.
    """

    name: str
    of: Callable[[Array], Any]
    read: Callable[[Any], Array]
    type: type
    like: Any
    immutable: bool = False

    def communicator(self, comm: Communicator) -> Any:
        """Return a communicator with NumPy's arrays outside that passes the kind's to ``comm``."""
        return OfKind(comm, self)

    def loan(self, comm: Communicator, hosts: Sequence[Array], written: Sequence[bool]) -> Loan:
        """Return the kind's arrays that replace ``hosts`` in one call, which may write to some."""
        return Loan(self, hosts, written)

    def empty(self, comm: Communicator, shape: Any, dtype: Any) -> Array:
        """Return memory of ``comm.empty()`` as NumPy's array."""
        if self.immutable:
            return comm.empty(shape, dtype)
        return self.read(comm.empty(shape, dtype, like=self.like))


class Loan:
    """The kind's arrays that replace NumPy's during one call.

    Attributes:
        made: the kind's arrays, in the order of ``hosts``.
        like: value of ``like=`` for the call.
    """

    def __init__(self, kind: Kind, hosts: Sequence[Array], written: Sequence[bool]) -> None:
        self._kind = kind
        self.like = kind.like
        self.made = [
            host if kind.immutable and changes else _or_itself(kind, host)
            for host, changes in zip(hosts, written)
        ]

    def end(self, call: str) -> None:
        """Wait until the call is complete, for kinds whose calls return earlier."""

    def take_back(self, hosts: Sequence[Array], written: Sequence[bool]) -> None:
        """Copy the arrays that the call has written back to their ``hosts``."""
        for host, made, changed in zip(hosts, self.made, written):
            if changed and made is not host:
                result = self._kind.read(made)
                if not np.may_share_memory(result, host):
                    host[...] = result


def _or_itself(kind: Kind, host: Array) -> Any:
    try:
        return kind.of(host)
    except TypeError:
        return host


class OfKind:
    """Communicator with NumPy's arrays for its caller, and a kind's arrays in its calls."""

    def __init__(self, comm: Communicator, kind: Kind) -> None:
        self._comm = comm
        self._kind = kind
        self._flying: list[_KindWork] = []

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._comm, name)
        if name in _CALLS:
            return functools.partial(self._call, name)
        if name in _GROUPS:
            return lambda *args, **options: self._child(attribute(*args, **options))
        return attribute

    def _child(self, comm: Communicator | None) -> Any:
        return None if comm is None else self._kind.communicator(comm)

    def empty(self, shape: Any, dtype: Any = "float32") -> Array:
        """Return NumPy's array over the memory of the communicator's ``empty``."""
        return self._kind.empty(self._comm, shape, dtype)

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        signature = _SIGNATURES[name]
        given = signature.bind(self._comm, *args, **options).arguments
        call = _CallArrays(self, name, given)
        if "like" in signature.parameters:
            given["like"] = call.loan.like
        del given["self"]
        result = getattr(self._comm, name)(**given)
        if given.get("async_op"):
            work = _KindWork(result, call)
            self._flying.append(work)
            return work
        call.loan.end(name)
        return call.finish(result)

    def settle(self, hosts: Sequence[Array]) -> None:
        """Wait for calls in flight that write to ``hosts``, if the kind's arrays are copies."""
        self._flying = [work for work in self._flying if work.call is not None]
        for work in self._flying:
            if work.writes_to(hosts):
                with contextlib.suppress(CollectiveError):
                    work.wait()

    def __enter__(self) -> Self:
        self._comm.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._comm.__exit__(*error)

    def __repr__(self) -> str:
        return repr(self._comm)


class _CallArrays:
    """The arrays of one call: NumPy's and the kind's."""

    def __init__(self, comm: OfKind, name: str, given: dict[str, Any]) -> None:
        self._kind = comm._kind
        self._name = name
        self._given = {key: given[key] for key in ("x", "out") if given.get(key) is not None}
        leaves = {key: nested.flatten(value) for key, value in self._given.items()}
        arrays = {id(leaf): leaf for tree in leaves.values() for leaf in tree if _is_array(leaf)}
        # By identity: if the output is the input, the call must get the same array twice.
        self._hosts = list(arrays.values())
        self._outs = {id(leaf) for leaf in leaves.get("out", ())}
        comm.settle(self._hosts)
        self._written = [id(host) in self._outs for host in self._hosts]
        self.loan = self._kind.loan(comm._comm, self._hosts, self._written)
        made = dict(zip(arrays, self.loan.made))
        for key, value in self._given.items():
            replaced = [made.get(id(leaf), leaf) for leaf in leaves[key]]
            given[key] = nested.rebuild(value, iter(replaced))
        self._moved = {key: given[key] for key in self._given}
        self._back = {id(array): host for host, array in zip(self._hosts, self.loan.made)}

    def writes_to(self, hosts: Sequence[Array]) -> bool:
        outs = [host for host in self._hosts if id(host) in self._outs]
        return any(np.may_share_memory(out, host) for out in outs for host in hosts)

    def finish(self, result: Any) -> Any:
        """Copy back what the call has written, and return the result as NumPy's."""
        self.loan.take_back(self._hosts, self._written)
        if result is None:
            return None
        leaves = [self._as_numpy(leaf, result) for leaf in nested.flatten(result)]
        for key, moved in self._moved.items():
            if result is moved:
                return self._given[key]
        return nested.rebuild(result, iter(leaves))

    def _as_numpy(self, leaf: Any, result: Any) -> Any:
        if leaf is None:
            return None
        host = self._back.get(id(leaf))
        of_kind = isinstance(leaf, self._kind.type)
        # An input that is not an output can be the result only where results have its type.
        if host is not None and (of_kind or host is leaf or id(host) in self._outs):
            return host
        if of_kind:
            return self._kind.read(leaf)
        # Two results are NumPy's: an array in a received object, and one that the kind cannot hold.
        plain = any(made is host for made, host in zip(self.loan.made, self._hosts))
        if not plain and not (nested.is_tree(result) and self._name == "recv"):
            raise AssertionError(
                f"{self._name}: got {type(leaf).__name__} for arrays of {self._kind.name}"
            )
        return leaf


class _KindWork:
    """Call in flight. The first method that finds it complete copies its arrays back."""

    def __init__(self, work: Any, call: _CallArrays) -> None:
        self._work = work
        self.call: _CallArrays | None = call
        self._result: Any = None

    def writes_to(self, hosts: Sequence[Array]) -> bool:
        return self.call is not None and self.call.writes_to(hosts)

    def wait(self, timeout: float | None = None) -> Any:
        result = self._work.synchronize(timeout)
        if self.call is not None:
            self._result = self.call.finish(result)
            self.call = None
        return self._result

    def done(self) -> bool:
        if not self._work.done():
            return False
        with contextlib.suppress(CollectiveError):
            self.wait()
        return True

    def exception(self) -> BaseException | None:
        return self._work.exception()  # type: ignore[no-any-return]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (np.ndarray, np.generic))


# -- the built-in kinds -----------------------------------------------------------------------


def require(kind: str | Kind) -> None:
    """Check that there is such a kind, and that its framework is installed.

    Raises:
        InvalidArgumentError: no kind has that name.
        BackendUnavailableError: the framework of the kind is not installed.
    """
    if isinstance(kind, Kind):
        return
    if kind not in NAMES:
        raise InvalidArgumentError(
            f"kind: unknown name {kind!r}; pass one of {', '.join(NAMES)}, or a Kind."
        )
    if kind in ("torch", "jax", "chainer", "cupy") and not has(kind):
        raise BackendUnavailableError(
            f"kind {kind}: {kind} is not installed; `{install.hint(kind)}`."
        )


def kind_of(kind: str | Kind) -> Kind | None:
    """Return the :class:`Kind` of a name, or ``kind`` if it is one; None for NumPy."""
    if isinstance(kind, Kind):
        return kind
    return None if kind == "numpy" else _made(kind)


@functools.cache
def _made(name: str) -> Kind:
    if name in ("cuda", "cupy"):
        found: Kind = importlib.import_module("collective.testing.kinds_device").on_device(name)
        return found
    return _of_dlpack() if name == "dlpack" else _of_framework(name)


def _of_framework(name: str) -> Kind:
    arrays, theirs = framework("numpy"), framework(name)
    known = theirs.dtypes()

    def of(x: Array) -> Any:
        dtype, whole = x.dtype.name, np.asarray(x)
        if dtype not in known:
            raise TypeError(f"{name}: no {dtype}")
        reverse = any(stride < 0 for stride in whole.strides)
        if theirs.immutable or (reverse and not theirs.backwards) or not whole.flags.writeable:
            whole = whole.copy()
        return theirs.wrap(arrays.stored(whole), dtype)

    def read(x: Any) -> Array:
        # Checks write to the arrays that they read.
        stored = theirs.read(x) if theirs.immutable else theirs.stored(x)
        return np.asarray(arrays.wrap(stored, theirs.dtype_of(x)))

    return Kind(name, of, read, theirs.type, theirs.like, theirs.immutable)


class Exporter:
    """Array that offers nothing but the DLPack protocol."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def _of_dlpack() -> Kind:
    def of(x: Array) -> Any:
        whole = np.asarray(x)
        if whole.dtype.name == "bfloat16" or not whole.flags.writeable:
            raise TypeError("dlpack: NumPy cannot export this array (bfloat16 or read-only)")
        return Exporter(whole)

    def read(x: Any) -> Array:
        return x._array if isinstance(x, Exporter) else np.asarray(x)

    # For an array whose module has no from_dlpack, calls return NumPy's arrays.
    return Kind("dlpack", of, read, np.ndarray, "numpy")
