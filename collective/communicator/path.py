"""The way of every call from a communicator to its transport."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

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
    UnsupportedError,
)
from collective.memory.arrays import adapter_of
from collective.memory.buffer import Buffer, Spot
from collective.memory.dtypes import BY_NUMPY
from collective.request import Disagreement, Request, describe, differing

from .calls.call import Call, Planned
from .foreign_names import explain_arguments
from .listener import CallEvent, Listener, Listeners
from .results import ResultComparison, interval_of
from .streams import enqueue, synchronized, with_site

if TYPE_CHECKING:
    from collective.contract.backend import Plan
    from collective.native._core import Door

    from .calls.message import PointToPointCall
    from .posted import PostedWork

T = TypeVar("T")

# Number of plans that a path remembers. A program makes some dozens of distinct calls. The bound
# limits the memory of a program whose shapes keep changing.
_REMEMBERED = 1024
# Number of message lanes that a path keeps. Each lane may keep a thread alive for some seconds.
_LANES = 64


if TYPE_CHECKING:

    class _Gate:
        """Base class in C."""

else:
    _Gate = native.gate()


class Path(_Gate):
    """Way of every call from a communicator to its transport.

    A collective call goes through :meth:`make`, which runs it at once or in its turn, and then
    through :meth:`carry`, which records it and runs its plan. A message goes through :meth:`post`.
    The native core makes plain calls by itself, as long as :meth:`open_doors` allows it.

    Args:
        backend: the transport.
        timeout: seconds that a call may take if it passes no timeout.
        check: when calls are compared before they are sent ("auto", "always" or "never"); or
            "results", to compare results after each call, or "results:10" after every tenth.

    Attributes:
        results: comparison of the ranks' results; None if results are not compared.
        watched: whether something happens around each call: listeners, comparing results, or
            capturing the call.
        opened: how often the doors have been opened, which changes the way of calls.
        rank, size, who: this rank, the number of ranks, and both as error texts show them.
        payload_tag: as of the transport; see :class:`Backend`.
        on_device, on_host: whether the transport takes arrays on GPUs without staging, and arrays
            on the CPU.
        enqueues: whether calls on GPU arrays return once they are enqueued. The ranks compare such
            calls in a separate step before they make them.
        agree_first: whether the ranks compare every call in a separate round before the call.
        agree_sizes: whether the ranks compare the calls whose sizes may differ in a separate round:
            true if the transport compares no calls.
        plans: plans of earlier calls, by keys that the calls choose.
        gpu: this rank's GPU, known once a call has had an array on it.
        expects: if not None, the caller states the lengths that it expects in the running call: one
            from each rank, or none if this rank receives nothing. Then the ranks compare what each
            sender passes with what its receiver expects.
        lane, lanes: thread queue that runs collective calls in the background; and one for the
            messages of each direction, peer and tag.
        drain: function that waits until the calls have ended that another library makes in the
            background, as XLA does; None if no library does. Such calls and the program's own calls
            must reach the transport in one order on all ranks. So the program's calls wait.
        door, door_of_pieces, door_of_scatter: doors through which C makes plain calls: reductions,
            ``barrier`` and calls with ``counts``; ``broadcast`` and the calls that join pieces; and
            ``scatter``. None where Python makes these calls.
        door_of_library: door of the calls that a library in C repeats, such as XLA; or None.
        exchange: transport's function for plain messages; None where Python makes them.
        capabilities: abilities of the transport.
        recorder: flight recorder of the collective calls.
        listeners: listeners that are notified of every call.
        broken: the error by which a call of this rank found the communicator broken, or None.
        closed: whether the communicator is closed, so that no more calls may be made.
    """

    timeout: float
    door: Door | None
    door_of_pieces: Door | None
    door_of_scatter: Door | None
    door_of_library: Door | None
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
        self.payload_tag = backend.payload_tag
        self.on_device = "cuda" in able.devices
        self.on_host = "cpu" in able.devices
        self.enqueues = backend.enqueues
        self.agree_sizes = self.enqueues or not able.checks_calls
        self.agree_first = check == "always" and self.agree_sizes
        self.plans: dict[Any, Planned] = {}
        self.gpu: Any = None
        self.lane_name = f"collective-{backend.name}-{backend.rank}"
        self.lane = Lane(self.lane_name)
        self.lanes = {}
        self._receives: dict[int, list[PostedWork]] = {}
        self._steps = threading.Lock()  # of the messages in flight
        self.listeners = Listeners()
        interval = interval_of(check) if backend.size > 1 else 0
        if interval and backend.enqueues:
            raise UnsupportedError(
                f"check: {check!r} is not supported by backend {backend.name!r} {self.who}, whose "
                "calls return before their results are there. Use check='always', or another "
                "backend, such as 'tcp'."
            )
        self.broken: CollectiveError | None = None
        self.recorder = Recorder(f"rank {self.rank} of {self.size} over {backend.name}")
        self.results = ResultComparison(interval, self.recorder) if interval else None
        backend.observe(self.recorder)
        self.closed = False
        self._capture: _Capture | None = None
        self.expects: Sequence[int] | None = None
        self._turn = threading.Lock()
        self.drain: Callable[[], None] | None = None
        self.opened = 0
        self.door_of_library = None
        self.open_doors()

    @functools.cached_property
    def mail(self) -> Any:
        """Engine of the transport for messages in flight; None if they are made in lanes.

        Over MPI, posted messages and the others take different ways and could not meet. Where
        results are compared, the comparison of each message follows it.
        """
        able = self.backend.payload_tag and self.results is None
        return self.backend.mail if able else None

    # -- plain calls in C ---------------------------------------------------------------

    def open_doors(self) -> None:
        """Let C make plain calls, unless they are watched or every call will be refused.

        C records a call, runs its plan, and leaves everything else to the methods in Python; see
        :func:`collective.native.method`. C makes calls that move pieces only if the transport
        compares calls by itself. Of the calls whose results the ranks compare, C makes only
        ``all_reduce``.
        """
        if self.door_of_library is not None:
            self.door_of_library.lock()
        self.opened += 1
        self.watched = self._is_watched()
        observed = bool(self.closed or self.listeners.all or self._capture)
        shut = self.agree_first or observed or self.broken is not None
        self.door = None
        if not shut and self.on_host:
            self.door = native.door(self.recorder.ring, self.lane.queue, self.rank, self.size)
        self.door_of_pieces = None if self.agree_sizes else self.door
        self.door_of_scatter = self.door_of_pieces if self.scatters_at_once else None
        # Every message is compared, whatever the interval, and Python does that.
        # Nor may a receive of C overtake those in flight.
        withheld = observed or self.results or self._receives
        self.exchange = None if withheld else self.backend.exchange
        self.door_of_library = self.door_of_scatter
        if self.drain is not None:
            # The program's calls wait first, which Python does.
            self.door = self.door_of_pieces = self.door_of_scatter = self.exchange = None

    @property
    def scatters_at_once(self) -> bool:
        """Whether the root of a scatter sends before the other ranks know its shapes and dtypes.

        The value is the same on all ranks. It saves a round before the call where the transport
        detects differing calls by itself. Such a transport with an engine for messages takes no
        arrays on GPUs, whereas over MPI only some ranks may have one.
        """
        return self.payload_tag != 0 and not self.agree_sizes

    def _is_watched(self) -> bool:
        return bool(self.listeners.all or self.results or self._capture)

    def plan_for_c(self, kind: type[Call], arguments: dict[str, Any]) -> Planned | None:
        """Return the plan of a plain call that C has not seen yet; None if Python makes the call.

        Args:
            kind: class of the call.
            arguments: those of the call that identify its plan. ``x`` is the array that determines
                dtype and shape, even if the program passed it as ``out``.
        """
        return kind(self, **arguments).plan_for_c()

    def run_python_plan(
        self, request: Request, plan: Plan, x: Any, x_count: int, out: Any, out_count: int,
        deadline: Deadline,
    ) -> None:  # fmt: skip
        """Run a plan that is not implemented in C on plain arrays; C calls this method.

        Args:
            request, plan: the request, and its plan.
            x, out: input and result, or None.
            x_count, out_count: numbers of their elements, as C saw them before it looked for the
                plan.

        Raises:
            InvalidArgumentError: an array has another number of elements or another dtype than C
                saw. Nothing was sent.
        """
        dst = None if out is None else _plain_buffer(out)
        src = dst if x is out else None if x is None else _plain_buffer(x)
        # Another thread may have replaced the memory of a tensor since C viewed it. The plan would
        # read or write as many elements as before, so outside of the new memory. The plan of a
        # scatter has no dtype, and takes that of the buffer.
        dtype = request.dtype
        if src is not None and (src.count != x_count or src.dtype is not (dtype or src.dtype)):
            self._refuse_changed(request, "x", x_count, src)
        if dst is not None and (dst.count != out_count or dst.dtype is not (dtype or dst.dtype)):
            self._refuse_changed(request, "out", out_count, dst)
        if not self._turn.acquire(blocking=False):
            self._refuse_thread(request)
        try:
            work = plan(src, dst, deadline)
            if work is not None:
                work.wait()
        finally:
            self._turn.release()

    def _refuse_changed(self, request: Request, name: str, count: int, now: Buffer) -> NoReturn:
        dtype = "" if request.dtype is None else f" of {request.dtype}"
        raise InvalidArgumentError(
            f"{request.operation}: {name} had {count} elements{dtype} when the call began, and has "
            f"{now.count} of {now.dtype} now {self.who}. Let no other thread change a tensor that "
            "a call uses."
        )

    def recover_for_c(
        self, kind: type[Call], arguments: dict[str, Any], error: BaseException
    ) -> Any:
        """Recover from the failure of a call that C made, as the call in Python would, or raise."""
        self.note_failure(error)
        if not isinstance(error, Disagreement):
            try:
                raise error
            finally:
                # Break the cycle error → traceback → frame → error, which keeps the call's arrays.
                del error
        call = kind(self, **arguments).prepare()
        began = self.recorder.entries(1)[0].began
        return call.go_on(error.headers, Deadline.since(began, self.timeout))

    def compare_for_c(self, out: Any, call: tuple[Request, Any]) -> None:
        """Compare the results of an ``all_reduce`` that C has made; C calls this method.

        Args:
            out: this rank's result.
            call: request of the call, and the report of its plan.

        Raises:
            CorruptionError: the ranks have different results; on all ranks.
        """
        assert self.results is not None
        request, report = call
        began = self.recorder.entries(1)[0].began
        deadline = Deadline.since(began, self.timeout)
        self.results.compare(self, request, report, _plain_buffer(out), deadline)

    def receive_rest(
        self, kind: Any, x: Any, out: Any, src: int, tag: int, deadline: Deadline
    ) -> Any:
        """Receive a message that C has begun to wait for, until the deadline of the call.

        C leaves a message to Python that does not fit ``out``, or overlaps ``x``, and returns once
        it has sent ``x``.

        Args:
            kind: class of the call.
        """
        return kind.rest(self, x, out, src, tag).make_in_python(deadline, False)

    @staticmethod
    def explain(function: Callable[..., Any], error: TypeError) -> TypeError:
        """Return, for C, a clearer error for a call with unsuitable arguments."""
        return explain_arguments(function, error) if error.__traceback__ is None else error

    # -- collective calls ---------------------------------------------------------------

    def make(self, call: Call, timeout: float | Deadline | None, async_op: bool) -> Any:
        """Make a collective call, and return its result.

        Args:
            call: the call, not prepared yet.
            timeout: seconds; by default the communicator's timeout. Or a deadline, if the call is
                a step of one that has begun.
            async_op: if true, return a ``Work`` at once.
        """
        prepared = call.prepare()
        if timeout is None:
            timeout = self.timeout
        elif not isinstance(timeout, Deadline):
            timeout = self.check_timeout(timeout)
        return self.go(prepared, timeout, async_op)

    def go(self, call: Call, limit: float | Deadline, async_op: bool = False) -> Any:
        """Run a prepared call at once, or in its turn after the calls in the lane.

        A call always waits for the calls in the lane, even if it is synchronous. Collective calls
        must reach the transport in the order in which the program made them; otherwise the orders
        of the ranks would differ. The deadline of the call begins with its turn.

        Args:
            limit: seconds, or a deadline, as in :meth:`make`.
        """
        if self.drain is not None:
            self.drain()
        if not (async_op or self.lane.queue or self.broken or call.several_streams):
            return call.perform(limit if isinstance(limit, Deadline) else Deadline(limit))
        near = call.near
        run: Callable[[], Any] = partial(_perform, call, limit)
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

    def carry(
        self, planned: Planned, src: Buffer | Spot | None, dst: Buffer | Spot | None,
        deadline: Deadline,
    ) -> None:  # fmt: skip
        """Make one collective operation of the transport.

        Args:
            planned, src, dst: plan of the operation, and its buffers.

        Raises:
            CorruptionError: the results are compared, and are not what they must be.
            Disagreement, MismatchError: as :meth:`run_recorded`.
        """
        if self.watched:
            self._carry_watched(planned, src, dst, deadline)
        else:
            self.run_recorded(planned, src, dst, deadline)

    def run_recorded(
        self, planned: Planned, src: Buffer | Spot | None, dst: Buffer | Spot | None,
        deadline: Deadline,
    ) -> None:  # fmt: skip
        """Run the plan of one operation of the transport, and record it.

        Args:
            planned, src, dst: plan of the operation, and its buffers.

        Raises:
            Disagreement: the ranks' calls differ; nothing was sent.
            MismatchError: the ranks' calls differ, and ``planned.fixed`` is true.
        """
        recorder = self.recorder
        if planned.fixed and self.agree_first:
            try:
                self.compare_calls(planned.request, deadline)
            except BaseException as error:
                self._note_failure_of(planned, error)
                raise
        if not self._turn.acquire(blocking=False):
            self._refuse_thread(planned.request)
        try:
            recorder.begin(planned.request, planned.compares)
            work = planned.plan(src, dst, deadline)
            if work is not None:
                work.wait()
            recorder.end()
        except BaseException as error:
            self._note_failure_of(planned, error)
            raise
        finally:
            self._turn.release()

    def _refuse_thread(self, request: Request) -> NoReturn:
        """Break the communicator, since two threads call at once.

        Other ranks may make the two calls in the other order, and then the results would be mixed.
        """
        running = self.recorder.running()
        where = f"{running.request} at {running.site}" if running is not None else "another call"
        error = InvalidArgumentError(
            f"{request}: another thread of this rank is in {where} on this communicator "
            f"{self.who}. All ranks must make their calls in one order. Make all calls in one "
            "thread, or give each thread a communicator of its own: comm.dup()."
        )
        self.tell_failure(error)
        raise error

    def _carry_watched(
        self, planned: Planned, src: Buffer | Spot | None, dst: Buffer | Spot | None,
        deadline: Deadline,
    ) -> None:  # fmt: skip
        """Make one operation, compare its results if the program wants it, notify the listeners."""
        if self._capture is not None:
            self._capture.carried.append((planned, src, dst))
            error, self._capture.error = self._capture.error, None
            if error is not None:
                self._note_failure_of(planned, error)
                raise error
        run = partial(self.run_recorded, planned, src, dst, deadline)
        if self.results is not None:
            run = partial(self.results.around, self, planned, src, dst, deadline)
        if self.listeners.all:
            self.listeners.around(self._event(planned, src, dst), run, self.tell_failure)
        else:
            run()

    def _event(
        self, planned: Planned, src: Buffer | Spot | None, dst: Buffer | Spot | None
    ) -> CallEvent:
        request, number = planned.request, self.recorder.started + 1
        if planned.compares:
            return CallEvent(request.operation, 0, request, number, True)
        lengths = [buffer.nbytes for buffer in (src, dst) if buffer is not None]
        return CallEvent(request.operation, max(lengths, default=request.nbytes), request, number)

    def _note_failure_of(self, planned: Planned, error: BaseException) -> None:
        self.note_failure(error)
        if planned.fixed and isinstance(error, Disagreement):
            self.raise_mismatch(error.headers)

    def capture(self, call: Callable[[], object], error: BaseException | None = None) -> _Carried:
        """Make a call in Python, and return the operations of the transport that it made.

        Args:
            call: function that makes one call of the communicator.
            error: if C has begun this call, and it has failed there: its error, which the first
                operation raises instead of making the call.
        """
        capture = self._capture = _Capture(error)
        opened, doors = self.opened, (self.door, self.door_of_pieces, self.door_of_scatter)
        self.door = self.door_of_pieces = self.door_of_scatter = None
        self.watched = self._is_watched()
        try:
            call()
        finally:
            self._capture = None
            self.door, self.door_of_pieces, self.door_of_scatter = doors
            self.watched = self._is_watched()
            if self.opened != opened:  # the call has failed, or a listener has come
                self.open_doors()
        return capture.carried

    # -- messages -----------------------------------------------------------------------

    def post(self, message: PointToPointCall, timeout: float | None, async_op: bool) -> Any:
        """Make a point-to-point call: at once, or in the lane of its direction, peer and tag.

        Args:
            message: the call, not prepared yet.
            timeout, async_op: as in :meth:`make`.
        """
        if self.drain is not None:
            self.drain()
        seconds = self.timeout if timeout is None else self.check_timeout(timeout)
        if not async_op:
            result = message.try_in_c(seconds)
            if result is not NotImplemented:
                return result
        return message.make_in_python(seconds, async_op)

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

    def enlist(self, tag: int, work: PostedWork) -> None:
        """Note a receive in flight. Until it is over, all receives of this rank are posted."""
        self._receives.setdefault(tag, []).append(work)
        self.exchange = None

    def retire(self, tag: int, work: PostedWork) -> None:
        """Note that a message in flight is over, which may be a receive."""
        works = self._receives.get(tag, [])
        if work in works:
            works.remove(work)
            if not works:
                del self._receives[tag]
            if not self._receives:
                self.open_doors()

    def receives_before(self, tag: int, work: PostedWork) -> list[PostedWork]:
        """Return the receives in flight with a tag that were posted before ``work``."""
        works = self._receives.get(tag, [])
        return works[: works.index(work)] if work in works else []

    def take_steps(self, works: Sequence[PostedWork]) -> None:
        """Take the steps of messages in flight; of receives with one tag, in posted order.

        One thread at a time takes steps: the order of the receives with one tag counts. Another one
        goes on at once, since it may hold what the first one needs.
        """
        if not self._steps.acquire(blocking=False):
            return
        try:
            for work in works:
                work.take_steps()
        finally:
            self._steps.release()

    def _receives_in_order(self) -> list[PostedWork]:
        return [work for works in list(self._receives.values()) for work in works]

    def busy(self) -> bool:
        """Return whether messages are in flight; see :class:`collective.contract.mail.InFlight`."""
        return not self.closed and bool(self._receives or self.mail.busy())

    def progress(self) -> None:
        """Move the messages in flight, and take the steps of the receives."""
        self.mail.progress()
        self.take_steps(self._receives_in_order())

    def disown(self) -> None:
        """Touch the messages no more, in a forked child."""
        self._receives.clear()
        if not self.closed:
            self.mail.disown()

    def posts(self, near: object = None) -> bool:
        """Return whether a message is posted in place of being made in a lane.

        Args:
            near: the message's array on a GPU, if it has one.
        """
        able = self.mail is not None and near is None and self.broken is None
        return able and not self.listeners.all and self.drain is None

    @property
    def receives(self) -> bool:
        """Whether receives are in flight."""
        return bool(self._receives)

    def lane_of(self, direction: tuple[Any, ...], name: str) -> Lane:
        """Return the lane of messages of one direction, peer and tag."""
        lane = self.lanes.get(direction)
        if lane is None:
            # A program may use a new tag for every message, so idle lanes must not accumulate.
            if len(self.lanes) >= _LANES:
                for idle in [key for key, lane in self.lanes.items() if lane.idle]:
                    del self.lanes[idle]
            lane = self.lanes[direction] = self.listeners.lane(name)
            lane.delivers = direction[0] == "send"
        return lane

    # -- agreement ----------------------------------------------------------------------

    def planned(self, request: Request, fixed: bool = False) -> Planned:
        """Return the transport's plan of a request."""
        return Planned(request, self.backend.plan(request), fixed=fixed)

    def remember(self, key: Any, planned: Planned) -> Planned:
        """Store a plan for later calls with this key; return the plan."""
        if len(self.plans) >= _REMEMBERED:
            self.plans.clear()
        self.plans[key] = planned
        return planned

    def compare_calls(self, request: Request, deadline: Deadline) -> None:
        """Compare ``request`` on all ranks.

        Raises:
            Disagreement: the ranks' calls differ.
        """
        self.carry(self.comparison_of(request), None, None, deadline)

    def comparison_of(self, request: Request) -> Planned:
        """Return a plan that compares ``request`` on all ranks."""
        # `compare` must not refer to the path: the plan, which the path keeps, would keep the path.
        backend = self.backend

        def compare(src: None, dst: None, deadline: Deadline) -> None:
            backend.agree(request, deadline)

        return Planned(request, compare, compares=True)

    def headers_if_different(
        self, request: Request, deadline: Deadline
    ) -> list[dict[str, Any]] | None:
        """Compare ``request`` on all ranks; return the ranks' headers if they differ, else None."""
        try:
            self.compare_calls(request, deadline)
        except Disagreement as difference:
            return difference.headers
        return None

    @property
    def object_heads(self) -> bool:
        """Whether calls on objects begin with heads, where those on arrays do not.

        The transport compares the calls by itself. No rank knows the lengths of the other ranks'
        objects, so without heads each such call would differ first.
        """
        return not (self.agree_sizes or self.results)

    def object_head_plan(self, root: int) -> Planned:
        """Return the plan of the operation that carries the head of an object from ``root``."""
        key = "object head", root
        planned = self.plans.get(key)
        if planned is None:
            # A step has another digest than the comparison of an array's broadcast.
            call = Request("broadcast", root=root, object=True)
            planned = self.planned(call.step(1, "broadcast", root=root), fixed=True)
            self.remember(key, planned)
        return planned

    def object_heads_plan(self, nbytes: int) -> Planned:
        """Return the plan of the operation that gives all ranks the heads of all ranks' objects.

        Args:
            nbytes: length of a head.
        """
        planned = self.plans.get("object heads")
        if planned is None:
            call = Request("all_gather", object=True)
            lengths = [nbytes] * self.size
            planned = self.planned(call.step(1, "all_gather", elements=lengths), fixed=True)
            self.remember("object heads", planned)
        return planned

    def raise_mismatch(self, headers: Sequence[dict[str, Any]]) -> NoReturn:
        """Raise ``MismatchError`` with the ranks' different calls."""
        name = describe(headers[self.rank]).partition("(")[0]
        raise MismatchError(
            f"{name}: the ranks made different calls {self.who}:\n"
            + differing(dict(enumerate(headers)))
            + "\nEvery rank must make the same collective calls in the same order."
        ) from None

    # -- failures -----------------------------------------------------------------------

    def note_failure(self, error: BaseException) -> None:
        """Record the error of a call that has reached the transport."""
        if isinstance(error, Disagreement):
            # All ranks know of the disagreement, and no data of the call itself was sent. So no
            # rank waits for this one, and the communicator is as sound as before.
            self.recorder.end()
        elif isinstance(error, CollectiveError):
            self.recorder.fail()
            if isinstance(error, (CommunicatorAbortedError, CollectiveTimeoutError)):
                self.broken = self.broken or error
                self.open_doors()
        else:
            self.fail_halfway(error)

    def refuse_broken(self, what: str) -> NoReturn:
        """Raise the error by which an earlier call of this rank found the communicator broken.

        A call that sends nothing would not notice that the communicator is broken. A receive whose
        message had arrived before would succeed, although the sender may have overwritten the
        message since.
        """
        self.backend.refuse_broken(what)
        raise CommunicatorAbortedError(f"{what}: {self.broken} (that was an earlier call)")

    def fail_halfway(self, error: BaseException) -> None:
        """Break the communicator after a call that failed in the middle.

        The peers may still expect data from this rank, and nobody can determine which data.
        """
        self.recorder.fail()
        self.tell_failure(error)

    def tell_failure(self, error: BaseException) -> None:
        """Break the communicator, and send ``error`` to the peers as the cause."""
        self.backend.abort(Failure.caused_by(self.rank, error))

    def allocate(self, make: Callable[..., T], *args: Any) -> T:
        """Return the memory that ``make`` allocates while the peers are already in this call.

        If the allocation fails, the communicator breaks: this rank cannot receive what the peers
        send in this call, and its next call would mistake that data for its own.
        """
        try:
            return make(*args)
        except BaseException as error:
            self.fail_halfway(error)
            raise

    # -- other libraries, listeners, and closing -------------------------------------------

    def share(self, drain: Callable[[], None]) -> None:
        """Let another library make calls in the background.

        Args:
            drain: function that waits until these calls have ended.
        """
        if self.drain is not drain:
            self.drain = drain
            self.open_doors()

    def listen(self, listener: Listener) -> None:
        """Notify ``listener`` of every call from now on."""
        self.listeners.add(listener)
        lane = listener.lane(self.lane_name)
        # No call may be in flight in the old lanes here: later calls would overtake it.
        if lane is not None:
            self.lane = lane
            self.lanes.clear()
        self.open_doors()

    def forget(self, listener: Listener) -> None:
        """Stop notifying ``listener``."""
        self.listeners.remove(listener)
        self.open_doors()

    def close(self, deadline: Deadline) -> None:
        """Wait for the calls in the background, then refuse all further calls."""
        if self.drain is not None:
            self.drain()
        for lane in (self.lane, *self.lanes.values()):
            lane.close(deadline)
        for work in self._receives_in_order():
            work.settle(deadline)
        self.deliver(deadline)
        self._receives.clear()
        self.shut()
        self.broken = None

    def deliver(self, deadline: Deadline) -> None:
        """Wait until the posted sends have left, or until they cannot."""
        mail = self.backend.__dict__.get("mail")
        if mail is not None:
            mail.deliver(deadline)

    def shut(self) -> None:
        """Refuse all further calls from now on."""
        self.closed = True
        # C would keep calling the plans, and the frames of an error would keep the
        # transport alive.
        self.plans.clear()
        self.open_doors()

    # -- arguments ----------------------------------------------------------------------

    def check_rank(self, what: str, name: str, rank: Any) -> int:
        """Return a rank as an integer.

        Args:
            what, name: the operation and its argument, for errors.

        Raises:
            RankError: the rank is not an integer, or is outside the communicator.
        """
        if type(rank) is int and 0 <= rank < self.size:
            return rank
        # A rank at the edge of a grid may have passed None or -1 for a missing neighbour.
        hint = ' For "no neighbour" pass collective.NULL.' if name in ("src", "dst") else ""
        if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
            raise RankError(f"{what}: {name} {rank!r} is not an integer {self.who}.{hint}")
        if not 0 <= rank < self.size:
            raise RankError(
                f"{what}: {name} {rank}; this communicator has ranks 0 to {self.size - 1} "
                f"{self.who}.{hint}"
            )
        return int(rank)

    def check_timeout(self, timeout: float | None) -> float:
        """Return the seconds that a call may take.

        Raises:
            InvalidArgumentError: ``timeout`` is not a positive number.
        """
        return self.timeout if timeout is None else self.positive(timeout)

    def positive(self, timeout: Any) -> float:
        """Return a number of seconds as a float.

        Raises:
            InvalidArgumentError: ``timeout`` is not a positive number.
        """
        try:
            # Deadlines of NaN would never expire.
            if type(timeout) is not bool and isinstance(timeout, (int, float)) and timeout > 0:
                return float(timeout)
        except OverflowError:  # an int that is too large for a float
            return math.inf
        raise InvalidArgumentError(f"timeout: {timeout!r}; expected a positive number of seconds.")


_Carried = list[tuple[Planned, Buffer | Spot | None, Buffer | Spot | None]]


class _Capture:
    """Operations of the transport that one call makes, and the error that the first one raises."""

    def __init__(self, error: BaseException | None) -> None:
        self.carried: _Carried = []
        self.error = error


def _perform(call: Call, limit: float | Deadline) -> Any:
    return call.perform(Deadline.of(limit))


def _plain_buffer(x: Any) -> Buffer:
    """Return a buffer of an array that C has found to be plain."""
    if type(x) is np.ndarray:  # its dtype is one of NumPy's own, else it would not be plain
        array, dtype = x, BY_NUMPY[x.dtype]
    else:
        array, dtype = adapter_of(x).view(x)
    return Buffer(array if array.ndim == 1 else array.reshape(-1), dtype)
