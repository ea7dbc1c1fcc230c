"""The ``nccl`` transport: NCCL for memory of GPUs, another transport for the host's memory.

The other transport is the *host plane*; on one host it is shared memory. It carries all data that
is not in a GPU's memory, and the messages that the ranks exchange before NCCL can begin. A monitor
watches the ranks (:mod:`collective.backends.peers.channel`). One failure breaks both planes, for
all ranks.

The transport initialises neither CUDA nor NCCL before the first call with a GPU's buffer, so a
program may fork or set ``CUDA_VISIBLE_DEVICES`` until then. All ranks take part in that call, as in
every collective, and make NCCL's communicator in it.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from collective import cuda
from collective.backends.peers.channel import Channel
from collective.backends.peers.monitor import Monitor
from collective.backends.peers.monitored import Monitored, inside
from collective.contract.backend import Backend, Capabilities
from collective.contract.failure import Failure
from collective.deadline import Deadline
from collective.errors import (
    BackendError,
    CollectiveError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    DeviceError,
)

from .collectives import NcclCollectives
from .engine import NcclComm
from .hosting import Reporting, breaker, broadcast_store, host_plane
from .memory import Blocks
from .messages import NcclMessages
from .opening import Handshake
from .watch import Asked, Batch, Pending, Watch, failure_of

if TYPE_CHECKING:
    from collective.backends.peers.wait import Wait
    from collective.contract.recorder import Recorder
    from collective.contract.world import World
    from collective.cuda import Device, Event, Stream
    from collective.memory.buffer import Buffer
    from collective.memory.device_array import DeviceArray
    from collective.request import Request

    from .library import NcclLibrary

# Seconds that work on the GPUs may take to end when this rank leaves.
_LEAVE_S = 2.0
# Number of side streams that are kept. There is a limit because a program may never use a lane
# twice.
_SIDES = 128
_tuple: Any = tuple.__new__


class NcclBackend(NcclCollectives, Monitored):
    """Transport between ranks with one GPU each; see the module's docstring.

    Attributes:
        channel: the host plane's channel if it has one, else a separate one.
    """

    name = "nccl"
    enqueues = True
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        across_hosts=True,
        detects_lost_peers=True,
        shrinks=True,
        grows=True,
    )

    def __init__(self, host: Backend, channel: Channel, meeting: Handshake, devices: str) -> None:
        super().__init__()
        self.rank, self.size = host.rank, host.size
        self.channel = channel
        self._device: Device | None = None
        places = frozenset(devices.replace(" ", "").split(","))
        able = host.capabilities
        self.capabilities = replace(
            able,
            devices=places,
            symmetric_memory=able.symmetric_memory and "cpu" in places,
            detects_lost_peers=True,
        )
        monitored = isinstance(host, Monitored) and host.channel is channel
        self._plane = host
        self._host = host if monitored else cast(Backend, Reporting(host, channel))
        self._meeting = meeting
        self._devices = devices
        self._comm: NcclComm | None = None
        self._batch: Batch | None = None
        self._sides: dict[Any, Stream] = {}
        self._closed = False
        # The recorder's ring, which counts the communicator's calls.
        self._ring: Any = None
        self._watch = Watch(channel)
        self._messages = NcclMessages(host, channel, self._watch, self._open_pair)
        self._blocks = Blocks(self._watch, weakref.WeakMethod(self._streams))
        if not monitored:
            channel.on_failure.append(breaker(host, channel))
            if channel.failure is not None:
                host.abort(channel.failure)
        # A transport that is dropped without being closed must leave no thread and no spinning
        # kernel behind.
        weakref.finalize(self, _drop, self._watch, os.getpid()).atexit = False

    # -- life -----------------------------------------------------------------------------

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> Self:
        """Connect to the other ranks as the host plane does; see :meth:`Backend.connect`.

        Raises:
            BackendUnavailableError: the transport takes arrays on GPUs only, and a rank has no
                driver or no NCCL; on every rank.
        """
        host, meeting = host_plane(world).connect(world, deadline), Handshake.of(world)
        devices = world.options.get("devices", "cuda")
        try:
            meeting.check(host, devices == "cuda", deadline)
            if isinstance(host, Monitored):
                channel = host.channel
            else:
                here = replace(world, store=broadcast_store(host, world.store, deadline))
                channel = Monitor.start(here, deadline).channel
            return cls(host, channel, meeting, devices)
        except BaseException:
            host.close()
            raise

    def group(self, ranks: Sequence[int], deadline: Deadline) -> NcclBackend:
        host = self._host.group(ranks, deadline)
        try:
            channel = host.channel if isinstance(host, Monitored) else self.channel.group(ranks)
            return type(self)(host, channel, self._meeting, self._devices)
        except BaseException:
            host.close()
            raise

    def descriptors(self, ranks: Sequence[int]) -> int:
        return self._plane.descriptors(ranks)

    def observe(self, recorder: Recorder) -> None:
        self.channel.recorder = recorder
        self._ring = recorder.ring
        self._plane.observe(recorder)

    def abort(self, failure: Failure) -> None:
        self.channel.abort(failure)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self.channel.failure is None:
            self._watch.drain(Deadline(_LEAVE_S))
        # Tell the monitor before connections end: peers that see them end ask it why.
        self.channel.close()
        self._messages.close()
        self._blocks.close()
        self._watch.close()
        self._comm = None
        self._host.close()

    # -- NCCL's communicators -------------------------------------------------------------

    def _open(self, call: object, deadline: Deadline) -> NcclComm:
        """Make NCCL's communicator of all ranks; every rank is in this call."""
        self.channel.check(call)
        with inside(self.channel, call, deadline):
            library, device = self._meeting.everybody(self._plane, call, deadline)
            unique_id = self._meeting.name(self._plane, library, deadline)
        wait = self.channel.wait(call, deadline)
        return self._take(
            self._create(library, unique_id, self.rank, self.size, device, wait), device
        )

    def _look_ahead(self) -> None:
        # Ignore a missing library here: opening the communicator raises the reason.
        with contextlib.suppress(CollectiveError):
            self._learn(self._meeting.library())

    def _take(self, comm: NcclComm, device: Device) -> NcclComm:
        self._watch.adopt(comm)
        self._learn(comm.library)
        self._comm, self._device = comm, device
        return comm

    def _open_pair(self, sender: int, receiver: int, where: object, deadline: Deadline) -> NcclComm:
        """Make NCCL's communicator of one direction; see :mod:`.messages`."""
        pair_rank, peer = (0, receiver) if self.rank == sender else (1, sender)
        with inside(self.channel, where, deadline, (peer,)):
            library, device, unique_id = self._meeting.pair(
                self._plane, sender, receiver, where, deadline
            )
        wait = self.channel.wait(where, deadline, (peer,))
        comm = self._create(library, unique_id, pair_rank, 2, device, wait, (peer,))
        self._device = device
        return self._watch.adopt(comm)

    def _create(
        self,
        library: NcclLibrary,
        unique_id: bytes,
        rank: int,
        size: int,
        device: Device,
        wait: Wait,
        awaited: Sequence[int] | None = None,
    ) -> NcclComm:
        try:
            # Later calls on the communicator may block; the watch ends them.
            return NcclComm.create(library, unique_id, rank, size, device, wait.check)
        except BackendError as error:
            raise self.channel.explain("nccl", error, awaited) from error

    # -- one operation --------------------------------------------------------------------

    def _enqueue(
        self, array: Any, request: Request, deadline: Deadline, function: Any, *args: Any
    ) -> None:
        # Every line here adds to the latency of every call.
        if array.device is not self._device:
            self._refuse_device(array.device, request)
        channel, watch, stream = self.channel, self._watch, cuda.forced.stream or array.stream
        ring = self._ring
        number = None if ring is None else ring.started
        # Same as Asked(…), but without the cost of a Python call; likewise Pending below.
        asked = _tuple(Asked, (request, deadline, None, number))
        if self._batch is not None:
            self._batch.add(self._comm, asked, stream)
            function(*args, stream.handle)
            return
        # Set this before the call: NCCL may never return from the call, and then the watch ends it.
        watch.inside[0] = asked
        if watch.asleep:
            watch.wake()
        try:
            if channel.failure is not None:
                channel.check(request)
            function(*args, stream.handle)
            watch.add(_tuple(Pending, (stream.record(), stream, asked)))
        except (BackendError, CommunicatorAbortedError) as error:
            raise self._explained(error, request) from error
        finally:
            watch.inside[0] = None

    def _explained(self, error: CollectiveError, call: object) -> Exception:
        """Return the error to raise for an error of NCCL, and break the communicator."""
        if isinstance(error, CommunicatorAbortedError):
            # The watch has ended NCCL's communicator, or the error came from the channel's check.
            try:
                self.channel.check(call)
            except CollectiveError as known:
                return known
            return error
        self.channel.compare()  # NCCL notices some calls that do not match
        return self.channel.explain(call, error)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Group the calls of the body into one NCCL call (``ncclGroupStart``, ``ncclGroupEnd``).

        NCCL enqueues the calls at the end of the body. If the body raises, NCCL enqueues the calls
        made before, and the communicator is broken.
        """
        self._batch = batch = Batch(self._watch)
        try:
            yield
        except BaseException as error:
            if batch.asked is not None:
                self.channel.abort(failure_of(error, self.rank))
                # NCCL's groups belong to a thread. If this group stayed open, no later call of this
                # thread would ever start, on any communicator.
                with contextlib.suppress(BackendError, CommunicatorAbortedError):
                    batch.end()
            raise
        finally:
            self._batch = None
        if batch.asked is None:
            return
        asked = batch.asked
        try:
            if self.channel.failure is not None:
                self.channel.check(asked.where)
        except CollectiveError:
            with contextlib.suppress(BackendError, CommunicatorAbortedError):
                batch.end()
            raise
        try:
            batch.end(watched=True)
        except (BackendError, CommunicatorAbortedError) as error:
            raise self._explained(error, asked.where) from error

    @property
    def device(self) -> Device:  # type: ignore[override]  # an attribute elsewhere
        """GPU of this rank.

        Raises:
            DeviceError: there is no GPU, or not the one that this rank should use.
            BackendUnavailableError: there is no driver.
        """
        if self._device is None:
            self._device = self._meeting.device()
        return self._device

    def _refuse_device(self, device: Device, call: object) -> None:
        raise DeviceError(
            f"{call}: the array is on {device}, but rank {self.rank} of {self.size} uses "
            f"{self.device}. Move the array there, or set COLLECTIVE_DEVICE={device.ordinal} on "
            "this rank before it starts."
        )

    # -- point to point -------------------------------------------------------------------

    def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> None:
        if isinstance(src.array, np.ndarray):
            self._host.send(src, dst, tag, deadline)
        else:
            self._placed(src, "send")
            self._messages.send(src, dst, tag, deadline)

    def recv(self, dst: Buffer, src: int, tag: int, deadline: Deadline) -> int:
        if isinstance(dst.array, np.ndarray):
            return self._host.recv(dst, src, tag, deadline)
        self._placed(dst, "recv")
        return self._messages.recv(dst, src, tag, deadline)

    def sendrecv(
        self, src: Buffer, to: int, dst: Buffer, source: int, tag: int, deadline: Deadline
    ) -> None:
        if isinstance(src.array, np.ndarray):
            self._host.sendrecv(src, to, dst, source, tag, deadline)
        else:
            self._placed(src, "sendrecv")
            self._placed(dst, "sendrecv")
            self._messages.sendrecv(src, to, dst, source, tag, deadline)

    def _placed(self, buffer: Buffer, operation: str) -> None:
        """Check that a message's memory is on this rank's GPU."""
        array: Any = buffer.array
        if array.device is not self.device:
            self._refuse_device(array.device, operation)

    # -- memory, streams ------------------------------------------------------------------

    def empty(self, nbytes: int, request: Request, deadline: Deadline) -> np.ndarray[Any, Any]:
        return self._host.empty(nbytes, request, deadline)

    def empty_device(self, nbytes: int, request: Request, deadline: Deadline) -> DeviceArray:
        """Return ``nbytes`` of memory on this rank's GPU (uint8). Collective: all ranks.

        The memory is registered with NCCL, which reduces there without copies where it can.

        Raises:
            AllocationError: some rank's GPU does not have enough memory; on every rank.
        """
        comm = self._comm or self._open(request, deadline)
        with inside(self.channel, request, deadline):
            return self._blocks.allocate(self._plane, comm, comm.device, nbytes, request, deadline)

    def _streams(self) -> list[Stream]:
        return [*self._sides.values(), *self._messages.streams()]

    @property
    def ready(self) -> bool:  # type: ignore[override]  # an attribute elsewhere
        """Whether the ranks have an NCCL communicator; making one waits for all ranks."""
        return self._comm is not None

    def side_stream(self, device: Device, lane: Hashable = None) -> Stream:
        key = device.ordinal, lane
        stream = self._sides.get(key)
        if stream is None:
            if len(self._sides) >= _SIDES:
                # Users of the oldest stream keep it; a later caller for that lane gets a new one.
                self._sides.pop(next(iter(self._sides)), None)
            stream = self._sides.setdefault(key, device.new_stream())
        return stream

    def synchronize_event(self, event: Event, what: str, deadline: Deadline) -> None:
        if not event.query():
            # The wait depends on the ranks of the oldest unfinished call. The watch enforces that
            # call's deadline.
            wait = self.channel.wait(what, Deadline.never(), sequence=self._watch.unfinished())
            while not event.query():
                if deadline.expired:
                    raise CollectiveTimeoutError(
                        f"synchronize: timed out: {what} is still running after "
                        f"{deadline.seconds:g} s; wait again, or abort() the communicator."
                    )
                wait.turn()
        # The event is also complete if the operation was broken off, so check for a failure.
        if self.channel.failure is not None:
            self.channel.check(what, ())

    def keep_until(self, event: Event, things: object) -> None:
        self._watch.keep(event, things)


def _drop(watch: Watch, owner: int) -> None:
    """End the running operations of a transport that was dropped without being closed."""
    # A forked child must not do this: its CUDA state belongs to its parent.
    if os.getpid() == owner:
        watch.close()
