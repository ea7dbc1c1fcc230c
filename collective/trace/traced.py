"""Tracing of a communicator's calls; a communicator without a trace does not use this module."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from collective.communicator.communicator import Communicator
from collective.communicator.listener import CallEvent, Listener
from collective.contract.work import Lane, Work
from collective.errors import CollectiveTimeoutError, ConfigError, MismatchError
from collective.platform import boot_id
from collective.request import Disagreement, Request, call_site

from .tracer import Tracer, now, opened, set_current

if TYPE_CHECKING:
    from collective.communicator.host_calls import HostCalls

T = TypeVar("T")
# Maximum number of distinct calls, and of places in the program, whose text is kept.
_KEPT = 1024
_quoted = functools.lru_cache(_KEPT)(json.dumps)
# Maximum number of members of a group, or of ranks in an error, that are listed one by one.
_LISTED = 8
# Number of exchanges with each host; the fastest one counts.
_ROUNDS = 16
_TAG = 2**31 - 1


class TracedCalls(Listener):
    """Listener that writes a communicator's calls to a trace.

    Args:
        comm: the communicator; the new object registers itself as its listener.
        tracer: the trace.
        name: name of the communicator, the same on all its ranks, and different from all others.
        ranks: numbers of the communicator's ranks in the trace.
    """

    def __init__(self, comm: Communicator, tracer: Tracer, name: str, ranks: Sequence[int]) -> None:
        self._tracer = tracer
        self._name = name
        self._ranks = list(ranks)
        self._groups: dict[tuple[int, ...], int] = {}
        self._facts = functools.lru_cache(_KEPT)(self._facts_of)
        self._category = "enqueue" if comm.inner.enqueues else "collective"
        comm.inner.listen(self)

    def before(self, event: CallEvent) -> None:
        request = event.request
        if request is None:
            ends = {"dst": event.dst, "src": event.src}
            facts = {"comm": self._name, **{k: end for k, end in ends.items() if end is not None}}
            name, category = event.operation, "message"
            text = json.dumps({**facts, "tag": event.tag})[1:-1]
        else:
            name, category = event.operation, self._category
            if event.compares:
                name, category = f"compare {name}", "compare"
            text = f'{self._facts(request)},"seq":{event.number}'
        text += f',"bytes":{event.nbytes}' * (event.nbytes >= 0)
        self._tracer.begin(name, category, f'{text},"site":{_quoted(call_site())}')

    def after(self, event: CallEvent, error: BaseException | None) -> None:
        if isinstance(error, Disagreement):
            self._tracer.end('"differ":true')  # intended: no data moved before that
        elif error is not None:
            self._tracer.end(f'"error":{json.dumps(type(error).__name__)}')
        else:
            self._tracer.end()

    def arrives(self, nbytes: int) -> None:
        self._tracer.instant("message arrives", "message", f'"bytes":{nbytes}')

    def group(self, child: Communicator, ranks: Sequence[int]) -> None:
        members = tuple(map(int, ranks))
        number = self._groups[members] = self._groups.get(members, 0) + 1
        name = f"{self._name}/{_members(members)}#{number}"
        # Processes that have joined since the trace began have no number in it.
        joined = [-1] * (child.size - len(members))
        ranks = [*(self._ranks[rank] for rank in members), *joined]
        TracedCalls(child, self._tracer, name, ranks)

    def close(self) -> None:
        self._tracer.flush()

    def lane(self, name: str) -> Lane:
        return _TracedLane(name, self._tracer)

    def _facts_of(self, request: Request) -> str:
        """Return the facts that are the same for every call with this request."""
        facts: dict[str, Any] = {"comm": self._name}
        if request.dtype is not None:
            facts["dtype"] = request.dtype.name
        if request.shape is not None:
            facts["shape"] = list(request.shape)
        options = request.options
        facts |= {key: options[key] for key in ("op", "root", "order") if key in options}
        facts["ranks"] = len(self._ranks)
        if "root" in facts:  # also give the root's number in the trace
            facts["root_rank"] = self._ranks[facts["root"]]
        return json.dumps(facts)[1:-1]


def start_tracing(comm: Communicator, directory: str) -> None:
    """Begin this rank's trace, or continue the open trace of this process.

    Collective: every rank calls it, before any other call.

    Raises:
        ConfigError: some rank cannot write to ``directory``, or does not trace; raised on every
            rank.
    """
    of_thread = comm.capabilities.in_process and comm.size > 1
    tracer = opened(directory, comm.rank, of_thread=of_thread)
    goes_on, refused = tracer is not None, ""
    if tracer is None:
        try:
            tracer = Tracer(directory, comm.rank)
        except OSError as error:
            refused = f"{error.filename or directory}: {error.strerror}"
    mine = comm.rank if tracer is None else tracer.rank
    about = [
        secrets.token_hex(4), refused, goes_on, _clock_of_host(), now(), mine,
        sorted(os.sched_getaffinity(0)),
    ]  # fmt: skip
    try:
        every = comm.all_gather_object(about)
    except BaseException as error:
        if tracer is not None and not goes_on:
            tracer.close()
        if isinstance(error, (MismatchError, CollectiveTimeoutError)):
            raise ConfigError(
                f"trace: this rank writes a trace to {directory}, but some other rank writes none, "
                f"or did not come [rank {comm.rank} of {comm.size}]. Set COLLECTIVE_TRACE for all "
                "ranks or for none."
            ) from error
        raise
    _refuse(every, comm.rank)
    assert tracer is not None
    if not all(entry[2] for entry in every):
        # Measuring the clocks is collective. So all ranks decide alike, by whether every rank
        # continues a trace, and not by whether this rank does.
        measured = offsets(comm, [entry[3] for entry in every])
        offset, off_by = measured[comm.rank]
        # Ranks that are bound to cores have different ones.
        cores = {core for entry in every if entry[3] == about[3] for core in entry[6]}
        if not goes_on:
            tracer.begin_file(
                every[0][4] - offset,
                {
                    "run": every[0][0], "size": comm.size, "local_size": comm.local_size,
                    "host": comm.host, "cores": len(cores), "backend": comm.backend,
                    "enqueues": comm.inner.enqueues, "clock_error_us": off_by * 1e6,
                },
            )  # fmt: skip
    set_current(tracer, of_thread=of_thread)
    TracedCalls(comm, tracer, every[0][0], [entry[5] for entry in every])


class _TracedLane(Lane):
    """Lane that traces when its calls are made, when they run, and which thread waits for them."""

    def __init__(self, name: str, tracer: Tracer) -> None:
        super().__init__(name)
        self._tracer = tracer

    def submit(self, what: str, function: Callable[[], T], work: Work[T] | None = None) -> Work[T]:
        tracer = self._tracer

        def shown() -> T:
            with tracer.in_background():
                tracer.begin(what, "background")
                try:
                    return function()
                finally:
                    tracer.end()

        tracer.begin(f"start {what}", "start")
        try:
            return super().submit(what, shown, work or _TracedWork(what, tracer))
        finally:
            tracer.end()


class _TracedWork(Work[T]):
    """Handle whose waits appear in the trace."""

    def __init__(self, what: str, tracer: Tracer) -> None:
        super().__init__(what)
        self._tracer = tracer

    def wait(self, timeout: float | None = None) -> T:
        self._tracer.begin(f"wait {self._what}", "wait")
        try:
            return super().wait(timeout)
        finally:
            self._tracer.end()


def _refuse(every: Sequence[Sequence[Any]], rank: int) -> None:
    """Raise ConfigError if some rank cannot write its trace."""
    refused = {r: entry[1] for r, entry in enumerate(every) if entry[1]}
    if refused:
        listed = "; ".join(f"rank {r}: {why}" for r, why in list(refused.items())[:_LISTED])
        listed += f"; {len(refused) - _LISTED} more" * (len(refused) > _LISTED)
        raise ConfigError(
            f"trace: the file cannot be written: {listed} [rank {rank} of {len(every)}]. Set "
            "COLLECTIVE_TRACE to a directory that every rank can write to, or leave it out."
        )


def _members(ranks: tuple[int, ...]) -> str:
    """Return a short text for the members of a group, different for other members."""
    if len(ranks) <= _LISTED:
        return ",".join(map(str, ranks))
    digest = hashlib.blake2b(repr(ranks).encode(), digest_size=4).hexdigest()
    return f"{len(ranks)} ranks {digest}"


# -- clocks: their offsets between the hosts of the ranks -----------------------------------------


def _clock_of_host() -> str:
    """Return a text that is equal for processes with the same clock of ``time.monotonic()``."""
    return boot_id() or socket.gethostname()


def offsets(
    comm: Communicator, clocks: list[str], now: Callable[[], float] = time.monotonic
) -> list[tuple[float, float]]:
    """Measure each rank's clock against that of rank 0.

    This is Cristian's algorithm (F. Cristian, "Probabilistic clock synchronization", Distributed
    Computing 3, 1989). The first rank of each host asks rank 0 several times for its time. It uses
    the answer with the shortest round trip, and assumes that rank 0 read its clock half-way.

    Collective: every rank calls it.

    Args:
        clocks: the result of :func:`_clock_of_host` on each rank.
        now: the clock, in seconds.

    Returns:
        For each rank, the seconds to add to its clock to get rank 0's clock, and the possible
        error of that number. Later the clocks of the hosts drift apart by some µs a second.
    """
    first = [clocks.index(clock) for clock in clocks]
    leaders = sorted(set(first) - {0})
    if not leaders:
        return [(0.0, 0.0)] * comm.size
    hosted = comm.inner.on_host  # the times are in host memory, for any transport
    mine = (0.0, 0.0)
    for leader in leaders:
        if comm.rank == 0:
            for _ in range(_ROUNDS):
                hosted.recv(leader, tag=_TAG)
                hosted.send(np.array([now()]), leader, tag=_TAG)
        elif comm.rank == leader:
            mine = min((_ask(hosted, now) for _ in range(_ROUNDS)), key=lambda pair: pair[1])
    every = comm.all_gather_object(list(mine))
    return [(float(every[leader][0]), float(every[leader][1])) for leader in first]


def _ask(hosted: HostCalls, now: Callable[[], float]) -> tuple[float, float]:
    """Return the offset of rank 0's clock by one exchange, and half the time of the exchange."""
    asked = now()
    hosted.send(np.array([0.0]), 0, tag=_TAG)
    (answer,) = hosted.recv(0, tag=_TAG)
    half = (now() - asked) / 2
    return float(answer) - (asked + half), half
