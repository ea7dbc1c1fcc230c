"""The way of every call from a communicator to its transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import numpy as np

from collective import native
from collective.contract.backend import Backend
from collective.contract.failure import Failure
from collective.contract.recorder import Recorder
from collective.contract.work import Lane, Work
from collective.deadline import Deadline
from collective.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    InvalidArgumentError,
    MismatchError,
    RankError,
)
from collective.memory.arrays import adapter_of
from collective.memory.buffer import Buffer, Spot
from collective.memory.dtypes import BY_NUMPY
from collective.request import Disagreement, Request, differing

from .foreign_names import explain_keyword
from .listener import CallEvent, Listener
from .listeners import Listeners
from .planned import Planned
from .streams import Near, enqueue, synchronized, with_site

if TYPE_CHECKING:
    from collective.contract.backend import Plan
    from collective.native._core import Door

__all__ = ["Path"]

T = TypeVar("T")

# Distinct calls that are remembered. A program makes some dozens; one whose shapes keep changing
# must not grow for ever.
_REMEMBERED = 1024
# Lanes that are kept for further messages; each may have a thread for some seconds.
_LANES = 64


class Runnable(Protocol):
    """What a path needs of a collective call; see :class:`collective.communicator.calls.Call`."""

    operation: str
    several_streams: bool

    @property
    def near(self) -> Near | None: ...

    def prepared(self) -> Runnable: ...

    def plan(self) -> Planned | None: ...

    def perform(self, deadline: Deadline) -> Any: ...

    def go_on(self, headers: Sequence[dict[str, Any]], deadline: Deadline) -> Any: ...


class Postable(Protocol):
    """What a path needs of a call between two ranks."""

    def exchanged(self, seconds: float) -> Any: ...

    def posted(self, seconds: float, async_op: bool) -> Any: ...


class KindOfCall(Protocol):
    """What C needs of a class of calls, see :meth:`calls.call.Call.of_plain`."""

    def of_plain(
        self, path: Path, x: Any, out: Any, *, op: Any = ..., order: Any = ..., root: Any = ...,
        counts: Any = ...,
    ) -> Runnable: ...  # fmt: skip


if TYPE_CHECKING:

    class _Gate:
        """Base class in C."""

else:
    _Gate = native.gate()


class Path(_Gate):
    """Way of every call from a communicator to its transport.

    A collective call goes through :meth:`make`, which runs it now or in its turn, and then through
    :meth:`carry`, which records it and runs its plan. A message goes through :meth:`post`. The
    native core makes plain calls by itself, while :meth:`open_doors` lets it.

    Args:
        backend: the transport.
        timeout: seconds that a call may take where it does not say otherwise.
        check: when calls are compared before they are sent: "auto", "always" or "never".

    Attributes:
        rank, size, who: this rank, the number of ranks, and both as errors show them.
        on_device, on_host: whether the transport takes arrays on GPUs as they are, and arrays on
            the CPU.
        enqueues: whether calls on arrays of GPUs are only enqueued. Such calls are compared apart
            from being made.
        agree_first: whether calls of fixed size need a round of their own to be compared.
        agree_sizes: whether calls whose sizes may differ do: always, where the transport compares
            nothing.
        heads: whether a broadcast describes its array in a message before it. A rank that passed
            None does not know whether the root's array is on a GPU.
        plans: plans of earlier calls, by keys of the calls' own.
        gpu: this rank's GPU, once an array has turned out to be there.
        lane, lanes: runs collective calls in the background; the same for messages, by direction.
        broken: the error with which a call of this rank found the communicator broken, or None.
        closed: whether no calls may be made any more.
    """

    timeout: float
    door: Door | None
    door_of_pieces: Door | None
    door_of_scatter: Door | None
    exchange: native.Exchange | None
    lanes: dict[Any, Lane]

    def __init__(self, backend: Backend, timeout: float, check: str = "auto") -> None:
        self.rank = backend.rank
        self.size = backend.size
        self.who = f"[rank {self.rank} of {self.size}]"
        self.timeout = timeout
        self.check = check
        self.backend = backend
        self.capabilities = able = backend.capabilities
        self.on_device = "cuda" in able.devices
        self.on_host = "cpu" in able.devices
        self.enqueues = backend.enqueues
        self.agree_first = check == "always" and (self.enqueues or not able.checks_calls)
        self.agree_sizes = not able.checks_calls
        self.heads = self.agree_sizes and not self.agree_first and not self.enqueues
        self.plans: dict[Any, Planned] = {}
        self.gpu: Any = None
        self.lane_name = f"collective-{backend.name}-{backend.rank}"
        self.lane = Lane(self.lane_name)
        self.lanes = {}
        self.listeners = Listeners()
        self.broken: CollectiveError | None = None
        self.recorder = Recorder(f"rank {self.rank} of {self.size} over {backend.name}")
        backend.observe(self.recorder)
        self.closed = False
        self.open_doors()

    # -- the way in C -------------------------------------------------------------------

    def open_doors(self) -> None:
        """Let C make plain calls; or not, while somebody listens or every call will be refused.

        C records a call, runs its plan, and leaves everything else to the methods in Python; see
        :func:`collective.native.method`. Calls that move pieces go this way where the transport
        compares calls by itself.
        """
        heard = bool(self.listeners.all) or self.closed
        shut = self.agree_first or heard or self.broken is not None
        self.door = None
        if not shut and self.on_host:
            self.door = native.door(self.recorder.ring, self.lane.queue, self.rank, self.size)
        self.door_of_pieces = None if self.agree_sizes or self.enqueues else self.door
        self.door_of_scatter = self.door_of_pieces if self.scatters_at_once else None
        self.exchange = None if heard else self.backend.exchange

    @property
    def scatters_at_once(self) -> bool:
        """Whether the root of a scatter sends before the others know what; the same on all ranks.

        That pays where ranks share memory and see by themselves when calls differ. Such transports
        have no arrays on GPUs.
        """
        shared = self.capabilities.symmetric_memory and not self.on_device
        return shared and not (self.agree_sizes or self.agree_first or self.enqueues)

    def plan_for_c(
        self, kind: KindOfCall, x: Any, op: Any, order: Any, root: Any, counts: Any
    ) -> Planned | None:
        """Return the plan of a plain call that C has none of yet; None if Python makes the call.

        Args:
            kind: the class of the call.
            x, op, order, root, counts: its arguments, as C has sorted them: ``x`` is the array that
                tells dtype and shape, also where the program passed it as ``out``.
        """
        return kind.of_plain(self, x, None, op=op, order=order, root=root, counts=counts).plan()

    @staticmethod
    def run_plan(plan: Plan, x: Any, out: Any, deadline: Deadline) -> None:
        """Run, for C, a plan that is not C's, on plain arrays."""
        dst = None if out is None else _plain_buffer(out)
        src = dst if x is out else None if x is None else _plain_buffer(x)
        work = plan(src, dst, deadline)
        if work is not None:
            work.wait()

    def recover_for_c(
        self, kind: KindOfCall, x: Any, out: Any, root: Any, counts: Any, error: BaseException
    ) -> Any:
        """Go on after a call that C has made has failed, as the call in Python would, or raise."""
        self.note_failure(error)
        if not isinstance(error, Disagreement):
            try:
                raise error
            finally:
                del error  # or it would keep itself, and with its frames the arrays of the call
        call = kind.of_plain(self, x, out, root=root, counts=counts).prepared()
        began = self.recorder.entries(1)[0].began
        return call.go_on(error.headers, Deadline.since(began, self.timeout))

    def receive_rest(
        self, kind: Any, x: Any, out: Any, src: int, tag: int, deadline: Deadline
    ) -> Any:
        """Receive the message of a ``sendrecv`` of which C has sent ``x`` already.

        Args:
            kind: the class of the call.
        """
        return self.post(kind.rest(self, x, out, src, tag), max(1e-3, deadline.left()), False)

    @staticmethod
    def explain(function: Callable[..., Any], error: TypeError) -> TypeError:
        """Return, for C, a clearer error for a call with unknown keyword arguments."""
        return explain_keyword(function, error) if error.__traceback__ is None else error

    # -- collective calls ---------------------------------------------------------------

    def make(self, call: Runnable, timeout: float | None, async_op: bool) -> Any:
        """Make a collective call, and return its result.

        Args:
            call: the call, of which nothing has been looked at yet.
            timeout: seconds; the communicator's by default.
            async_op: return a ``Work`` at once.
        """
        prepared = call.prepared()
        seconds = self.timeout if timeout is None else self.check_timeout(timeout)
        return self.go(prepared, seconds, async_op)

    def go(self, call: Runnable, seconds: float, async_op: bool = False) -> Any:
        """Run a prepared call now, or in its turn.

        It waits for the calls in the lane, also if the caller waits for it: collective calls reach
        the transport in the order in which the program made them, or the ranks' would differ. Its
        deadline begins with its turn.
        """
        if not (async_op or self.lane.queue or self.broken or call.several_streams):
            return call.perform(Deadline(seconds))
        near = call.near
        run: Callable[[], Any] = partial(_perform, call, seconds)
        if self.broken is not None:
            run = partial(self.refuse_broken, call.operation)
        elif near is not None and self.enqueues:
            return enqueue(self, call.operation, run, async_op, near)
        elif near is not None:
            run = synchronized(run, near.array)
        if not async_op and not self.lane.queue:
            return run()
        work = self.lane.submit(call.operation, with_site(run))
        return work if async_op else work.wait()

    def go_again(self, call: Runnable, seconds: float, async_op: bool) -> Any:
        """Run a call again that was prepared before; refuse it if the communicator is closed."""
        if not self.plans:  # close() has let go of them, and of the transport
            self.backend.refuse_broken(call.operation)
        return self.go(call, seconds, async_op)

    def carry(
        self, planned: Planned, src: Buffer | Spot | None, dst: Buffer | Spot | None,
        deadline: Deadline, heard: bool = False,
    ) -> None:  # fmt: skip
        """Make one collective operation of the transport's.

        Args:
            planned, src, dst: the operation.
            heard: whether the listeners have been told.

        Raises:
            Disagreement: the ranks' calls differ; nothing was sent.
            MismatchError: they differ, and ``planned.fixed``.
        """
        if self.listeners.all and not heard:
            event = self._event(planned, src, dst)
            carry = partial(self.carry, planned, src, dst, deadline, heard=True)
            self.listeners.around(event, carry, self.tell_failure)
            return
        recorder = self.recorder
        try:
            if planned.fixed and self.agree_first:
                self.agree(planned.request, deadline)
            recorder.begin(planned.request, planned.compares)
            work = planned.plan(src, dst, deadline)
            if work is not None:
                work.wait()
            recorder.end()
        except BaseException as error:
            self.note_failure(error)
            if planned.fixed and isinstance(error, Disagreement):
                self.raise_mismatch(error.headers)
            raise

    def _event(
        self, planned: Planned, src: Buffer | Spot | None, dst: Buffer | Spot | None
    ) -> CallEvent:
        request, number = planned.request, self.recorder.started + 1
        if planned.compares:
            return CallEvent(request.operation, 0, request, number, True)
        lengths = [buffer.nbytes for buffer in (src, dst) if buffer is not None]
        return CallEvent(request.operation, max(lengths, default=request.nbytes), request, number)

    # -- messages -----------------------------------------------------------------------

    def post(self, message: Postable, timeout: float | None, async_op: bool) -> Any:
        """Make a call between two ranks: now, or in the lane of its direction, peer and tag.

        Args:
            message: the call, of which nothing has been looked at yet.
            timeout, async_op: as of :meth:`make`.
        """
        seconds = self.timeout if timeout is None else self.check_timeout(timeout)
        if not async_op:
            result = message.exchanged(seconds)
            if result is not NotImplemented:
                return result
        return message.posted(seconds, async_op)

    def transfer(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the transport that sends or receives, and return its result."""
        try:
            result = method(*args)
            return result.wait() if isinstance(result, Work) else result
        except Disagreement:
            raise
        except BaseException as error:
            self.note_failure(error)
            raise

    def lane_of(self, direction: tuple[Any, ...], name: str) -> Lane:
        """Return the lane of messages of one direction, peer and tag."""
        lane = self.lanes.get(direction)
        if lane is None:
            if len(self.lanes) >= _LANES:  # a program may never use a tag twice
                for idle in [key for key, lane in self.lanes.items() if lane.idle]:
                    del self.lanes[idle]
            lane = self.lanes[direction] = self.listeners.lane_of_messages(name)
        return lane

    # -- agreement ----------------------------------------------------------------------

    def planned(self, request: Request, fixed: bool = False) -> Planned:
        """Have the transport plan a request."""
        return Planned(request, self.backend.plan(request), fixed=fixed)

    def remember(self, key: Any, planned: Planned) -> Planned:
        """Keep a plan for later calls of this key; return it."""
        if len(self.plans) >= _REMEMBERED:
            self.plans.clear()
        self.plans[key] = planned
        return planned

    def agree(self, request: Request, deadline: Deadline) -> None:
        """Compare ``request`` on all ranks.

        Raises:
            Disagreement: the ranks' calls differ.
        """
        self.carry(self.comparing(request), None, None, deadline)

    def comparing(self, request: Request) -> Planned:
        """Return a plan that compares ``request`` on all ranks."""
        backend = self.backend  # the path would keep itself, and not end when it is dropped

        def compare(src: None, dst: None, deadline: Deadline) -> None:
            backend.agree(request, deadline)

        return Planned(request, compare, compares=True)

    def headers_if_different(
        self, request: Request, deadline: Deadline
    ) -> list[dict[str, Any]] | None:
        """Compare ``request`` on all ranks; return the ranks' headers if they differ, else None."""
        try:
            self.agree(request, deadline)
        except Disagreement as difference:
            return difference.headers
        return None

    def head_plan(
        self, what: str, request: Request | None, root: int | None, operation: str,
        elements: Sequence[int] | None = None,
    ) -> Planned:  # fmt: skip
        """Return a plan that carries the head of a call, the same on ranks that know less of it.

        Args:
            what, root: the operation and its root.
            request: the call; None on a rank that knows no more.
            operation, elements: what carries the head.
        """
        key = "head", what, request, root
        planned = self.plans.get(key)
        if planned is None:
            known = Request(what, root=root) if request is None else request
            planned = self.remember(key, self.planned(known.comparing(operation, elements)))
        return planned

    def raise_mismatch(self, headers: Sequence[dict[str, Any]]) -> NoReturn:
        """Raise that the ranks made different calls."""
        name = headers[self.rank]["operation"]
        raise MismatchError(
            f"{name}: the ranks made different calls {self.who}:\n"
            + differing(dict(enumerate(headers)))
            + "\nEvery rank must make the same collective calls in the same order."
        ) from None

    # -- failures -----------------------------------------------------------------------

    def note_failure(self, error: BaseException) -> None:
        """Note the error of a call that has reached the transport."""
        if isinstance(error, Disagreement):
            # All ranks know of it, and nothing of the call itself was sent: nobody is left waiting,
            # and the communicator is as sound as before.
            self.recorder.end()
        elif isinstance(error, CollectiveError):
            self.recorder.fail()
            if isinstance(error, (CommunicatorAbortedError, CollectiveTimeoutError)):
                self.broken = self.broken or error
                self.open_doors()
        else:
            self.fail_halfway(error)

    def refuse_broken(self, what: str) -> NoReturn:
        """Raise why the communicator is broken, as an earlier call of this rank has found.

        A call that sends nothing would not find out by itself, and one whose message has been
        there before would succeed: with what its sender has put in its place since, maybe.
        """
        self.backend.refuse_broken(what)
        raise CommunicatorAbortedError(f"{what}: {self.broken} (that was an earlier call)")

    def fail_halfway(self, error: BaseException) -> None:
        """Break the communicator: nobody can tell what the peers still expect of this rank."""
        self.recorder.fail()
        self.tell_failure(error)

    def tell_failure(self, error: BaseException) -> None:
        """Break the communicator, and tell the peers that ``error`` did it."""
        self.backend.abort(Failure.caused_by(self.rank, error))

    def allocate(self, make: Callable[..., T], *args: Any) -> T:
        """Return what ``make`` allocates while the peers are already in this call.

        If there is no memory for it the communicator breaks: this rank cannot take what the peers
        send, and its next call would take that for its own.
        """
        try:
            return make(*args)
        except BaseException as error:
            self.fail_halfway(error)
            raise

    # -- listeners, and the end -----------------------------------------------------------

    def listen(self, listener: Listener) -> None:
        """Tell ``listener`` of every call from now on."""
        self.listeners.add(listener)
        lane = listener.lane(self.lane_name, messages=False)
        if lane is not None:  # or later calls would overtake those that are under way
            self.lane = lane
            self.lanes.clear()
        self.open_doors()

    def forget(self, listener: Listener) -> None:
        """Tell ``listener`` of no call any more."""
        self.listeners.remove(listener)
        self.open_doors()

    def close(self, deadline: Deadline) -> None:
        """Make no calls any more, after waiting for those in the background."""
        for lane in (self.lane, *self.lanes.values()):
            lane.close(deadline)
        self.shut()
        self.broken = None

    def shut(self) -> None:
        """Make no calls any more, at once."""
        self.closed = True
        # Prepared calls would go on calling the transport, and the frames of an error keep it.
        self.plans.clear()
        self.open_doors()

    # -- arguments ----------------------------------------------------------------------

    def check_rank(self, what: str, name: str, rank: Any) -> int:
        """Return a rank as an integer.

        Args:
            what, name: the operation and its argument, for errors.

        Raises:
            RankError: it is not an integer, or outside of the communicator.
        """
        if type(rank) is int and 0 <= rank < self.size:
            return rank
        if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
            raise RankError(f"{what}: {name} {rank!r} is not an integer {self.who}.")
        if not 0 <= rank < self.size:
            raise RankError(
                f"{what}: {name} {rank}; this communicator has ranks 0 to {self.size - 1} "
                f"{self.who}."
            )
        return int(rank)

    def check_timeout(self, timeout: float | None) -> float:
        """Return the seconds that a call may take.

        Raises:
            InvalidArgumentError: ``timeout`` is not a positive number.
        """
        if timeout is None:
            return self.timeout
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
            raise InvalidArgumentError(f"timeout: {timeout!r}; a positive number of seconds.")
        return float(timeout)


def _perform(call: Runnable, seconds: float) -> Any:
    return call.perform(Deadline(seconds))


def _plain_buffer(x: Any) -> Buffer:
    """Return an array that C has found to be plain as a buffer."""
    if type(x) is np.ndarray:  # of one of NumPy's own types, or it would not be plain
        array, dtype = x, BY_NUMPY[x.dtype]
    else:
        array, dtype = adapter_of(x).view(x)
    return Buffer(array if array.ndim == 1 else array.reshape(-1), dtype)
