"""What a communicator does, written to a trace; one that is not traced never comes here."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from collective.communicator import Communicator
from collective.communicator.listener import CallEvent, Listened, Listener
from collective.contract.work import Lane, Work
from collective.errors import CollectiveTimeoutError, ConfigError, MismatchError
from collective.request import Disagreement, Request, call_site

from .clocks import clock_of_host, offsets
from .tracer import Tracer, now, opened, set_current

__all__ = ["TracedCalls", "start_tracing"]

T = TypeVar("T")
# Distinct calls and places whose text is kept.
_KEPT = 1024
# Members of a group, or ranks in an error, that are told one by one.
_LISTED = 8


class TracedCalls(Listener):
    """Writes a communicator's calls to a trace.

    Args:
        comm: the communicator, which is listened to from now on.
        tracer: where they go.
        name: the communicator's, the same on all its ranks and no other's.
        ranks: how its ranks are numbered in the trace.
    """

    def __init__(self, comm: Listened, tracer: Tracer, name: str, ranks: Sequence[int]) -> None:
        self._tracer = tracer
        self._name = name
        self._ranks = list(ranks)
        self._groups: dict[tuple[int, ...], int] = {}
        self._facts: dict[Request, str] = {}
        self._sites: dict[str, str] = {}
        self._category = "enqueue" if comm.enqueues else "collective"
        self._title = f"calls in the background ({comm.backend}, {name})"
        comm.listen(self)

    def before(self, event: CallEvent) -> None:
        if event.request is None:
            self._begin_message(event)
        elif event.compares:
            self._tracer.begin(f"compare {event.operation}", "compare", self._arguments(event))
        else:
            self._tracer.begin(event.operation, self._category, self._arguments(event))

    def after(self, event: CallEvent, error: BaseException | None) -> None:
        if isinstance(error, Disagreement):
            self._tracer.end('"differ":true')  # found out as intended, before anything was moved
        elif error is not None:
            self._tracer.end(f'"error":{json.dumps(type(error).__name__)}')
        else:
            self._tracer.end()

    def arrives(self, nbytes: int) -> None:
        self._tracer.instant("message arrives", "message", f'"bytes":{nbytes}')

    def group(self, child: Listened, ranks: Sequence[int]) -> None:
        members = tuple(map(int, ranks))
        number = self._groups[members] = self._groups.get(members, 0) + 1
        name = f"{self._name}/{_members(members)}#{number}"
        # Those who have joined had no number when the trace began.
        joined = [-1] * (child.size - len(members))
        ranks = [*(self._ranks[rank] for rank in members), *joined]
        TracedCalls(child, self._tracer, name, ranks)

    def close(self) -> None:
        self._tracer.flush()

    def lane(self, name: str, messages: bool) -> Lane:
        track = None if messages else self._tracer.track(self._title)
        return _TracedLane(name, self._tracer, track)

    def _begin_message(self, event: CallEvent) -> None:
        fields: dict[str, Any] = {"comm": self._name}
        fields |= {name: end for name, end in (("dst", event.dst), ("src", event.src))
                 if end is not None}  # fmt: skip
        text = json.dumps({**fields, "tag": event.tag})[1:-1]
        text += f',"bytes":{event.nbytes}' * (event.nbytes >= 0)
        self._tracer.begin(event.operation, "message", f'{text},"site":{self._site()}')

    def _arguments(self, event: CallEvent) -> str:
        """Return what is said of a call."""
        request = event.request
        assert request is not None
        facts = self._facts.get(request)
        if facts is None:
            if len(self._facts) >= _KEPT:
                self._facts.clear()
            facts = self._facts[request] = self._facts_of(request)
        return f'{facts},"bytes":{event.nbytes},"seq":{event.number},"site":{self._site()}'

    def _facts_of(self, request: Request) -> str:
        """Return what is the same whenever this call is made."""
        found: dict[str, Any] = {"comm": self._name}
        if request.dtype is not None:
            found["dtype"] = request.dtype.name
        if request.shape is not None:
            found["shape"] = list(request.shape)
        options = request.options
        found |= {key: options[key] for key in ("op", "root", "order") if key in options}
        found["ranks"] = len(self._ranks)
        if "root" in found:  # as the trace numbers it
            found["root_rank"] = self._ranks[found["root"]]
        return json.dumps(found)[1:-1]

    def _site(self) -> str:
        site = call_site()
        quoted = self._sites.get(site)
        if quoted is None:
            if len(self._sites) >= _KEPT:
                self._sites.clear()
            quoted = self._sites[site] = json.dumps(site)
        return quoted


def start_tracing(comm: Communicator, directory: str) -> None:
    """Begin this rank's trace, or go on with that of this process.

    Collective: every rank calls it, before anything else.

    Raises:
        ConfigError: some rank cannot write to ``directory``, or does not trace; on every rank.
    """
    of_thread = comm.capabilities.in_process and comm.size > 1
    tracer = opened(directory, comm.rank, of_thread=of_thread)
    goes_on, refused = tracer is not None, ""
    if tracer is None:
        try:
            tracer = Tracer(directory, comm.rank, comm.size)
        except OSError as error:
            refused = f"{error.filename or directory}: {error.strerror}"
    mine = comm.rank if tracer is None else tracer.rank
    about = [secrets.token_hex(4), refused, goes_on, clock_of_host(), now(), mine]
    try:
        every = _gathered(comm, directory, about)
    except BaseException:
        if tracer is not None and not goes_on:
            tracer.close()
        raise
    _refuse(every, comm.rank)
    assert tracer is not None
    if not all(one[2] for one in every):
        # Ranks go on with a trace together, or the clocks are not compared by all.
        found = offsets(comm, [one[3] for one in every])
        offset, off_by = found[comm.rank]
        if not goes_on:
            tracer.begin_file(
                every[0][4] - offset,
                {
                    "run": every[0][0], "size": comm.size, "local_size": comm.local_size,
                    "host": comm.host, "cores": _cores(), "backend": comm.backend,
                    "enqueues": comm.enqueues, "clock_error_us": off_by * 1e6,
                },
            )  # fmt: skip
    set_current(tracer, of_thread=of_thread)
    TracedCalls(comm, tracer, every[0][0], [one[5] for one in every])


def _gathered(comm: Communicator, directory: str, about: list[Any]) -> list[list[Any]]:
    """Return what every rank says about its trace."""
    try:
        return comm.all_gather_object(about)
    except (MismatchError, CollectiveTimeoutError) as error:
        raise ConfigError(
            f"trace: this rank writes to {directory}, and not all others trace, or they did "
            f"not come [rank {comm.rank} of {comm.size}]. Set COLLECTIVE_TRACE for all ranks or "
            "for none."
        ) from error


class _TracedLane(Lane):
    """A lane that shows when its calls were made, when they ran, and who waited for them.

    Args:
        track: where what it runs is shown; None for a track on which nothing goes on.
    """

    def __init__(self, name: str, tracer: Tracer, track: int | None = None) -> None:
        super().__init__(name)
        self._tracer = tracer
        self._track = track

    def submit(self, what: str, function: Callable[[], T], work: Work[T] | None = None) -> Work[T]:
        tracer, track, number = self._tracer, self._track, self._tracer.number()

        def shown() -> T:
            with tracer.on(track):
                tracer.begin(what, "background")
                tracer.flow("t", number)
                try:
                    return function()
                finally:
                    tracer.end()

        tracer.begin(f"start {what}", "start")
        tracer.flow("s", number)
        try:
            return super().submit(what, shown, work or _TracedWork(what, tracer, number))
        finally:
            tracer.end()


class _TracedWork(Work[T]):
    """A handle whose waits are shown."""

    def __init__(self, what: str, tracer: Tracer, number: int) -> None:
        super().__init__(what)
        self._tracer = tracer
        self._number = number

    def wait(self, timeout: float | None = None) -> T:
        self._tracer.begin(f"wait {self._what}", "wait")
        try:
            return super().wait(timeout)
        finally:
            if self._number and self._over:  # the arrow ends where the result is first had
                self._tracer.flow("f", self._number)
                self._number = 0
            self._tracer.end()


def _refuse(every: Sequence[Sequence[Any]], rank: int) -> None:
    """Raise if a rank cannot write its trace."""
    refused = {r: one[1] for r, one in enumerate(every) if one[1]}
    if refused:
        listed = "; ".join(f"rank {r}: {why}" for r, why in list(refused.items())[:_LISTED])
        listed += f"; {len(refused) - _LISTED} more" * (len(refused) > _LISTED)
        raise ConfigError(
            f"trace: it cannot be written: {listed} [rank {rank} of {len(every)}]. Set "
            "COLLECTIVE_TRACE to a directory that every rank can write to, or leave it out."
        )


def _cores() -> int:
    """Return how many cores this rank may use."""
    able = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if able else os.cpu_count() or 0


def _members(ranks: tuple[int, ...]) -> str:
    """Return a short text that no other members have."""
    if len(ranks) <= _LISTED:
        return ",".join(map(str, ranks))
    digest = hashlib.blake2b(repr(ranks).encode(), digest_size=4).hexdigest()
    return f"{len(ranks)} ranks {digest}"
