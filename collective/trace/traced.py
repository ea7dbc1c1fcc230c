"""A communicator that writes what it does to a trace; one that does not never comes here."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from collective.call import Call, Disagreement, call_site
from collective.communicator import Communicator
from collective.contract.work import Lane, Work
from collective.errors import CollectiveTimeoutError, ConfigError, MismatchError
from collective.memory.buffer import Buffer

from .clocks import clock_of_host, offsets
from .tracer import Tracer, now, opened, set_current

if TYPE_CHECKING:
    from collective.contract.backend import Backend

__all__ = ["TracedCommunicator", "connected"]

T = TypeVar("T")
# Distinct calls and places whose text is kept.
_KEPT = 1024
# Members of a group, or ranks in an error, that are told one by one.
_TOLD = 8


class TracedCommunicator(Communicator):
    """Ranks whose calls are traced from :meth:`start_tracing` on."""

    _tracer: Tracer | None = None
    _name = ""

    def start_tracing(self, directory: str) -> None:
        """Begin this rank's trace, or go on with that of this process.

        Collective: every rank calls it, before anything else.

        Raises:
            ConfigError: some rank cannot write to ``directory``, or does not trace; on every
                rank.
        """
        of_thread = self.capabilities.in_process and self.size > 1
        tracer = opened(directory, self.rank, of_thread=of_thread)
        goes_on, refused = tracer is not None, ""
        if tracer is None:
            try:
                tracer = Tracer(directory, self.rank, self.size)
            except OSError as error:
                refused = f"{error.filename or directory}: {error.strerror}"
        mine = self.rank if tracer is None else tracer.rank
        about = [secrets.token_hex(4), refused, goes_on, clock_of_host(), now(), mine]
        try:
            every = self._told(directory, about)
        except BaseException:
            if tracer is not None and not goes_on:
                tracer.close()
            raise
        _refuse(every, self.rank)
        assert tracer is not None
        if not all(one[2] for one in every):
            # Ranks go on with a trace together, or the clocks are not compared by all.
            found = offsets(self, [one[3] for one in every])
            offset, off_by = found[self.rank]
            if not goes_on:
                tracer.begin_file(
                    every[0][4] - offset,
                    {
                        "run": every[0][0], "size": self.size, "local_size": self.local_size,
                        "host": self.host, "cores": _cores(), "backend": self.backend,
                        "enqueues": self._enqueues, "clock_error_us": off_by * 1e6,
                    },
                )  # fmt: skip
        set_current(tracer, of_thread=of_thread)
        self._trace_as(tracer, every[0][0], [one[5] for one in every])

    def _told(self, directory: str, about: list[Any]) -> list[list[Any]]:
        """Return what every rank says about its trace."""
        try:
            return self.all_gather_object(about)
        except (MismatchError, CollectiveTimeoutError) as error:
            raise ConfigError(
                f"trace: this rank writes to {directory}, and not all others trace, or they did "
                f"not come {self._who}. Set COLLECTIVE_TRACE for all ranks or for none."
            ) from error

    def _trace_as(self, tracer: Tracer, name: str, ranks: Sequence[int]) -> None:
        """Write to ``tracer`` from now on.

        Args:
            name: the communicator's, the same on all its ranks and no other's.
            ranks: how its ranks are numbered in the trace.
        """
        self._tracer = tracer
        self._name = name
        self._traced_ranks = list(ranks)
        self._groups: dict[tuple[int, ...], int] = {}
        self._facts: dict[Call, str] = {}
        self._sites: dict[str, str] = {}
        self._category = "enqueue" if self._enqueues else "collective"
        self._message_bytes = 0
        title = f"calls in the background ({self.backend}, {name})"
        self._lane = _TracedLane(self._lane._name, tracer, tracer.track(title))

    def group(self, ranks: Sequence[int]) -> Communicator:
        child = super().group(ranks)
        if self._tracer is not None and isinstance(child, TracedCommunicator):
            members = tuple(map(int, ranks))
            number = self._groups[members] = self._groups.get(members, 0) + 1
            name = f"{self._name}/{_members(members)}#{number}"
            child._trace_as(self._tracer, name, [self._traced_ranks[r] for r in members])
        return child

    def close(self) -> None:
        super().close()
        if self._tracer is not None:
            self._tracer.flush()

    # -- calls --------------------------------------------------------------------------------

    def _collective(self, method: Callable[..., Work[Any] | None], call: Call, *args: Any) -> None:
        tracer = self._tracer
        if tracer is None:
            return super()._collective(method, call, *args)
        self._begin(tracer, call, args)
        try:
            super()._collective(method, call, *args)
        except BaseException as error:
            tracer.end(_failed(error))
            raise
        tracer.end()

    def _recorded(
        self, method: Callable[..., Work[Any] | None], *args: Any, compares: bool = False
    ) -> None:
        tracer = self._tracer
        if tracer is None:
            return super()._recorded(method, *args, compares=compares)
        self._begin(tracer, args[-2], args, compares)
        try:
            super()._recorded(method, *args, compares=compares)
        except BaseException as error:
            tracer.end(_failed(error))
            raise
        tracer.end()

    def _begin(
        self, tracer: Tracer, call: Call, args: Sequence[Any], compares: bool = False
    ) -> None:
        facts = self._facts.get(call)
        if facts is None:
            if len(self._facts) >= _KEPT:
                self._facts.clear()
            facts = self._facts[call] = self._told_of(call)
        # All that is moved is with one of them: the root's, or what is gathered.
        nbytes = max((a.array.nbytes for a in args if type(a) is Buffer), default=-1)
        if nbytes < 0:
            nbytes = _size_of(call)
        text = (
            f'{facts},"bytes":{0 if compares else nbytes},"seq":{self.recorder.started + 1},'
            f'"site":{self._site()}'
        )
        if compares:
            tracer.begin(f"compare {call.operation}", "compare", text)
        else:
            tracer.begin(call.operation, self._category, text)

    def _told_of(self, call: Call) -> str:
        """Return what is the same whenever this call is made."""
        told: dict[str, Any] = {"comm": self._name}
        if call.dtype is not None:
            told["dtype"] = call.dtype.name
        if call.shape is not None:
            told["shape"] = list(call.shape)
        told |= {key: call.options[key] for key in ("op", "root", "order") if key in call.options}
        told["ranks"] = self.size
        if "root" in told:  # as the trace numbers it
            told["root_rank"] = self._traced_ranks[told["root"]]
        return json.dumps(told)[1:-1]

    def _site(self) -> str:
        site = call_site()
        quoted = self._sites.get(site)
        if quoted is None:
            if len(self._sites) >= _KEPT:
                self._sites.clear()
            quoted = self._sites[site] = json.dumps(site)
        return quoted

    # -- messages -----------------------------------------------------------------------------

    def _new_lane(self, name: str) -> Lane:
        return super()._new_lane(name) if self._tracer is None else _TracedLane(name, self._tracer)

    def _message(self, what: str, x: Any) -> Any:
        made = super()._message(what, x)
        self._message_bytes = int(made[0].words[2])
        return made

    def _post(
        self,
        key: Any,
        run: Callable[[], Any],
        async_op: bool,
        near: Any = None,
        adapter: Any = None,
    ) -> Any:
        tracer = self._tracer
        if tracer is None:
            return super()._post(key, run, async_op, near, adapter)
        operation, *peers, tag = key
        ends = dict(zip(("dst", "src") if operation != "recv" else ("src",), peers))
        nbytes = -1 if operation == "recv" else self._message_bytes
        told = json.dumps({"comm": self._name, **ends, "tag": tag})[1:-1]
        told += f',"bytes":{nbytes}' * (nbytes >= 0)

        def traced() -> Any:
            tracer.begin(operation, "message", f'{told},"site":{self._site()}')
            try:
                result = run()
            except BaseException as error:
                tracer.end(_failed(error))
                raise
            tracer.end()
            return result

        return super()._post(key, traced, async_op, near, adapter)

    def _place(self, head: Any, words: Sequence[int], out: Any, like: Any) -> Any:
        if self._tracer is not None:
            self._tracer.instant("message arrives", "message", f'"bytes":{words[2]}')
        return super()._place(head, words, out, like)


def connected(directory: str, backend: Backend, **settings: Any) -> TracedCommunicator:
    """Return a communicator over ``backend`` that is traced; see :class:`Communicator`.

    Collective: every rank calls it.

    Raises:
        ConfigError: as :meth:`TracedCommunicator.start_tracing`; the transport is closed.
    """
    made = TracedCommunicator(backend, **settings)
    try:
        made.start_tracing(directory)
    except BaseException:
        made.close()
        raise
    return made


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
        told = "; ".join(f"rank {r}: {why}" for r, why in list(refused.items())[:_TOLD])
        told += f"; {len(refused) - _TOLD} more" * (len(refused) > _TOLD)
        raise ConfigError(
            f"trace: it cannot be written: {told} [rank {rank} of {len(every)}]. Set "
            "COLLECTIVE_TRACE to a directory that every rank can write to, or leave it out."
        )


def _cores() -> int:
    """Return how many cores this rank may use."""
    able = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if able else os.cpu_count() or 0


def _size_of(call: Call) -> int:
    """Return the bytes of an array that the transport was not handed in a buffer."""
    if call.dtype is None or call.shape is None:
        return 0
    count = 1
    for length in call.shape:
        count *= length
    return count * call.dtype.itemsize


def _members(ranks: tuple[int, ...]) -> str:
    """Return a short text that no other members have."""
    if len(ranks) <= _TOLD:
        return ",".join(map(str, ranks))
    digest = hashlib.blake2b(repr(ranks).encode(), digest_size=4).hexdigest()
    return f"{len(ranks)} ranks {digest}"


def _failed(error: BaseException) -> str:
    if isinstance(error, Disagreement):
        return '"differ":true'  # found out as intended, before anything was moved
    return f'"error":{json.dumps(type(error).__name__)}'
