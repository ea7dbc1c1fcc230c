"""Checks of failure: a rank dies, raises, aborts, leaves or is late; its peers get an error."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from collective import (
    CollectiveError,
    CollectiveTimeoutError,
    Communicator,
    CommunicatorAbortedError,
    CommunicatorClosedError,
    PeerFailedError,
    PeerLostError,
)
from collective.inner import Deadline, RankDiedError, RankHungError, RanksFailedError
from collective.request import name_ranks

from . import faults
from .checks import Case, RankFactory, able, check, on_each_rank
from .heard import Heard, Trouble, hold, listen
from .samples import LARGE, assert_same
from .survivors import await_files, gather, run_fresh

_Call = Callable[[Communicator, Any], Any]


def _survivors(
    factory: RankFactory, size: int, victim: int, function: Callable[..., Any], *args: Any,
    **options: Any,
) -> dict[int, Any]:  # fmt: skip
    """Run ``function``, in which ``victim`` must die, and return the other ranks' results."""
    try:
        factory.run(size, function, *args, fresh=True, **options)
    except RanksFailedError as failure:
        if isinstance(failure.errors.get(victim), RankDiedError) and len(failure.errors) == 1:
            return failure.results
        raise
    raise AssertionError(f"rank {victim} was to die and did not")


_detects = able("detects_lost_peers", "does not detect lost peers")


_CALLS: dict[str, _Call] = {
    "barrier": lambda comm, x: comm.barrier(),
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "broadcast": lambda comm, x: comm.broadcast(x, root=comm.size - 1),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
    "recv": lambda comm, x: comm.recv(None, comm.size - 1),
}


@check([{"call": call} for call in _CALLS], at_least=2, needs=_detects)
def check_killed_peer(factory: RankFactory, size: int, *, call: str) -> None:
    """Check that a rank's death before a call raises PeerLostError on all others within 2 s."""
    victim = size - 1
    plan = [faults.kill(victim, at_call=2)]
    for rank, outcome in _survivors(factory, size, victim, _wait_for, call, faults=plan).items():
        what = f"rank {rank} in {call} with rank {victim}, which was killed"
        hold(outcome, PeerLostError, what, rank=victim)
        assert victim in outcome.error.ranks, f"{what}: .ranks is {outcome.error.ranks}"


def _wait_for(comm: Communicator, call: str) -> Heard:
    x = np.ones(100)
    dies_in_barrier = call == "recv" and comm.rank == comm.size - 1

    def turn() -> None:
        comm.barrier()
        _CALLS["barrier" if dies_in_barrier else call](comm, x)

    return listen(turn)


_MIDDLE: list[Case] = [{"after": after} for after in (0.002, 0.02)]


@check(_MIDDLE, at_least=2, needs=_detects)
def check_killed_in_the_middle(factory: RankFactory, size: int, *, after: float) -> None:
    """Check that a rank's death in a large operation raises PeerLostError on all others too."""
    plan = [faults.kill(0, at_call=4, after=after)]
    for rank, outcome in _survivors(factory, size, 0, _large_calls, faults=plan).items():
        hold(outcome, PeerLostError, f"rank {rank} in a large all_reduce", rank=0)


def _large_calls(comm: Communicator) -> Heard:
    x = np.ones(16 * LARGE, np.float32)
    return listen(lambda: comm.all_reduce(x, out=x, op="max"))


@on_each_rank(at_least=2, needs=_detects, fresh=True)
def check_left_peer(comm: Communicator) -> None:
    """Check that a rank that closes too early raises PeerLostError on ranks that need it."""
    last = comm.size - 1
    comm.barrier()
    if comm.rank == last:
        comm.close()
    else:
        hold(listen(comm.barrier, once=True), PeerLostError, f"rank {comm.rank}", rank=last)


@check()
def check_closing_after_the_last_call(factory: RankFactory, size: int) -> None:
    """Check that a rank may close once its last call has returned, with peers still in it."""
    for turn in range(5):
        factory.run(size, _closing, 10 ** (turn + 1), fresh=True)


def _closing(comm: Communicator, count: int) -> None:
    x = np.full(count, comm.rank)
    total = comm.all_reduce(x)
    joined = comm.all_gather(x)
    comm.close()
    assert_same(total, np.full(count, sum(range(comm.size))), "all_reduce before close()")
    assert_same(joined, np.repeat(np.arange(comm.size), count), "all_gather before close()")


_CLOSED: list[Case] = [
    {"call": call, "after": 0.2} for call in ("barrier", "all_reduce", "recv", "send a long one")
]
_CLOSED += [{"call": "all_reduce", "after": 0.0}]


@check(_CLOSED, at_least=2, needs=_detects)
def check_closed_by_another_thread(
    factory: RankFactory, size: int, *, call: str, after: float
) -> None:
    """Check that close() ends the call in which another thread waits: CommunicatorClosedError."""
    first, *others = run_fresh(
        factory, size, _closed_by_another_thread, call, after, call_timeout=_UNHEARD_S
    )
    what = f"rank 0 in {call}, which another thread closed after {after:g} s"
    if isinstance(first, Heard) and _unheard(first):
        raise AssertionError(f"{what}: close() does not end this call (see Backend.close)")
    if first is not None:
        hold(first, CommunicatorClosedError, what)
    for rank, outcome in enumerate(others, start=1):
        hold(outcome, PeerLostError, f"rank {rank}, after rank 0 has closed", rank=0)


def _closed_by_another_thread(
    comm: Communicator, marks: str, call: str, after: float
) -> Heard | None:
    closed = Path(marks, "closed")
    gather(comm, marks)
    x = np.ones(100)
    if comm.rank:
        await_files(closed)
        # The transport may have sent the part of rank 0 already, so the first call may return.
        return listen(lambda: comm.all_reduce(x) if call == "all_reduce" else comm.barrier())
    outcomes: list[Heard] = []
    begins = threading.Event()

    def wait() -> None:
        begins.set()
        if call == "send a long one":
            outcomes.append(listen(lambda: comm.send(np.ones(LARGE), comm.size - 1)))
        else:
            outcomes.append(listen(lambda: _CALLS[call](comm, x)))

    thread = threading.Thread(target=wait)
    thread.start()
    begins.wait()
    time.sleep(after)
    comm.close()
    thread.join()
    closed.touch()
    return outcomes[0]


# Seconds that a call waits if nothing ends its wait. The figure is above the promised time with all
# that a busy machine may add, so an error at the end of the wait did not come in time. A rank that
# waits in spite of its timeout is given up after the second, longer time. Until then its peers can
# return.
_UNHEARD_S, _DEAF_S = 5.0, 15.0


def _after_abort(
    factory: RankFactory, size: int, function: Callable[..., Any], *args: Any
) -> list[Any]:
    """Run ``function``, in which an abort must wake ranks, and return the results."""
    try:
        outcomes = factory.run(
            size, function, *args, fresh=True, timeout=_DEAF_S, call_timeout=_UNHEARD_S
        )
    except RanksFailedError as failure:
        _hold_woken(size, failure.results, failure.errors)
        raise
    _hold_woken(size, dict(enumerate(outcomes)), {})
    return outcomes


def _hold_woken(size: int, results: Mapping[int, Any], errors: Mapping[int, BaseException]) -> None:
    """Check that no rank went on waiting after an abort.

    Raises:
        AssertionError: a rank went on waiting. The text is one sentence without tracebacks: the
            fault is in the transport's abort(), and all checks of it would show the same.
    """
    deaf = [rank for rank, error in errors.items() if isinstance(error, RankHungError)]
    deaf += [rank for rank, outcome in results.items() if _unheard(outcome)]
    if deaf:
        raise AssertionError(
            f"abort() does not wake {name_ranks(deaf)} of {size}: it has to end whatever a rank "
            "waits in, recv() in particular (see Backend.abort)"
        ) from None


def _unheard(outcome: Any) -> bool:
    parts = outcome if isinstance(outcome, tuple) else (outcome,)
    return any(isinstance(part, Heard) and part.seconds > 0.9 * _UNHEARD_S for part in parts)


def _listen_and_tell(comm: Communicator, marks: str, call: Callable[[], Any]) -> Heard:
    """Return the error that this rank gets in ``call``, and create a file in ``marks``."""
    outcome = listen(call)
    Path(marks, str(comm.rank)).touch()
    return outcome


def _until_heard(marks: str, count: int) -> None:
    """Wait until ``count`` ranks have a file in ``marks``; give up when no more can come."""
    deadline = Deadline(_UNHEARD_S)
    while len(os.listdir(marks)) < count and not deadline.expired:
        time.sleep(0.005)


@check([{"call": call} for call in ("barrier", "all_reduce", "recv")], at_least=2)
def check_failed_peer(factory: RankFactory, size: int, *, call: str) -> None:
    """Check that a rank that raises makes all others raise PeerFailedError with its traceback."""
    victim = size - 1
    try:
        _after_abort(factory, size, _failed_peer, call)
    except RanksFailedError as failure:
        if set(failure.errors) != {victim} or not isinstance(failure.cause, Trouble):
            raise
        outcomes = failure.results
    else:
        raise AssertionError(f"rank {victim} was to raise and did not")
    for rank, outcome in outcomes.items():
        what = f"rank {rank} in {call} with rank {victim}, which raised"
        hold(outcome, PeerFailedError, what, "Trouble", "lost the keys", rank=victim)
        assert outcome.error.rank == victim, f"{what}: .rank is {outcome.error.rank}"
        assert "in _failed_peer" in outcome.error.traceback, f"{what}: {outcome.error.traceback!r}"


_HOOKED: list[Case] = [
    {"when": "before", "call": "all_reduce"},
    {"when": "before", "call": "all_reduce in the background"},
    {"when": "before", "call": "recv"},
    {"when": "after", "call": "all_reduce"},
]


@check(_HOOKED, at_least=2)
def check_failed_hook(factory: RankFactory, size: int, *, when: str, call: str) -> None:
    """Check that a raising hook makes all others raise PeerFailedError at once, with traceback."""
    victim = size - 1
    outcomes = run_fresh(factory, size, _failed_hook, when, call, call_timeout=_UNHEARD_S)
    for rank, outcome in enumerate(outcomes):
        what = f"rank {rank} in {call} with rank {victim}, whose hook raised {when} the call"
        if rank == victim:
            assert outcome == "Trouble", f"{what}: got {outcome} instead of Trouble"
        else:
            hold(outcome, PeerFailedError, what, "lost the keys", "in _lose_keys", rank=victim)


def _failed_hook(comm: Communicator, marks: str, when: str, call: str) -> Heard | str:
    x = np.ones(3)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.all_reduce(x),
        "all_reduce in the background": lambda: comm.all_reduce(x, async_op=True).wait(),
        "recv": lambda: comm.recv(None, comm.size - 1),
    }
    # A rank that still connects would get the error there and not in the call.
    gather(comm, marks, "connected")
    if comm.rank < comm.size - 1:
        return _listen_and_tell(comm, marks, calls[call])

    def _lose_keys(*event: Any) -> None:
        raise Trouble("lost the keys")

    comm.hook(**{when: _lose_keys})
    raised = ""
    try:
        comm.send(x, 0) if call == "recv" else calls[call]()
    except Exception as error:
        raised = type(error).__name__
    # A rank that leaves tells its peers of the failure as well. They must know of it before that.
    _until_heard(marks, 2 * comm.size - 1)
    return raised


def _failed_peer(comm: Communicator, call: str) -> Heard:
    if comm.rank == comm.size - 1:
        time.sleep(0.05)
        raise Trouble("lost the keys")
    return listen(lambda: _CALLS[call](comm, np.ones(3)))


@check([{"call": call} for call in ("all_reduce", "recv")], at_least=2)
def check_abort(factory: RankFactory, size: int, *, call: str) -> None:
    """Check that abort() breaks the communicator on every rank, with its reason, for good."""
    with tempfile.TemporaryDirectory() as marks:
        ranks = _after_abort(factory, size, _abort, call, marks)
    for rank, (now, later) in enumerate(ranks):
        for outcome, when in ((now, f"while it waited in {call}"), (later, "afterwards")):
            hold(outcome, CommunicatorAbortedError, f"rank {rank}, {when}", "out of coffee")


def _abort(comm: Communicator, call: str, marks: str) -> tuple[Heard, Heard]:
    if comm.rank == 0:
        time.sleep(0.05)
        comm.abort("out of coffee")
    x = np.ones(4)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.all_reduce(x),
        "recv": lambda: comm.recv(None, 0 if comm.rank else 1),
    }
    now, later = listen(calls[call]), listen(lambda: comm.all_gather(x))
    Path(marks, str(comm.rank)).touch()
    if comm.rank == 0:
        # A rank that leaves also wakes its peers, but this check is about the abort alone.
        _until_heard(marks, comm.size)
    return now, later


@check(at_least=2)
def check_abort_reaches_groups(factory: RankFactory, size: int) -> None:
    """Check that abort() reaches ranks that wait in a group made of the communicator."""
    for rank, outcome in enumerate(_after_abort(factory, size, _abort_group)):
        if rank:
            hold(outcome, CommunicatorAbortedError, f"rank {rank}, waiting in a group")


def _abort_group(comm: Communicator) -> Heard | None:
    group = comm.dup()
    # No rank may abort while another rank is still on its way into the group.
    comm.barrier()
    if comm.rank:
        return listen(group.barrier)
    time.sleep(0.05)
    comm.abort("out of tea")
    return None


@check([{"call": call} for call in ("barrier", "all_reduce", "recv")], at_least=2)
def check_late_peer(factory: RankFactory, size: int, *, call: str) -> None:
    """Check that CollectiveTimeoutError names a late rank, which gets an error when it comes."""
    late = size - 1
    outcomes = run_fresh(factory, size, _late_peer, call, call_timeout=0.25)
    kinds = [type(outcome.error).__name__ for outcome in outcomes]
    timed_out = [rank for rank in range(size) if isinstance(outcomes[rank].error, TimeoutError)]
    assert timed_out, f"nobody's call timed out: {kinds}"
    for rank in timed_out:
        hold(outcomes[rank], CollectiveTimeoutError, f"rank {rank} in {call}", "timed out")
    if factory.capabilities.checks_calls or size == 2:
        # Each rank that timed out waited for the late rank itself, not for another waiting rank.
        for rank in timed_out:
            what = f"rank {rank} in {call} with rank {late}, which is late"
            hold(outcomes[rank], CollectiveTimeoutError, what, rank=late)
            assert outcomes[rank].error.ranks == (late,), f"{what}: {outcomes[rank].error.ranks}"
    for rank, outcome in enumerate(outcomes):
        if rank not in timed_out:
            hold(outcome, CommunicatorAbortedError, f"rank {rank}, after the timeout")


def _late_peer(comm: Communicator, marks: str, call: str) -> Heard:
    if comm.rank == comm.size - 1:
        _until_heard(marks, comm.size - 1)
        # Any call will do: the other ranks have given up.
        return listen(comm.barrier)
    return _listen_and_tell(comm, marks, lambda: _CALLS[call](comm, np.ones(3)))


_compares = able("checks_calls", "does not know the ranks' last calls")


@check(at_least=2, needs=_compares)
def check_timeout_tells_last_call(factory: RankFactory, size: int) -> None:
    """Check that the error of a timeout contains the last call of the absent rank."""
    outcomes = run_fresh(factory, size, _last_call, call_timeout=0.2)
    for rank, outcome in enumerate(outcomes):
        if rank != size - 1 and isinstance(outcome.error, CollectiveTimeoutError):
            hold(outcome, CollectiveTimeoutError, f"rank {rank}", "broadcast", "int16[3]")


def _last_call(comm: Communicator, marks: str) -> Heard:
    # Ranks may come late to this call, hence its long timeout.
    comm.broadcast(np.ones(3, np.int16), root=0, timeout=30.0)
    if comm.rank == comm.size - 1:
        _until_heard(marks, comm.size - 1)
    return _listen_and_tell(comm, marks, comm.barrier)


@check(at_least=2)
def check_timeout_of_one_call(factory: RankFactory, size: int) -> None:
    """Check that the timeout= of a call takes the place of the communicator's."""
    outcomes = run_fresh(factory, size, _one_call)[1:]
    kinds = [type(outcome.error).__name__ for outcome in outcomes]
    assert any(isinstance(outcome.error, TimeoutError) for outcome in outcomes), (
        f"rank 0 left without the call; nobody's call timed out before: {kinds}"
    )
    for rank, outcome in enumerate(outcomes, start=1):
        hold(outcome, CollectiveError, f"rank {rank}")


def _one_call(comm: Communicator, marks: str) -> Heard | None:
    comm.barrier()
    if comm.rank:
        return _listen_and_tell(comm, marks, lambda: comm.barrier(timeout=0.2))
    # A rank that ignores timeout= and waits for the communicator's would find rank 0 gone.
    _until_heard(marks, comm.size - 1)
    return None


@check()
def check_ranks_end(factory: RankFactory, size: int) -> None:
    """Check that a function without calls returns on every rank: connecting does not hang."""
    try:
        ranks = factory.run(size, _nothing, fresh=True)
    except RanksFailedError as failure:
        hung = [rank for rank, error in failure.errors.items() if isinstance(error, RankHungError)]
        raise AssertionError(f"connecting failed; hung ranks: {hung}\n{failure}") from failure
    assert ranks == list(range(size)), f"the ranks say that they are {ranks}"


def _nothing(comm: Communicator) -> int:
    assert f"rank {comm.rank} of {comm.size}" in repr(comm), repr(comm)
    return comm.rank
