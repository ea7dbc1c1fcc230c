"""Checks of bad arguments: the caller gets the right error at once, and no rank is harmed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from collective import (
    ANY_SOURCE,
    NULL,
    Communicator,
    CommunicatorClosedError,
    DtypeError,
    InvalidArgumentError,
    RankError,
    ShapeError,
    UnsupportedError,
    premul_sum,
)

from .checks import on_each_rank
from .checks_broken import calls_of
from .samples import assert_same

# The argument is a communicator. Its annotations would reject most of these calls, hence Any.
_Call = Callable[[Any], Any]


def _read_only() -> Any:
    array = np.zeros(4)
    array.flags.writeable = False
    return array


def _overlapping() -> Any:
    """Return rows of two elements; each row shares an element with the next."""
    return np.lib.stride_tricks.as_strided(np.zeros(3), (2, 2), (8, 8))


_F = np.ones(4)
_W = np.ones(4)  # out= of calls that must be refused; is written to only if a check fails
_I = np.ones(4, np.int32)
_B = np.ones(4, bool)
_BAD: dict[str, tuple[_Call, type[Exception]]] = {
    "unknown op": (lambda c: c.all_reduce(_F, op="summ"), InvalidArgumentError),
    "op of another type": (lambda c: c.all_reduce(_F, op=3), InvalidArgumentError),
    "average of integers": (lambda c: c.all_reduce(_I, op="avg"), DtypeError),
    "premul_sum of integers": (lambda c: c.reduce(_I, op=premul_sum(2)), DtypeError),
    "sum of booleans": (lambda c: c.all_reduce(_B), DtypeError),
    "product of booleans": (lambda c: c.reduce(_B, op="prod"), DtypeError),
    "bitwise or of floats": (lambda c: c.reduce_scatter(_F, op="bor"), DtypeError),
    "maximum of complex": (lambda c: c.scan(_F + 1j, op="max"), DtypeError),
    "average by scan": (lambda c: c.scan(_F, op="avg"), InvalidArgumentError),
    "unknown order": (lambda c: c.all_reduce(_F, order="size"), InvalidArgumentError),
    "root too large": (lambda c: c.broadcast(_F, root=c.size), RankError),
    "root negative": (lambda c: c.reduce(_F, root=-1), RankError),
    "root of another type": (lambda c: c.gather(_F, root="0"), RankError),
    "root a boolean": (lambda c: c.scatter(_F, root=True), RankError),
    "out of another shape": (lambda c: c.all_reduce(_F, out=np.zeros(5)), ShapeError),
    "out of another dtype": (lambda c: c.all_reduce(_F, out=np.zeros(4, "f4")), DtypeError),
    "out read-only": (lambda c: c.all_reduce(_F, out=_read_only()), InvalidArgumentError),
    "out expanded": (
        lambda c: c.all_reduce(_F, out=np.lib.stride_tricks.as_strided(np.zeros(1), (4,), (0,))),
        InvalidArgumentError,
    ),
    "out that overlaps itself": (
        lambda c: c.all_reduce(np.ones((2, 2)), out=_overlapping()), InvalidArgumentError,
    ),
    "one array twice in out": (
        lambda c: c.all_reduce([_F, _F], out=[_W, _W]), InvalidArgumentError,
    ),
    "leaves of out that overlap": (
        lambda c: c.reduce_scatter([_F, _F], counts=[4] + [0] * (c.size - 1),
                                   out=[_W[: 4 * (c.rank == 0)], _W[2:]]), InvalidArgumentError,
    ),
    "one array twice in out of a broadcast": (
        lambda c: c.broadcast([_F, _F], root=c.rank, out=[_W, _W]), InvalidArgumentError,
    ),
    "one array twice in out of a receive": (
        lambda c: c.recv([_W, _W], (c.rank + 1) % c.size), InvalidArgumentError,
    ),
    "recv into an expanded array": (
        lambda c: c.recv(np.lib.stride_tricks.as_strided(_W, (4,), (0,)), (c.rank + 1) % c.size),
        InvalidArgumentError,
    ),
    "out no array": (lambda c: c.all_reduce(_F, out="there"), InvalidArgumentError),
    "piece of another shape": (
        lambda c: c.reduce_scatter(np.ones(2 * c.size), out=np.zeros(3)), ShapeError,
    ),
    "no array": (lambda c: c.all_reduce("text"), InvalidArgumentError),
    "a number that is cut": (lambda c: c.scatter(5, root=c.rank), InvalidArgumentError),
    "a number as a message": (lambda c: c.send(5, (c.rank + 1) % c.size), InvalidArgumentError),
    "numbers in a structure that is joined": (lambda c: c.all_gather([5]), InvalidArgumentError),
    "a number with out": (lambda c: c.all_reduce(5.0, out=np.zeros(())), InvalidArgumentError),
    "an average of numbers": (lambda c: c.all_reduce(5, op="avg"), DtypeError),
    "an integer of 65 bits": (lambda c: c.broadcast(2**64), DtypeError),
    "a sum that may be too long": (lambda c: c.scan([-(2**63) // c.size]), DtypeError),
    "a product that may be too long": (lambda c: c.reduce(-(2**63), op="prod"), DtypeError),
    "an array of objects": (lambda c: c.all_reduce(np.array([None])), DtypeError),
    "an array of strings": (lambda c: c.all_gather(np.array(["a"])), DtypeError),
    "a foreign byte order": (lambda c: c.all_reduce(np.ones(4, ">f8")), DtypeError),
    "a structure with no array": (lambda c: c.all_reduce([_F, "x"]), InvalidArgumentError),
    "counts that do not add up": (
        lambda c: c.reduce_scatter(_F, counts=[4] * (c.size + 1)), ShapeError,
    ),
    "counts of another sum": (
        lambda c: c.all_to_all(np.ones(3), counts=[5] * c.size), ShapeError,
    ),
    "counts negative": (
        lambda c: c.reduce_scatter(_F, counts=[-1, *[1] * (c.size - 1)]), ShapeError,
    ),
    "counts that lie": (lambda c: c.all_gather(_F, counts=[3] * c.size), ShapeError),
    "axis outside": (lambda c: c.all_gather(_F, axis=1), ShapeError),
    "timeout of nothing": (lambda c: c.all_reduce(_F, timeout=0), InvalidArgumentError),
    "timeout negative": (lambda c: c.barrier(timeout=-1), InvalidArgumentError),
    "timeout of another type": (lambda c: c.broadcast(_F, timeout="1"), InvalidArgumentError),
    "empty of no shape": (lambda c: c.empty("big"), ShapeError),
    "empty of a negative shape": (lambda c: c.empty((2, -1)), ShapeError),
    "empty of no dtype": (lambda c: c.empty(3, "float31"), DtypeError),
    "split by a text": (lambda c: c.split("red"), InvalidArgumentError),
    "group of strangers": (lambda c: c.group([c.rank, c.size]), RankError),
    "group with twins": (lambda c: c.group([c.rank, c.rank]), RankError),
    "group of others": (
        lambda c: c.group([r for r in range(c.size) if r != c.rank]), RankError,
    ),
    "send to nobody": (lambda c: c.send(_F, c.size), RankError),
    "send to NULL with a wrong tag": (lambda c: c.send(_F, NULL, tag=-1), InvalidArgumentError),
    "recv from NULL into read-only": (lambda c: c.recv(_read_only(), NULL), InvalidArgumentError),
    "send to oneself": (lambda c: c.send(_F, c.rank), RankError),
    "receive from oneself": (lambda c: c.recv(None, c.rank), RankError),
    "receive from nobody": (lambda c: c.recv(None, c.size + 3), RankError),
    "tag negative": (lambda c: c.sendrecv(_F, c.rank, c.rank, tag=-1), InvalidArgumentError),
    "tag too large": (lambda c: c.sendrecv(_F, c.rank, c.rank, tag=2**31), InvalidArgumentError),
    "tag of another type": (
        lambda c: c.sendrecv(_F, c.rank, c.rank, tag=0.5), InvalidArgumentError,
    ),
}  # fmt: skip


@on_each_rank([{"what": what} for what in _BAD], at_least=2, transport=False)
def check_bad_argument(comm: Communicator, what: str) -> None:
    """Check that a bad argument is refused before anything is sent, and later calls succeed."""
    call, kind = _BAD[what]
    # Only one rank is wrong: if its call had begun, the other ranks would notice.
    if comm.rank == comm.size - 1:
        _expect(partial(call, comm), kind, what)
    total = comm.all_reduce(np.array([1]))
    assert_same(total, np.array([comm.size]), f"the call after a refusal ({what})")


def _expect(call: Callable[[], Any], kind: type[Exception], what: str) -> str:
    try:
        result = call()
    except Exception as error:
        text = str(error)
        if isinstance(error, kind) and text:
            return text
        raise AssertionError(
            f"{what}: raised {type(error).__name__} instead of {kind.__name__}: {error}"
        ) from error
    raise AssertionError(f"{what}: gave {result!r} instead of {kind.__name__}")


_BAD_AT_ROOT: dict[str, _Call] = {
    "counts": lambda c: c.scatter(_F, root=c.rank, counts=[9] * c.size),
    "axis": lambda c: c.scatter(_F, root=c.rank, axis=2),
    "array": lambda c: c.scatter(None, root=c.rank),
    "nothing": lambda c: c.broadcast(None, root=c.rank),
    "list": lambda c: c.scatter_object([1] * (c.size + 1), root=c.rank),
}


@on_each_rank([{"what": what} for what in _BAD_AT_ROOT], at_least=2, transport=False)
def check_bad_argument_at_root(comm: Communicator, what: str) -> None:
    """Check that the root refuses what only it can get wrong, before anything is sent."""
    _expect(partial(_BAD_AT_ROOT[what], comm), InvalidArgumentError, f"{what} of the root")
    total = comm.all_reduce(np.array([1]))
    assert_same(total, np.array([comm.size]), f"the call after a refusal ({what})")


@on_each_rank()
def check_any_source_is_refused(comm: Communicator) -> None:
    """Check that ANY_SOURCE raises UnsupportedError on a transport without ``any_source``."""
    if not comm.capabilities.any_source:
        call = partial(comm.recv, None, ANY_SOURCE)
        text = _expect(call, UnsupportedError, "recv from ANY_SOURCE")
        assert comm.backend in text, f"the error does not name the transport: {text}"


@on_each_rank(at_least=2)
def check_out_that_does_not_fit(comm: Communicator) -> None:
    """Check that an ``out`` that does not fit raises on its own rank, and is not written to."""
    last = comm.rank == comm.size - 1
    out = np.full(comm.size + 1, -1.0)
    if last:
        _expect(partial(comm.all_gather, np.ones(1), out=out), ShapeError, "all_gather")
        assert_same(out, np.full(comm.size + 1, -1.0), "out that does not fit")
    else:
        assert_same(comm.all_gather(np.ones(1)), np.ones(comm.size), "all_gather beside it")
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    work = comm.send(np.ones(comm.size + 5), right, async_op=True)
    if last:
        _expect(partial(comm.recv, out, left), ShapeError, "recv")
        assert_same(out, np.full(comm.size + 1, -1.0), "out that does not fit")
    else:
        comm.recv(None, left)
    work.wait()
    total = comm.all_reduce(np.array([1]))
    assert_same(total, np.array([comm.size]), "the call after an out that does not fit")


@on_each_rank(fresh=True)
def check_use_after_close(comm: Communicator) -> None:
    """Check that a closed communicator's calls raise, and a second close() has no effect."""
    comm.barrier()
    comm.close()
    comm.close()
    calls = calls_of(comm, np.ones(4))
    calls["to NULL"] = partial(comm.send, _F, NULL)
    for name, call in calls.items():
        if comm.size == 1 and name.startswith(("send", "recv")):
            continue  # a message to the rank itself: refused for that reason
        _expect(call, CommunicatorClosedError, f"{name} after close()")
    comm.abort("too late")
    assert "closed" in repr(comm), f"repr does not say that it is closed: {comm!r}"
