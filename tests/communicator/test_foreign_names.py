"""Names from other libraries: errors recommend this library's name, and no attribute exists."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import pickle
import re
import textwrap
from typing import Any

import numpy as np
import pytest

import collective
from collective.communicator import Communicator, foreign_names
from collective.errors import InvalidArgumentError
from collective.ops import as_op
from tests.support.interpreter import run_python

NAMES = sorted({*foreign_names._OF_COMMUNICATOR, *foreign_names._OF_PACKAGE})

#: Attributes of a communicator that its class does not have.
ATTRIBUTES = {"rank", "size", "local_rank", "local_size", "backend", "inner"}


@pytest.fixture
def comm() -> Any:
    with collective.init() as comm:
        yield comm


@pytest.mark.parametrize("name", NAMES)
def test_foreign_name_remedy_names_existing_attribute(name: str) -> None:
    for of, owner in (("comm", Communicator), ("collective", collective)):
        remedy = foreign_names.remedy_of(name, of) or ""
        for word in remedy.replace("collective.current().", "comm.").split():
            if word.startswith(f"{of}."):
                attribute = re.split(r"\W", word.removeprefix(f"{of}."))[0]
                assert hasattr(owner, attribute) or attribute in ATTRIBUTES, remedy
    assert not hasattr(collective, name)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda c: c.allreduce, "'Communicator' object has no attribute 'allreduce'; use comm."),
        (lambda c: c.isend, "use comm.send(x, dst, ...) with async_op=True"),
        (lambda c: c.Get_rank, "use comm.rank"),
        (lambda c: c.Create_cart, "use comm.grid(shape, periodic)"),
        (lambda c: Communicator.bcast, "root=0), or comm.broadcast_object(obj, root=0) for obj"),
        (lambda c: collective.MPI, "use `collective run --mpi4py`, which runs a program of mpi4"),
        (lambda c: collective.ANY_TAG, "this package has no messages of any tag and no windows"),
        (lambda c: collective.Win, "this package has no messages of any tag and no windows"),
        (lambda c: c.allgather, "use comm.all_gather(x), or comm.all_gather_object(obj) for obj"),
        (lambda c: c.irecv, "or comm.recv_object(src) for objects"),
        (lambda c: c.alltoall, "use comm.all_to_all(x)"),
        (lambda c: collective.maxloc, "use max or min of all_gather_object((x, rank))"),
        (lambda c: collective.Allreduce, "no attribute 'Allreduce'; use collective.all_reduce("),
        (lambda c: collective.get_rank, "use collective.rank()"),
        (lambda c: collective.all_gather_into_tensor, "use collective.all_gather(x)"),
        (lambda c: collective.SUM, "use op='sum'"),
        (lambda c: collective.IN_PLACE, "use out=x, as in comm.all_reduce(x, out=x)"),
        (lambda c: c.Waitall, "use [work.wait() for work in works]"),
        (lambda c: collective.Waitany, "use work.wait()"),
        (lambda c: collective.Test, "use work.done()"),
        (lambda c: c.probe, "use comm.recv(None, src), which takes a message of any shape"),
        (lambda c: collective.Iprobe, "use collective.recv(None, src)"),
        (lambda c: collective.finalize, "use `with collective.init() as comm:`"),
        (lambda c: c.Allreduce_init, "use the call itself, as comm.all_reduce(x, out=y)"),
        (lambda c: c.plan, "use the call itself, as comm.all_reduce(x, out=y)"),
        (lambda c: collective.get_collective_group_size, "use collective.size()"),
        (lambda c: c.intra_rank, "use comm.local_rank"),
        (lambda c: collective.init_collective_group, "use collective.init(rank=, size=, store=)"),
        (lambda c: collective.PROC_NULL, "use collective.NULL"),
        (lambda c: collective.ReduceOp.PRODUCT, "ReduceOp has no PRODUCT: operators are given by"),
        (lambda c: collective.ReduceOp.SUM, "use op='sum'"),
    ],
)  # fmt: skip
def test_foreign_attribute_error_recommends_equivalent(comm: Any, call: Any, text: str) -> None:
    with pytest.raises(AttributeError) as raised:
        call(comm)
    assert text in str(raised.value)


KEYWORDS = [
    (lambda c: c.send(1, dest=1), "send: keyword 'dest'; one of x, dst, tag, timeout, async_op;"),
    (lambda c: c.recv(1, source=1), "use src="),
    (lambda c: c.sendrecv(1, dest=1, source=1), "use dst="),
    (lambda c: c.broadcast(1, src=1), "use root="),
    (lambda c: c.reduce(tensor=1), "use x="),
    (lambda c: collective.all_reduce(1, group=1), "use comm.group(ranks).all_reduce(...)"),
    (lambda c: c.send_object(1, dest=1), "send_object: keyword 'dest'; one of obj, dst"),
    (lambda c: collective.recv_object(source=1), "use src="),
    (lambda c: c.broadcast_object(1, async_op=True), "use broadcast_object(...) without it, which"),
    (lambda c: c.split(0, timeout=3), "use collective.init(timeout=...), which holds for split"),
    (lambda c: c.split(colour=0), "split: keyword 'colour'; one of color, key; use color="),
    (lambda c: c.dup(async_op=True), "dup: keyword 'async_op'; it takes none; use dup(...) with"),
    (lambda c: c.group(group=[0]), "group: keyword 'group'; one of ranks; use ranks="),
    (lambda c: c.grid(dims=(1, 1)), "grid: keyword 'dims'; one of shape, periodic; use shape="),
    (lambda c: c.empty(size=3), "use shape="),
    (lambda c: c.split(0, dest=1), "keyword 'dest'; one of color, key; it has no equivalent here"),
    (lambda c: c.shrink(group=1), "use comm.group(ranks).shrink(...)"),
    (lambda c: c.sendrecv(1, 1, 1, sendtag=1), "use tag="),
    (lambda c: c.sendrecv(1, 1, 1, recvtag=1), "use tag="),
    (lambda c: c.reduce(1, dst_rank=0), "use root="),
    (lambda c: c.send(1, dst_rank=0), "use dst="),
    (lambda c: c.all_to_all(1, splits=[1]), "use counts="),
    (lambda c: c.all_reduce(1, prescale_factor=2), "use op=collective.premul_sum(factor)"),
    (lambda c: c.all_reduce(1, group_name="x"), "use comm.group(ranks).all_reduce(...)"),
    (lambda c: c.grid((1, 1), reorder=True), "it has no equivalent here"),
    (
        lambda c: c.all_reduce(1, 2),
        "all_reduce: 2 positional arguments; expected at most 1: x. Pass the array for the result "
        "as out=. Keywords: op, ",
    ),
    (lambda c: collective.reduce(1, 2), "reduce: 2 positional arguments; expected at most 1: x."),
    (lambda c: c.sendrecv(1, 0, 2, 0), "sendrecv: 4 positional arguments; expected at most 3: x,"),
    (lambda c: c.barrier(1), "barrier: 1 positional argument; expected none. Keywords: timeout"),
    (lambda c: c.all_reduce(1, nonsense=1), "unexpected keyword argument 'nonsense'"),
    (lambda c: c.split(0, nonsense=1), "unexpected keyword argument 'nonsense'"),
]


@pytest.mark.parametrize(("call", "text"), KEYWORDS)
def test_foreign_keyword_error_recommends_equivalent(comm: Any, call: Any, text: str) -> None:
    with pytest.raises(TypeError) as raised:
        call(comm)
    assert text in str(raised.value)


def test_foreign_keyword_error_recommends_equivalent_without_core() -> None:
    program = """
        import sys
        sys.modules["collective.native._core"] = None  # there is none
        import collective
        from tests.communicator.test_foreign_names import KEYWORDS
        assert collective.native.status().startswith("not in use: not built")
        with collective.init() as comm:
            for call, text in KEYWORDS:
                try:
                    call(comm)
                except TypeError as error:
                    assert text in str(error), (text, str(error))
                else:
                    raise AssertionError(text)
        print(len(KEYWORDS))
        """
    done = run_python("-c", textwrap.dedent(program), COLLECTIVE_DISABLE="")
    assert (done.stdout, done.stderr) == (f"{len(KEYWORDS)}\n", "")


def test_explained_keeps_type_error_raised_inside_call() -> None:
    def inside() -> None:
        raise TypeError("unexpected keyword argument 'dest'")

    with pytest.raises(TypeError, match=r"^unexpected keyword argument 'dest'$"):
        foreign_names.explained(inside)()


class _Odd:
    """Array that raises the same TypeError as a call with an unknown keyword argument."""

    def __dlpack__(self) -> None: ...

    def __dlpack_device__(self) -> None:
        raise TypeError("unexpected keyword argument 'dest'")


def test_all_reduce_keeps_type_error_raised_by_array(comm: Any) -> None:
    with pytest.raises(TypeError, match=r"^unexpected keyword argument 'dest'$"):
        comm.all_reduce(_Odd(), op="sum")


class _Mpi4pys:
    """Stand-in for ``MPI.SUM``: mpi4py pickles a predefined operator by its name."""

    def __reduce__(self) -> str:
        return "SUM"


_Mpi4pys.__module__ = "mpi4py.MPI"


@pytest.mark.parametrize(
    ("op", "meant"),
    [
        ("mean", "avg"), ("SUM", "sum"), ("product", "prod"), ("Average", "avg"),
        (_Mpi4pys(), "sum"),
    ],
)  # fmt: skip
def test_foreign_operator_error_recommends_equivalent(op: Any, meant: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"Use op='{meant}'"):
        as_op(op)


@pytest.mark.parametrize("call", ["all_reduce", "reduce", "reduce_scatter", "scan"])
def test_reduction_by_mean_recommends_avg(comm: Any, call: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"'mean' is not a reduction.*Use op='avg'"):
        getattr(comm, call)(np.ones(2), op="mean")


def test_differentiable_reduction_by_mean_recommends_avg(comm: Any) -> None:
    torch = pytest.importorskip("torch")
    functional = pytest.importorskip("collective.adapters.torch").functional
    with pytest.raises(InvalidArgumentError, match=r"'mean' is not a reduction.*Use op='avg'"):
        functional.all_reduce(torch.ones(2), op="mean")


def test_broadcast_of_a_module_recommends_its_state(comm: Any) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidArgumentError, match=r"for a module: x\.state_dict\(\)"):
        comm.broadcast(torch.nn.Linear(2, 2))


def test_all_reduce_of_a_generator_recommends_a_list(comm: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"for the arrays of this iterator: list\(x\)"):
        comm.all_reduce(np.ones(2) for _ in range(2))


def test_torch_operator_error_recommends_equivalent() -> None:
    dist = pytest.importorskip("torch.distributed")
    with pytest.raises(InvalidArgumentError, match="Use op='max'"):
        as_op(dist.ReduceOp.MAX)


@pytest.mark.parametrize(
    ("name", "remedy"), [("Wait", "wait()"), ("Test", "done()"), ("is_completed", "done()")]
)
def test_foreign_name_of_a_work_names_the_remedy(comm: Any, name: str, remedy: str) -> None:
    work = comm.barrier(async_op=True)
    work.wait()
    with pytest.raises(AttributeError, match=re.escape(f"; use work.{remedy}")):
        getattr(work, name)


@pytest.mark.parametrize("holder", ["inner", "membership"])
def test_former_name_of_a_communicator_names_its_place(comm: Any, holder: str) -> None:
    place = f"comm.{holder}."
    former = {n for n in NAMES if (foreign_names.remedy_of(n, "comm") or "") == place + n}
    assert len(former) == {"inner": 11, "membership": 8}[holder]
    for name in former:
        assert hasattr(getattr(comm, holder), name)
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; use {place}{name}$"):
            getattr(comm, name)


def test_setting_a_former_name_raises_instead_of_doing_nothing(comm: Any) -> None:
    with pytest.raises(AttributeError, match=r"use comm\.inner\.expects"):
        comm.expects = [1]


def test_unknown_name_of_a_work_has_no_remedy(comm: Any) -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'nonsense'$"):
        comm.barrier(async_op=True).nonsense  # noqa: B018


def test_foreign_names_hide_no_name_of_a_communicator() -> None:
    own = [vars(kind) for kind in Communicator.__mro__ if kind is not foreign_names.ForeignNames]
    assert [name for name in foreign_names._OF_COMMUNICATOR if any(name in v for v in own)] == []


def test_foreign_names_are_hidden_from_introspection(comm: Communicator) -> None:
    names = foreign_names._OF_COMMUNICATOR
    assert not names & set(dir(comm))
    assert {"all_reduce", "rank", "grid"} <= set(dir(comm))
    assert dict(inspect.getmembers(comm))["rank"] == 0
    assert copy.copy(comm).rank == 0
    op = collective.premul_sum(2)
    assert pickle.loads(pickle.dumps(op)) == op


@pytest.mark.parametrize(
    ("name", "some"),
    [
        ("collective", ["all_reduce", "NULL", "testing", "errors"]),
        ("collective.adapters.torch", ["DistributedDataParallel", "functional"]),
        ("collective.adapters.chainer", ["Split", "functional"]),
        ("collective.backends.nccl", ["NcclBackend"]),
    ],
)
def test_dir_of_package_lists_lazy_imports(name: str, some: list[str]) -> None:
    if "adapters" in name and importlib.util.find_spec(name.rpartition(".")[2]) is None:
        pytest.skip("the framework is not installed")
    module = importlib.import_module(name)
    assert set(some) <= set(dir(module))
    assert [attribute for attribute in dir(module) if not hasattr(module, attribute)] == []
