"""Kinds of arrays: the suite, whose own arrays are NumPy's, on those of another framework.

A check knows NumPy. Its ranks get a communicator that makes each array of a call one of the kind,
over the same memory where that can be; makes the call; holds that what is returned is of the kind;
and gives it back as NumPy. So each check holds for any kind, and for one of a user's own::

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
from typing import TYPE_CHECKING, Any

import numpy as np

from collective.communicator import Communicator
from collective.errors import BackendUnavailableError, CollectiveError, InvalidArgumentError
from collective.install import hint
from collective.memory import nested

from .frameworks import framework
from .samples import has

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["NAMES", "Kind", "Loan", "OfKind", "kind_of", "require"]

Array = np.ndarray[Any, Any]

#: The kinds that have a name.
NAMES = ("numpy", "torch", "chainer", "dlpack", "cupy", "cuda")
_CALLS = """
    send recv sendrecv broadcast reduce all_reduce scatter gather all_gather reduce_scatter
    all_to_all scan
""".split()
_GROUPS = ("split", "split_by_host", "group", "dup", "shrink", "grow")
_SIGNATURES = {name: inspect.signature(getattr(Communicator, name)) for name in _CALLS}


@dataclass(frozen=True)
class Kind:
    """A kind of array, whose ranks may be processes: all of it has to be picklable.

    Attributes:
        name: for people.
        of: makes one of NumPy's, with its dtype and shape; over its memory or of a copy. Raises
            ``TypeError`` of what the kind cannot hold, which is then given as it is.
        read: returns NumPy of one, over its memory or a copy.
        type: of what calls return.
        like: what calls that have no array are told by ``like=``.
    """

    name: str
    of: Callable[[Array], Any]
    read: Callable[[Any], Array]
    type: type
    like: Any

    def communicator(self, comm: Communicator) -> Any:
        """Return ``comm`` as the checks know it."""
        return OfKind(comm, self)

    def loan(self, comm: Communicator, hosts: Sequence[Array]) -> Loan:
        """Return what stands for the arrays of one call."""
        return Loan(self, hosts)

    def empty(self, comm: Communicator, shape: Any, dtype: Any) -> Array:
        """Return memory of ``comm.empty()``."""
        return self.read(comm.empty(shape, dtype, like=self.like))


class Loan:
    """What stands for the arrays of one call while it is made.

    Attributes:
        made: one for each of ``hosts``.
        like: what ``like=`` of the call is to be.
    """

    def __init__(self, kind: Kind, hosts: Sequence[Array]) -> None:
        self._kind = kind
        self.like = kind.like
        self.made = [_or_itself(kind, host) for host in hosts]

    def end(self, call: str) -> None:
        """Wait until the call is over, where that returns before."""

    def take_back(self, hosts: Sequence[Array], written: Sequence[bool]) -> None:
        """Copy what was written to where it is expected."""
        for host, made, changed in zip(hosts, self.made, written):
            if changed and made is not host:
                there = self._kind.read(made)
                if not np.may_share_memory(there, host):
                    host[...] = there


def _or_itself(kind: Kind, host: Array) -> Any:
    try:
        return kind.of(host)
    except TypeError:
        return host


class OfKind:
    """A communicator that takes and returns NumPy's arrays, and whose calls get a kind's."""

    def __init__(self, comm: Communicator, kind: Kind) -> None:
        self._comm = comm
        self._kind = kind
        self._flying: list[_KindWork] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        if name in _CALLS:
            return functools.partial(self._call, name)
        if name in _GROUPS:
            return lambda *args, **options: self._child(found(*args, **options))
        return found

    def _child(self, comm: Communicator | None) -> Any:
        return None if comm is None else self._kind.communicator(comm)

    def empty(self, shape: Any, dtype: Any = "float32") -> Array:
        """Return NumPy's over the memory of the communicator's ``empty``."""
        return self._kind.empty(self._comm, shape, dtype)

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        signature = _SIGNATURES[name]
        given = signature.bind(self._comm, *args, **options).arguments
        call = _Call(self, name, given)
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
        """Wait for the calls in flight that write to these arrays, if the kind's are copies."""
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


class _Call:
    """The arrays of one call, NumPy's and the kind's."""

    def __init__(self, comm: OfKind, name: str, given: dict[str, Any]) -> None:
        self._kind = comm._kind
        self._name = name
        self._given = {key: given[key] for key in ("x", "out") if given.get(key) is not None}
        leaves = {key: nested.flatten(value) for key, value in self._given.items()}
        arrays = {id(leaf): leaf for each in leaves.values() for leaf in each if _is_array(leaf)}
        # By identity: an output that is the input is one array for the call, too.
        self._hosts = list(arrays.values())
        self._outs = {id(leaf) for leaf in leaves.get("out", ())}
        comm.settle(self._hosts)
        self.loan = self._kind.loan(comm._comm, self._hosts)
        made = dict(zip(arrays, self.loan.made))
        for key, value in self._given.items():
            replaced = [made.get(id(leaf), leaf) for leaf in leaves[key]]
            given[key] = nested.rebuild(value, iter(replaced))
        self._moved = {key: given[key] for key in self._given}
        self._back = {id(each): host for host, each in zip(self._hosts, self.loan.made)}

    def writes_to(self, hosts: Sequence[Array]) -> bool:
        outs = [host for host in self._hosts if id(host) in self._outs]
        return any(np.may_share_memory(out, host) for out in outs for host in hosts)

    def finish(self, result: Any) -> Any:
        """Take back what was written, and return the result as NumPy's."""
        self.loan.take_back(self._hosts, [id(host) in self._outs for host in self._hosts])
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
        # An input that is no output comes back only where results are of its type.
        if host is not None and (of_kind or host is leaf or id(host) in self._outs):
            return host
        if of_kind:
            return self._kind.read(leaf)
        # What is sent as an object arrives as NumPy's; what the kind cannot hold was so before.
        plain = any(made is host for made, host in zip(self.loan.made, self._hosts))
        if not plain and not (nested.is_tree(result) and self._name == "recv"):
            raise AssertionError(
                f"{self._name}: got {type(leaf).__name__} for arrays of {self._kind.name}"
            )
        return leaf


class _KindWork:
    """A call on its way, whose arrays are taken back by whoever first learns that it is over."""

    def __init__(self, work: Any, call: _Call) -> None:
        self._work = work
        self.call: _Call | None = call
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


# -- those that have a name -------------------------------------------------------------------


def require(kind: str | Kind) -> None:
    """Hold that there is such a kind, and what it needs.

    Raises:
        InvalidArgumentError: none has that name.
        BackendUnavailableError: its framework is not here.
    """
    if isinstance(kind, Kind):
        return
    if kind not in NAMES:
        raise InvalidArgumentError(f"kind: {kind!r}; one of {', '.join(NAMES)}, or a Kind.")
    if kind in ("torch", "chainer", "cupy") and not has(kind):
        raise BackendUnavailableError(f"kind {kind}: {kind} is not installed; `{hint(kind)}`.")


def kind_of(kind: str | Kind) -> Kind | None:
    """Return the kind of that name, or which it is; None for NumPy's."""
    if isinstance(kind, Kind):
        return kind
    return None if kind == "numpy" else _made(kind)


@functools.cache
def _made(name: str) -> Kind:
    if name in ("cuda", "cupy"):
        found: Kind = importlib.import_module("collective.testing.kinds_device").on_device(name)
        return found
    return {"torch": _of_torch, "chainer": _of_chainer, "dlpack": _of_dlpack}[name]()


def _of_torch() -> Kind:
    arrays, tensors = framework("numpy"), framework("torch")

    def of(x: Array) -> Any:
        # PyTorch warns of memory that it cannot write to, and knows no negative strides.
        whole = np.asarray(x)
        if not whole.flags.writeable or any(stride < 0 for stride in whole.strides):
            whole = whole.copy()
        return tensors.wrap(arrays.stored(whole), whole.dtype.name)

    def read(x: Any) -> Array:
        return np.asarray(arrays.wrap(tensors.stored(x), tensors.dtype_of(x)))

    return Kind("torch", of, read, importlib.import_module("torch").Tensor, "torch")


def _of_chainer() -> Kind:
    importlib.import_module("collective.adapters.chainer.arrays")  # makes Chainer's import work
    chainer = importlib.import_module("chainer")

    def of(x: Array) -> Any:
        if x.dtype.name == "bfloat16":
            raise TypeError("chainer: no bfloat16")
        return chainer.Variable(np.asarray(x), requires_grad=False)

    return Kind("chainer", of, lambda x: np.asarray(x.array), chainer.Variable, "chainer")


class Exporter:
    """An array of which nothing is known but DLPack."""

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
            raise TypeError("dlpack: NumPy exports no such array")
        return Exporter(whole)

    def read(x: Any) -> Array:
        return x._array if isinstance(x, Exporter) else np.asarray(x)

    # A module without from_dlpack gets NumPy back.
    return Kind("dlpack", of, read, np.ndarray, "numpy")
