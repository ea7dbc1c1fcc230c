"""What every call of a communicator goes through, whatever it does."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from collective import native
from collective.contract.backend import Backend
from collective.contract.failure import Failure
from collective.contract.recorder import Recorder
from collective.contract.work import Lane, Work
from collective.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    DeviceError,
    InvalidArgumentError,
    MismatchError,
    RankError,
)
from collective.memory import nested
from collective.memory.arrays import Adapter, adapter_like, adapter_of
from collective.memory.buffer import Buffer, Spot
from collective.memory.dtypes import DType
from collective.memory.numbers import NUMBERS, is_number
from collective.memory.overlap import writable_arrays
from collective.memory.through_host import Staged
from collective.request import Disagreement, Request, differing

from .deadline import Deadline
from .gpu_calls import GpuCalls, View, to_the_end, with_site
from .listener import CallEvent, Listener
from .output import Output, refuse_overlap, same_memory
from .plan import PREPARE, Planned

if TYPE_CHECKING:
    from typing_extensions import Self

    from collective.cuda import Stream
    from collective.native._core import Door

__all__ = ["Calls"]

Array = np.ndarray[Any, Any]
T = TypeVar("T")
_new: Any = tuple.__new__
# Distinct calls that are remembered. A program makes some dozens; one whose shapes keep
# changing must not grow for ever.
_REMEMBERED = 1024
# What takes Python's numbers: there it is plain what comes of them.
_OF_NUMBERS = {"all_reduce", "reduce", "scan", "broadcast", "gather", "all_gather"}


class Calls(GpuCalls):
    """State of a communicator and the path of a call through it."""

    rank: int
    size: int
    timeout: float

    def __init__(self, backend: Backend, timeout: float, check: str = "auto") -> None:
        self.rank = backend.rank
        self.size = backend.size
        self.timeout = timeout
        self.capabilities = backend.capabilities
        self._backend = backend
        self._check = check
        able = backend.capabilities
        # Where arrays of GPUs go to the transport as they are, and those of the CPU; and whether
        # the former are only enqueued: such calls are compared apart from being made.
        self._on_device = "cuda" in able.devices
        self._on_host = "cpu" in able.devices
        self._enqueues = apart = backend.enqueues
        # Whether fixed-size calls need a round of their own to be compared.
        self._agree_first = check == "always" and (apart or not able.checks_calls)
        # Whether calls whose sizes may differ do: always, where the transport compares nothing.
        self._agree_sizes = not able.checks_calls
        # Whether a broadcast tells what it brings in a message before it. Who passed None does
        # not know if the root's array is on a GPU.
        self._heads = self._agree_sizes and not self._agree_first and not apart
        self._plans: dict[Any, Planned] = {}
        # This rank's GPU, once an array has been found to be there.
        self._gpu: Any = None
        self._lane_name = f"collective-{backend.name}-{backend.rank}"
        self._listeners: tuple[Listener, ...] = ()
        self._lane = Lane(self._lane_name)
        self._lanes: dict[Any, Lane] = {}
        # What a call of this rank's said when it found the communicator broken.
        self._broken: CollectiveError | None = None
        self.recorder = Recorder(f"rank {self.rank} of {self.size} over {backend.name}")
        backend.observe(self.recorder)
        self._closed = False
        self._open_door()

    # -- in C ---------------------------------------------------------------------------

    def _open_door(self) -> None:
        """Let C make plain calls, or not: when somebody listens, or every call will be refused.

        It records a call, runs its plan, and leaves all else to the methods of Python's; see
        :func:`collective.native.methods`. What moves pieces goes this way where the transport
        compares calls by itself.
        """
        shut = self._agree_first or self._listeners or self._closed or self._broken is not None
        queue = self._lane.queue
        self._door: Door | None = None
        if not shut and self._on_host:
            self._door = native.door(self.recorder.ring, queue, self.rank, self.size)
        apart = self._agree_sizes or self._enqueues
        self._door_of_pieces = None if apart else self._door
        self._door_of_scatter = self._door_of_pieces if self._scatters_at_once else None
        heard = self._listeners or self._closed
        self._door_of_messages = None if heard else self._backend.exchange

    @property
    def _scatters_at_once(self) -> bool:
        """Whether the root's call is made before it is known to all; the same on all ranks.

        That pays where ranks share memory and see by themselves when calls differ. These have no
        arrays of GPUs.
        """
        shared = self.capabilities.symmetric_memory and "cuda" not in self.capabilities.devices
        return shared and not (self._agree_sizes or self._agree_first or self._enqueues)

    # -- running ------------------------------------------------------------------------

    def _new_lane(self, name: str) -> Lane:
        """Return a lane for messages: of the first listener that has its own, or the usual one."""
        own = (listener.lane(name, messages=True) for listener in self._listeners)
        return next((lane for lane in own if lane is not None), None) or Lane(name)

    def _go(
        self,
        what: str,
        run: Callable[[], T],
        async_op: bool,
        near: Any = None,
        adapter: Adapter | None = None,
        others: Sequence[Stream] = (),
    ) -> T | Work[T]:
        """Run a prepared collective now, or in its turn.

        Args:
            async_op: whether to return a ``Work``. For :data:`PREPARE` the call is not made: it is
                returned as a function of ``async_op``.
            near: an array of the call's. If it is on a GPU, to run means to enqueue, and what
                is asynchronous goes on a stream beside the caller's.
            adapter: that array's.
            others: streams of further arrays of the call's.
        """
        if async_op is PREPARE:
            return functools.partial(self._remake, what, run)  # type: ignore[return-value]
        if self._broken is not None:
            run = functools.partial(self._refuse_broken, what)
        elif adapter is not None and self._enqueues and type(near) is not np.ndarray:
            if not (async_op or others or self._lane.queue):
                return run()
            return self._enqueue(what, run, async_op, near, adapter, others)
        # Behind what is in the lane, also if this one is waited for: collective calls reach the
        # transport in the order in which the program made them, or the ranks' would differ.
        if async_op or not self._lane.idle:
            if adapter is not None and type(near) is not np.ndarray:
                run = to_the_end(run, near)
            work = self._lane.submit(what, with_site(run))
            return work if async_op else work.wait()
        return run()

    def _remake(self, what: str, run: Callable[[], T], async_op: bool) -> T | Work[T]:
        """Make a prepared call; a communicator that is closed says that it is."""
        if not self._plans:  # close() has let go of them, and of the transport
            self._backend.refuse_broken(what)
        return self._go(what, run, async_op)

    def _transport(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call the transport, and return what comes of it."""
        try:
            result = method(*args)
            return result.wait() if isinstance(result, Work) else result
        except Disagreement:
            raise
        except BaseException as error:
            self._note_failure(error)
            raise

    def _note_failure(self, error: BaseException) -> None:
        """Note what a call that has reached the transport has ended in."""
        if isinstance(error, Disagreement):
            # All ranks know of it, and nothing of the call itself was sent: nobody is left waiting,
            # and the communicator is as sound as before.
            self.recorder.end()
        elif isinstance(error, CollectiveError):
            self.recorder.fail()
            if isinstance(error, (CommunicatorAbortedError, CollectiveTimeoutError)):
                self._broken = self._broken or error
                self._open_door()
        else:
            self._half_done(error)

    def _refuse_broken(self, what: str) -> NoReturn:
        """Raise why the communicator is broken, as an earlier call of this rank has found.

        A call that sends nothing would not find out by itself, and one whose message has been
        there before would succeed: with what its sender has put in its place since, maybe.
        """
        self._backend.refuse_broken(what)
        raise CommunicatorAbortedError(f"{what}: {self._broken} (that was an earlier call)")

    def _half_done(self, error: BaseException) -> None:
        """Break the communicator: nobody can tell what the peers still expect of this rank."""
        self.recorder.fail()
        self._tell_failure(error)

    def _allocate(self, make: Callable[..., T], *args: Any) -> T:
        """Return what ``make`` allocates while the peers are already in this call.

        If there is no memory for it the communicator breaks: this rank cannot take what the peers
        send, and its next call would take that for its own.
        """
        try:
            return make(*args)
        except BaseException as error:
            self._half_done(error)
            raise

    def _tell_failure(self, error: BaseException) -> None:
        """Break the communicator, and tell the peers that ``error`` did it."""
        self._backend.abort(Failure.caused_by(self.rank, error))

    def _carry(
        self,
        planned: Planned,
        src: Buffer | Spot | None,
        dst: Buffer | Spot | None,
        seconds: float,
        *,
        alike: bool = True,
        heard: bool = False,
    ) -> None:
        """Make a collective call of the transport's: the one way on which all of them go.

        Args:
            alike: whether all ranks have to agree entirely, or else it is an error. If not, what
                the transport finds out is raised.
            heard: whether the listeners have been told.

        Raises:
            MismatchError: the ranks' calls differ, and ``alike``.
            Disagreement: they differ, and not ``alike``.
        """
        request = planned.request
        if self._listeners and not heard:
            again = functools.partial(
                self._carry, planned, src, dst, seconds, alike=alike, heard=True
            )
            self._heard(self._event(planned, src, dst), again)
            return
        recorder = self.recorder
        try:
            if alike and self._agree_first:
                deadline = Deadline(seconds)
                self._agree(request, deadline.left())
                seconds = deadline.left()
            recorder.begin(request, planned.compares)
            work = planned.plan(src, dst, seconds)
            if work is not None:
                work.wait()
            recorder.end()
        except BaseException as error:
            self._note_failure(error)
            if alike and isinstance(error, Disagreement):
                self._mismatch(error.headers)
            raise

    def _event(
        self, planned: Planned, src: Buffer | Spot | None, dst: Buffer | Spot | None
    ) -> CallEvent:
        request, number = planned.request, self.recorder.started + 1
        if planned.compares:
            return CallEvent(request.operation, 0, request, number, True)
        lengths = [each.nbytes for each in (src, dst) if each is not None]
        return CallEvent(request.operation, max(lengths, default=request.nbytes), request, number)

    def listen(self, listener: Listener) -> None:
        """Tell ``listener`` of every call from now on, in the order in which listeners came.

        One that has lanes of its own has to come while nothing of this communicator is under way.

        Args:
            listener: what hears; :meth:`hook` is for functions.
        """
        self._listeners = (*self._listeners, listener)
        lane = listener.lane(self._lane_name, messages=False)
        if lane is not None:  # or later calls would overtake those that are under way
            self._lane = lane
            self._lanes.clear()
        self._open_door()

    def _forget(self, listener: Listener) -> None:
        self._listeners = tuple(each for each in self._listeners if each is not listener)
        self._open_door()

    def _heard(self, event: CallEvent, run: Callable[[], T]) -> T:
        """Make a call of which listeners hear.

        A listener that raises breaks the communicator: the peers wait for this rank's part of the
        call, or go on without knowing that the call has failed here.
        """
        begun: list[Listener] = []
        try:
            self._tell_before(event, begun)
            result = run()
        except BaseException as error:
            self._tell_after(begun, event, error)
            raise
        self._tell_after(begun, event, None)
        return result

    def _tell_before(self, event: CallEvent, begun: list[Listener]) -> None:
        """Tell the listeners that a call begins; note in ``begun`` those that have not raised."""
        try:
            for listener in self._listeners:
                listener.before(event)
                begun.append(listener)
        except BaseException as error:
            self._tell_failure(error)
            raise

    def _tell_after(
        self, listeners: list[Listener], event: CallEvent, error: BaseException | None
    ) -> None:
        """Tell all ``listeners`` that a call is over, the last first, also if one of them raises.

        The call's own error, and those of several listeners, are each other's ``__context__``.
        """
        while listeners:
            try:
                listeners.pop().after(event, error)
            except BaseException as raised:
                self._tell_failure(raised)
                self._tell_after(listeners, event, error)
                raise

    def _tell_arrival(self, nbytes: int) -> None:
        """Tell the listeners how long a message is whose first part has come."""
        try:
            for listener in self._listeners:
                listener.arrives(nbytes)
        except BaseException as error:
            self._tell_failure(error)
            raise

    def _planned(self, request: Request) -> Planned:
        return Planned(request, self._backend.plan(request))

    def _agree(self, request: Request, timeout: float) -> None:
        """Compare ``request`` on all ranks."""
        self._carry(self._comparing(request), None, None, timeout, alike=False)

    def _comparing(self, request: Request) -> Planned:
        """Return what compares ``request`` on all ranks."""
        backend = self._backend  # this communicator would keep itself, and not end when dropped

        def compare(src: None, dst: None, seconds: float) -> None:
            backend.agree(request, seconds)

        return Planned(request, compare, compares=True)

    def _sizes(self, request: Request, timeout: float) -> list[dict[str, Any]] | None:
        """Compare ``request`` on all ranks; return their headers if they differ."""
        try:
            self._agree(request, timeout)
        except Disagreement as difference:
            return difference.headers
        return None

    def _about(
        self, request: Request | None, what: str, root: int | None, operation: str,
        elements: Sequence[int] | None = None,
    ) -> Planned:  # fmt: skip
        """Return what carries the head of a call, the same on ranks that know less of it."""
        key = "about", what, request, root
        about = self._plans.get(key)
        if about is None:
            known = Request(what, root=root) if request is None else request
            about = self._remember(key, self._planned(known.comparing(operation, elements)))
        return about

    # -- arrays ---------------------------------------------------------------------------

    def _view(self, what: str, x: Any) -> View:
        """Return an array as the transport can have it, and what makes results like it.

        Raises:
            DeviceError: the transport takes arrays of GPUs alone, or this one is not on the
                GPU of this rank.
        """
        try:
            adapter = adapter_of(x)
        except InvalidArgumentError:
            if not is_number(x) or what not in _OF_NUMBERS:
                raise
            adapter = NUMBERS
        array, dtype = adapter.view(x)
        if type(array) is not np.ndarray:
            if not self._on_device:
                return self._on_the_host(View(adapter, array, dtype))
            if array.device is not self._gpu:
                self._check_device(what, array)
        elif not self._on_host:
            raise DeviceError(
                f"{what}: an array on the CPU; backend {self._backend.name!r} takes arrays "
                f"on GPUs {self._who}. Copy it there, or use backend='cpu:shm,cuda:nccl', "
                "which takes both."
            )
        # As View(…) does it, without a call of Python's.
        return _new(View, (adapter, array, dtype))  # type: ignore[no-any-return]

    def _views(self, what: str, x: Any) -> list[View]:
        """Return the arrays of a structure, which are all on the CPU or all on the GPU."""
        views = [self._view(what, leaf) for leaf in nested.flatten(x)]
        for view in views[1:]:
            same_memory(what, views[0].array, view.array)
        return views

    def _adapter(self, like: Any, on_gpu: bool = False) -> Adapter:
        """Return what makes results like ``like``: a framework's name, an array, or None.

        Args:
            on_gpu: whether the result is on the GPU already; then NumPy, or None, has it as an
                array that any framework takes without a copy.
        """
        if on_gpu:
            by_name = isinstance(like, str) and like == "numpy"
            anything = like is None or by_name or isinstance(like, np.ndarray)
            return adapter_like("cuda" if anything else like)
        adapter = adapter_like("numpy" if like is None else like)
        if like is None or isinstance(like, (str, np.ndarray)):
            return adapter
        array: Any = adapter.view(like)[0]
        return adapter if isinstance(array, np.ndarray) else Staged(adapter, array.device)

    def _hosted(self) -> Self:
        """Return this communicator for arrays of its own on the CPU, which it then takes."""
        if self._on_host:
            return self
        # It shares the lane, the recorder and all else, so that calls of both are in one order.
        twin = copy.copy(self)
        twin._on_host = True
        return twin

    @staticmethod
    def _input(array: Array, dtype: DType, output: Output | None, given: Any, x: Any) -> Buffer:
        """Return ``array`` as a buffer that overlaps the output not at all, or entirely."""
        if output is not None and output.in_place:
            return Buffer(output.flat, dtype)
        flat = array.ravel()
        if output is not None and given is not None:
            if given is x:
                # In place: one buffer, unless the strides made it two.
                if np.may_share_memory(flat, output.flat):
                    return Buffer(output.flat, dtype)
            elif np.may_share_memory(flat, output.flat):
                flat = flat.copy()
        return Buffer(flat, dtype)

    def _outs(self, what: str, out: Any, nesting: Any, count: int, like: str) -> list[Any]:
        """Return where the leaves of a result go: those of ``out``, or None for each of them."""
        if out is None:
            return [None] * count
        if nested.skeleton(out) != nesting:
            raise InvalidArgumentError(
                f"{what}: out is nested differently from the {like} {self._who}."
            )
        refuse_overlap(what, writable_arrays(out))
        return nested.flatten(out)

    # -- errors ---------------------------------------------------------------------------

    def _mismatch(self, headers: Sequence[dict[str, Any]]) -> NoReturn:
        name = headers[self.rank]["operation"]
        raise MismatchError(
            f"{name}: the ranks made different calls {self._who}:\n"
            + differing(dict(enumerate(headers)))
            + "\nEvery rank must make the same collective calls in the same order."
        ) from None

    def _rank(self, what: str, name: str, rank: Any) -> int:
        if type(rank) is int and 0 <= rank < self.size:
            return rank
        if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
            raise RankError(f"{what}: {name} {rank!r} is not an integer {self._who}.")
        if not 0 <= rank < self.size:
            raise RankError(
                f"{what}: {name} {rank}; this communicator has ranks 0 to {self.size - 1} "
                f"{self._who}."
            )
        return int(rank)

    def _seconds(self, timeout: float | None) -> float:
        if timeout is None:
            return self.timeout
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
            raise InvalidArgumentError(f"timeout: {timeout!r}; a positive number of seconds.")
        return float(timeout)

    def _remember(self, key: Any, plan: Planned) -> Planned:
        if len(self._plans) >= _REMEMBERED:
            self._plans.clear()
        self._plans[key] = plan
        return plan
