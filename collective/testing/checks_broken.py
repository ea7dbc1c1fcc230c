"""Checks of broken communicators: every call raises on every rank, and names the first cause."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from collective import (
    ANY_SOURCE,
    CollectiveError,
    CollectiveTimeoutError,
    Communicator,
    CommunicatorAbortedError,
    UnsupportedError,
)
from collective.inner import Buffer, Deadline, Request, dtypes

from .checks import Case, RankFactory, check
from .samples import LARGE
from .survivors import await_files, run_fresh

# Tags of the messages in flight when the communicator breaks: short, long, and one that times out.
_SHORT, _LONG, _LATE = 3, 4, 5
_REASON = "out of coffee"
# A message that no rank receives is given up by its sender after this time.
_GIVES_UP_S = 0.05

_Call = Callable[[Communicator, Any], Any]


def _next(comm: Communicator) -> int:
    return (comm.rank + 1) % comm.size


def _before(comm: Communicator) -> int:
    return (comm.rank - 1) % comm.size


def _no_descriptor() -> int:
    raise OSError("nothing to adopt")


#: Every call of a communicator by kind and name, given an array of few elements. The messages
#: that these calls receive were sent before the communicator broke.
CALLS: dict[str, dict[str, _Call]] = {
    "messages": {
        "send": lambda comm, x: comm.send(x, _next(comm)),
        "send a long one": lambda comm, x: comm.send(np.resize(x, LARGE), _next(comm)),
        "recv": lambda comm, x: comm.recv(None, _before(comm), tag=_SHORT),
        "recv a long one": lambda comm, x: comm.recv(None, _before(comm), tag=_LONG),
        "recv into out": lambda comm, x: comm.recv(np.empty(LARGE), _before(comm), tag=_LONG),
        "recv from anybody": lambda comm, x: comm.recv(None, ANY_SOURCE, tag=_SHORT),
        "sendrecv": lambda comm, x: comm.sendrecv(x, _next(comm), _before(comm)),
        "sendrecv with itself": lambda comm, x: comm.sendrecv(x, comm.rank, comm.rank),
    },
    "collectives": {
        "barrier": lambda comm, x: comm.barrier(),
        "broadcast": lambda comm, x: comm.broadcast(x, root=comm.size - 1),
        "reduce": lambda comm, x: comm.reduce(x, root=comm.size - 1),
        "all_reduce": lambda comm, x: comm.all_reduce(x),
        "all_reduce of nothing": lambda comm, x: comm.all_reduce(x[:0]),
        "all_reduce in rank order": lambda comm, x: comm.all_reduce(x, order="rank"),
        "all_reduce in place": lambda comm, x: comm.all_reduce(x, out=x),
        "all_reduce of a list": lambda comm, x: comm.all_reduce([x, x]),
        "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
        "scan": lambda comm, x: comm.scan(x),
        "scatter": lambda comm, x: comm.scatter(x if comm.rank == 0 else None),
        "gather": lambda comm, x: comm.gather(x),
        "all_gather": lambda comm, x: comm.all_gather(x),
        "all_to_all": lambda comm, x: comm.all_to_all(x),
    },
    "objects": {
        "broadcast_object": lambda comm, x: comm.broadcast_object(1),
        "gather_object": lambda comm, x: comm.gather_object(1),
        "all_gather_object": lambda comm, x: comm.all_gather_object(1),
        "scatter_object": lambda comm, x: comm.scatter_object([1] * comm.size),
        "send_object": lambda comm, x: comm.send_object(1, _next(comm)),
        "recv_object": lambda comm, x: comm.recv_object(_before(comm), tag=_SHORT),
    },
    "background": {
        "all_reduce in the background": lambda comm, x: comm.all_reduce(x, async_op=True).wait(),
        "recv in the background": lambda comm, x: comm.recv(
            None, _before(comm), tag=_SHORT, async_op=True
        ).wait(),
    },
    "groups": {
        "split": lambda comm, x: comm.split(0),
        "split_by_host": lambda comm, x: comm.split("host"),
        "group": lambda comm, x: comm.group([comm.rank]),
        "dup": lambda comm, x: comm.dup(),
    },
    "memory": {
        "empty": lambda comm, x: comm.empty(4),
        "adopt": lambda comm, x: comm.inner.adopt(4096, _no_descriptor),
    },
}  # fmt: skip


def calls_of(comm: Communicator, x: Any) -> dict[str, Callable[[], Any]]:
    """Return every call that the transport has, by name, given an array of few elements."""
    return {
        name: partial(call, comm, x)
        for kind in CALLS.values()
        for name, call in kind.items()
        if comm.capabilities.any_source or name != "recv from anybody"
    }


# Calls that the transport itself must refuse, on a rank whose communicator has not met the failure.
_BY_TRANSPORTS = ("send", "recv", "recv a long one", "sendrecv", "barrier", "all_reduce")


def _kinds(size: int) -> Sequence[Case]:
    # Whether a call looks for the failure does not depend on the number of ranks.
    return [{"calls": kind} for kind in (CALLS if size == 2 else ("messages", "collectives"))]


def _by_transports(size: int) -> Sequence[Case]:
    return [{"call": call} for call in (_BY_TRANSPORTS if size == 2 else ("recv",))]


@check(_kinds, at_least=2)
def check_broken_by_abort(factory: RankFactory, size: int, *, calls: str) -> None:
    """Check that after abort() every call raises on every rank, and gives the reason."""
    _hold_broken(factory, size, list(CALLS[calls]), "abort", _REASON)


@check(_by_transports, at_least=2)
def check_broken_by_a_late_receiver(factory: RankFactory, size: int, *, call: str) -> None:
    """Check that every call raises, on every rank, after a send that no rank received in time.

    The sender's array belongs to its caller again, so a late receiver would read other data.
    The transport itself must refuse the call: a rank that meets the failure in no call of its
    communicator relies on that.
    """
    _hold_broken(factory, size, [call], "send", "")


@check([{"length": length} for length in ("short", "long")], at_least=2)
def check_given_up_message(factory: RankFactory, size: int, *, length: str) -> None:
    """Check that a message that its sender gives up is received as it was sent, or not at all.

    The receiver makes its call when the sender has its array back and has written to it. The
    receiver may not know of the failure yet.
    """
    outcome = run_fresh(factory, size, _give_up_message, length)[1]
    assert outcome == "as sent" or isinstance(outcome, CollectiveError), (
        f"recv of a {length} message that its sender had given up returned {outcome}"
    )


def _give_up_message(comm: Communicator, marks: str, length: str) -> CollectiveError | str | None:
    x, given_up = np.ones(LARGE if length == "long" else 8), Path(marks, "given-up")
    comm.barrier()
    if comm.rank == 0:
        # A transport may send a short message at once, so that this send succeeds.
        with contextlib.suppress(CollectiveError):
            comm.send(x, 1, timeout=_GIVES_UP_S)
        x[:] = 99.0
        given_up.touch()
    elif comm.rank == 1:
        await_files(given_up)
        into = np.zeros_like(x)
        try:
            comm.recv(into, 0, timeout=_GIVES_UP_S)
        except CollectiveError as error:
            return error
        return "as sent" if (into == 1.0).all() else f"{into[into != 1.0][:3]}, written since"
    return None


@check(at_least=3)
def check_broken_by_a_rank_that_left(factory: RankFactory, size: int) -> None:
    """Check that once a call has missed a closed rank, every call of the others raises."""
    calls = [*CALLS["messages"], *CALLS["collectives"]]
    _hold_broken(factory, size, calls, "leave", rf"\branks? {size - 1}\b")


def _hold_broken(
    factory: RankFactory, size: int, calls: Sequence[str], cause: str, word: str
) -> None:
    """Check that all ``calls`` raise on every remaining rank, with ``word`` in the text."""
    found = factory.run(size, _after_the_end, calls, cause, fresh=True)
    for rank, outcomes in enumerate(found):
        for call, outcome in outcomes.items():
            what = f"{call} of rank {rank} on a communicator that is broken ({cause})"
            if not isinstance(outcome, CollectiveError):
                raise AssertionError(f"{what} {outcome}")
            if not isinstance(outcome, (CommunicatorAbortedError, CollectiveTimeoutError)):
                raise AssertionError(f"{what} raised {type(outcome).__name__}: {outcome}")
            if not re.search(word, str(outcome)):
                raise AssertionError(f"{what} raised an error without {word!r}: {outcome}")


def _after_the_end(comm: Communicator, calls: Sequence[str], cause: str) -> dict[str, Any]:
    """Break the communicator and return the outcome of each of ``calls``, an error or a text."""
    x, long = np.ones(2 * comm.size), np.ones(LARGE)
    if cause == "leave" and comm.rank == comm.size - 1:
        comm.close()
        return {}
    waiting = [
        comm.send(array, _next(comm), tag=tag, async_op=True)
        for array, tag in ((x, _SHORT), (long, _LONG))
    ]
    probe: Callable[[], object] = comm.barrier
    if cause == "send":
        probe = partial(
            comm.inner.transport.barrier, Request("barrier"), None, None, Deadline(comm.timeout)
        )
    if cause != "leave":
        _outcome(probe)
    if comm.rank == 0 and cause == "send":
        buffer = Buffer(long, dtypes.BY_NAME["float64"])
        lost = _outcome(lambda: comm.inner.transport.send(buffer, 1, _LATE, Deadline(_GIVES_UP_S)))
        if not isinstance(lost, CollectiveError):
            comm.abort(_REASON)  # this transport buffers messages, so the send succeeded
    elif comm.rank == 0 and cause == "abort":
        comm.abort(_REASON)
    while not isinstance(_outcome(probe), CollectiveError):
        pass  # the other ranks make this call until it raises the failure
    for work in waiting:
        _outcome(work.wait)
    long[:] = 99.0  # the background send has ended, so the array belongs to its caller again
    return {name: _outcome(call) for name, call in calls_of(comm, x).items() if name in calls}


def _outcome(call: Callable[[], Any]) -> CollectiveError | str:
    """Return the :class:`CollectiveError` that ``call`` raises, else a text with its result."""
    try:
        return f"returned {call()!r}"
    except UnsupportedError:
        raise
    except CollectiveError as error:
        return error
