"""Kinds of results: every rank gets the same kind from every call."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collective.communicator import Communicator
from collective.errors import InvalidArgumentError
from collective.memory import nested
from tests.support.on_ranks import on_ranks, ranks_of

torch = pytest.importorskip("torch")

ranks = ranks_of(("threads", 3), ("shm", 2))
pair = ranks_of(("threads", 2), ("shm", 2))


class Producer:
    """Array of a framework without an adapter, whose module has no ``from_dlpack``."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def _frozen(array: Any) -> Producer:
    """Return a producer whose memory is read-only, like JAX's."""
    producer = Producer(array)
    producer.array.flags.writeable = False
    return producer


# Each function takes this rank's array, or a structure of arrays, and returns the call's result.
CALLS: dict[str, Callable[[Communicator, Any], Any]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "reduce": lambda comm, x: comm.reduce(x, root=1),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "scan": lambda comm, x: comm.scan(x),
    "broadcast": lambda comm, x: comm.broadcast(x, root=1),
    "broadcast in the background": lambda comm, x: comm.broadcast(x, async_op=True).wait(),
    "broadcast to None": lambda comm, x: comm.broadcast(x if comm.rank == 1 else None, root=1),
    "scatter": lambda comm, x: comm.scatter(x, root=1),
    "scatter to None": lambda comm, x: comm.scatter(x if comm.rank == 1 else None, root=1),
    "gather": lambda comm, x: comm.gather(x, root=1),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
    "sendrecv": lambda comm, x: comm.sendrecv(
        x, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    ),
    "broadcast_object": lambda comm, x: comm.broadcast_object(x, root=1),
    "all_gather_object": lambda comm, x: comm.all_gather_object(x),
    "scatter_object": lambda comm, x: comm.scatter_object([x] * comm.size),
}


@pytest.mark.parametrize("make", [Producer, _frozen])
@pytest.mark.parametrize("structure", [False, True], ids=["alone", "in a structure"])
@pytest.mark.parametrize("call", CALLS)
@on_ranks("ranks")
def test_producer_results_are_numpy_on_every_rank(
    comm: Communicator, call: str, structure: bool, make: Callable[[Any], Producer]
) -> None:
    x: Any = make(np.arange(6.0) + comm.rank)
    if structure:
        x = {"a": x, "b": [make(np.arange(6, dtype=np.int32)), np.ones(6, np.float32)]}
    result = CALLS[call](comm, x)
    leaves = [] if result is None else nested.flatten(result)
    assert {type(leaf) for leaf in leaves} <= {np.ndarray}
    for leaf in leaves:
        leaf += 1  # a result is writable on every rank


@on_ranks("ranks")
def test_producer_broadcast_has_values_of_root(comm: Communicator) -> None:
    for make in (Producer, _frozen):
        result = comm.broadcast(make(np.arange(6.0) + comm.rank), root=1)
        assert result.tolist() == [1, 2, 3, 4, 5, 6]


@on_ranks("ranks")
def test_producer_broadcast_shares_writable_memory_at_root_only(comm: Communicator) -> None:
    x = Producer(np.arange(6.0))
    result = comm.broadcast(x, root=0)
    assert np.may_share_memory(result, x.array) == (comm.rank == 0)


@on_ranks("ranks")
def test_producer_given_as_out_is_returned(comm: Communicator) -> None:
    x = Producer(np.arange(6.0) + comm.rank)
    assert comm.broadcast(x, root=1, out=x) is x
    assert comm.all_reduce(x, out=x) is x


class _Copier(Producer):
    """Array that exports a copy of its memory."""

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.copy().__dlpack__(**options)


@on_ranks("ranks")
def test_producer_that_exports_a_copy_is_refused_as_out(comm: Communicator) -> None:
    x, out = np.ones(3), _Copier(np.zeros(3))
    for call in (comm.all_reduce, comm.broadcast):
        with pytest.raises(InvalidArgumentError, match="gives a copy of its memory"):
            call(x, out=out)
    with pytest.raises(InvalidArgumentError, match="gives a copy of its memory"):
        comm.recv(out, (comm.rank + 1) % comm.size)
    assert comm.all_reduce(_Copier(x)).tolist() == [comm.size] * 3


@on_ranks("ranks")
def test_broadcast_of_structure_returns_same_object_at_root(comm: Communicator) -> None:
    x = {"a": np.arange(3.0)}
    assert (comm.broadcast(x, root=1) is x) == (comm.rank == 1)
    assert (comm.broadcast_object(x, root=1) is x) == (comm.rank == 1)


# -- subclasses, parameters, layouts ---------------------------------------------------------


def _read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


def _in_inference_mode() -> Any:
    with torch.inference_mode():
        return torch.ones(6, 6)


class _Own(np.ndarray):
    pass


class _Meters(np.ndarray):
    unit = "m"


class _OwnTensor(torch.Tensor):
    pass


class _Wrapper(torch.Tensor):
    """Tensor over other tensors, as a DTensor is."""

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError


_Pair = namedtuple("_Pair", "a b")
# Each function makes an array, or a structure, that is no plain one.
ODD: dict[str, Callable[[], Any]] = {
    "np.matrix": lambda: np.ones((6, 6)).view(np.matrix),
    "np.recarray": lambda: np.ones((6, 6)).view(np.recarray),
    "subclass": lambda: np.ones((6, 6)).view(_Own),
    "read-only": lambda: _read_only(np.ones((6, 6))),
    "Fortran order": lambda: np.ones((6, 6), order="F"),
    "strided": lambda: np.ones((6, 12))[:, ::2],
    "unaligned": lambda: np.zeros(289, np.uint8)[1:].view(np.float64).reshape(6, 6),
    "nn.Parameter": lambda: torch.nn.Parameter(torch.ones(6, 6)),
    "requires_grad": lambda: torch.ones(6, 6, requires_grad=True),
    "result of a function": lambda: torch.ones(6, 6, requires_grad=True) * 2,
    "subclass of Tensor": lambda: torch.ones(6, 6).as_subclass(_OwnTensor),
    "transposed": lambda: torch.ones(6, 6).T,
    "channels_last": lambda: torch.ones(6, 2, 2, 2).to(memory_format=torch.channels_last),
    "conjugated": lambda: torch.ones(6, 6, dtype=torch.complex64).conj(),
    "negated": lambda: torch.ones(6, 6, dtype=torch.complex64).conj().imag,
    "inference tensor": _in_inference_mode,
    "OrderedDict": lambda: OrderedDict(b=np.ones(6), a=[np.ones(6)]),
    "named tuple": lambda: _Pair(np.ones((6, 6)).view(np.matrix), (torch.ones(6, 6).T,)),
}


def _kind(x: Any) -> Any:
    """Return all that tells two results apart, except numbers and shapes."""
    if isinstance(x, dict):
        return type(x), [(key, _kind(value)) for key, value in x.items()]
    if isinstance(x, (list, tuple)):
        return type(x), [_kind(item) for item in x]
    if isinstance(x, torch.Tensor):
        lazy = x.is_conj() or x.is_neg()
        return type(x), x.dtype, x.is_contiguous(), x.requires_grad, lazy, x.is_inference()
    return type(x), x.dtype, x.flags.carray


_OF_NUMPY = (np.ndarray, np.matrix, np.recarray, _Own)
_PLAIN = {np.ndarray: (True,), torch.Tensor: (True, False, False, False)}


@pytest.mark.parametrize("odd", ODD)
@on_ranks("pair")
def test_results_of_odd_arrays_are_plain_on_every_rank(comm: Communicator, odd: str) -> None:
    x = ODD[odd]()
    structure = nested.is_tree(x)
    for name, call in CALLS.items():
        # Plain data has no such structures, and a rank that passes None gets NumPy's arrays.
        if ("object" in name and structure) or ("None" in name and type(x) not in _OF_NUMPY):
            continue
        found = call(comm, x)
        kinds = comm.all_gather_object(None if found is None else repr(_kind(found)))
        assert len({kind for kind in kinds if kind}) == 1, (name, kinds)
        for leaf in nested.flatten([] if found is None else found):
            cls, _, *rest = _kind(leaf)
            assert tuple(rest) == _PLAIN[cls], name


@on_ranks("pair")
def test_broadcast_of_odd_array_shares_memory_at_root_where_order_allows(
    comm: Communicator,
) -> None:
    for x in (np.ones((2, 2)).view(np.matrix), torch.nn.Parameter(torch.ones(2, 2))):
        result = comm.broadcast(x, root=comm.size - 1)
        with torch.no_grad():
            x[0, 0] = 5
        assert (float(result[0, 0]) == 5) == (comm.rank == comm.size - 1)


@on_ranks("pair")
def test_arrays_whose_meaning_would_be_lost_are_refused_by_name(comm: Communicator) -> None:
    masked = np.ma.masked_array(np.ones(3), [True, False, False])
    for x, lost in (
        (masked, "a MaskedArray, whose mask"),
        (np.ones(3).view(_Meters), "whose unit"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"all_reduce: x is .*{lost}"):
            comm.all_reduce({"a": x})
        with pytest.raises(InvalidArgumentError, match=f"all_reduce: out is .*{lost}"):
            comm.all_reduce(np.ones(3), out=x)
    wrapper: Any = torch.Tensor._make_wrapper_subclass(_Wrapper, (3,), dtype=torch.float32)
    with pytest.raises(InvalidArgumentError, match="torch: a _Wrapper has no memory of its own"):
        comm.all_reduce(wrapper)


def test_producer_with_from_dlpack_is_same_object_at_root(
    monkeypatch: pytest.MonkeyPatch, ranks: Any
) -> None:
    module: Any = types.ModuleType("a_module_that_takes")

    class Taking(Producer):
        pass

    Taking.__module__ = "a_module_that_takes.arrays"
    module.from_dlpack = lambda array: Taking(np.from_dlpack(array))
    monkeypatch.setitem(sys.modules, "a_module_that_takes", module)

    def program(comm: Communicator) -> None:
        x = Taking(np.arange(3.0))
        result = comm.broadcast(x, root=0)
        assert type(result) is Taking
        assert (result is x) == (comm.rank == 0)

    from collective.testing import run_ranks

    run_ranks(2, program, backend="threads")
