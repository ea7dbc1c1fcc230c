"""The ``shm`` transport: collectives and messages over a control segment."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from collective import native
from collective.backends.mail import CompiledMail, PythonMail
from collective.backends.matching import Matcher
from collective.backends.onesided import OneSided, Region
from collective.contract.backend import Backend, Capabilities, Plan
from collective.contract.failure import Failure
from collective.contract.mail import PAYLOAD_TAG
from collective.contract.process import RAISE_THE_LIMIT
from collective.control.store import NotPublishedError
from collective.deadline import Deadline
from collective.errors import (
    BackendUnavailableError,
    CommunicatorAbortedError,
    RendezvousError,
    UnsupportedError,
)
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.native import NOBODY
from collective.platform import usable_cores

from .compiled import Compiled, exchange_bytes, make_exchange, make_mail
from .control import BROKEN, POLLS_CROWDED, Control, address_of
from .layout import SLOT_BYTES, Layout
from .memory import Heap, RemoteRegion
from .messages import RingMessages, describe, mail_of, receive_alone
from .permission import Permission
from .segment import TOO_MANY_FILES, Segment

if TYPE_CHECKING:
    from collective.contract.backend import Note
    from collective.contract.recorder import Recorder
    from collective.contract.work import Work
    from collective.contract.world import World
    from collective.request import Request

Array = np.ndarray[Any, Any]

_UINT8 = BY_NAME["uint8"]
_GROUP_TAG = -2
_PATH_BYTES = 256
_SOURCE, _OUTPUT = 0, 3  # first word of each array's place: segment, offset and address


class NotMapped(Exception):
    """Raised on all ranks after they have arrived, if they cannot read the peers' memory."""


class ShmBackend(OneSided):
    """Transport for ranks that are processes of one host; see the package's docstring."""

    name = "shm"
    payload_tag = PAYLOAD_TAG
    capabilities = Capabilities(
        checks_calls=True,
        symmetric_memory=True,
        any_source=True,
        posts=True,
        detects_lost_peers=True,
        shrinks=True,
        grows=True,
    )

    def __init__(self, control: Control, disabled: str) -> None:
        self.rank = control.rank
        self.size = control.size
        self._control = control
        self._heap = Heap(control)
        self._slots: dict[np.dtype[Any], list[list[Array]]] = {}
        self._in_slots = True
        self._parity = 0
        self._segments = {_SOURCE: 0, _OUTPUT: 0}  # of this rank's arrays in the running call
        self._disabled = disabled  # the setting ``disable``
        self._single_copy = False
        self._permission: Permission | None = None
        self._board = control.notices
        self._compiled: Compiled | None = None
        # exchange is the core's function for messages of arrays, if all ranks have the core.
        # _transfer sends and receives bytes, in C or in Python. _vote() sets both.
        self.exchange = None
        self._transfer: Callable[..., int] = functools.partial(receive_alone, control)
        self._closed = False

    # -- life -----------------------------------------------------------------------------

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> Self:
        """Meet the other processes through ``world.store``; see :meth:`Backend.connect`."""
        if world.local_size != world.size:
            raise UnsupportedError(
                f"shm: only {world.local_size} of {world.size} ranks are on {world.host}, but shm "
                f"works within one host [rank {world.rank}]. Start all ranks on one host, or "
                "name a transport that works across hosts."
            )
        store, key, layout = world.store, "shm", Layout(world.size)
        # Read the variable here, too: in tests, for example, no init() has read the configuration.
        disabled = world.options.get("disable", os.environ.get("COLLECTIVE_DISABLE", ""))

        def watch(missing: Sequence[int]) -> None:
            store.check()

        if world.rank != 0:
            segment = _open_published(world, key, layout, deadline)
            control = Control(segment, layout, world.rank)
            return cls._attach(control, disabled, deadline, watch)
        segment = Segment.create(layout.nbytes, 0)
        control = Control(segment, layout, 0)
        if world.size == 1:
            return cls._attach(control, disabled, deadline, watch)
        store.set(key, segment.path.encode())
        try:
            # Delete the key before any rank goes on: a second connect must not find it.
            last = functools.partial(store.delete, key)
            return cls._attach(control, disabled, deadline, watch, last)
        finally:
            store.delete(key)

    @classmethod
    def _attach(
        cls,
        control: Control,
        disabled: str,
        deadline: Deadline,
        watch: Callable[[Sequence[int]], None],
        last: Callable[[], object] = lambda: None,
    ) -> Self:
        self = cls(control, disabled)
        try:
            control.join(deadline, watch, last)
            self.meeting = control.meeting
            if self.size > 1:
                self._vote(deadline)
        except BaseException as error:
            # Report the failure before the peers see this rank leave. Then they raise its cause,
            # and not the loss of this rank.
            control.fail(Failure.caused_by(control.rank, error))
            self.close()
            raise
        finally:
            # By now all ranks have opened the segment, or no more ranks will. Leave no file behind.
            control.segment.unlink()
        return self

    def sleep_after(self, seconds: float) -> None:
        """Let waits sleep after they have lasted for ``seconds``.

        If peers will be busy with other work, such as a network, waits should sleep earlier than by
        default. A wait that yields its core still takes the core from them for microseconds at a
        time.
        """
        self._control.yield_s = seconds

    def while_waiting(self, function: Callable[[Deadline], object]) -> None:
        """Let waits call ``function`` with their deadline, some 20 times a second."""
        self._control.while_waiting = function

    def _vote(self, deadline: Deadline) -> None:
        """Agree with all ranks on how calls and messages are made."""
        control = self._control
        probe = np.full(1, self.rank, np.int64)
        reads = self._can_read(probe, deadline)
        protocol = native.PROTOCOL if native.chosen.extension is not None else 0
        cores = usable_cores(*map(control.pid, range(self.size)))
        vote = bytes([reads, protocol, self.size > cores])
        votes = [tuple(other) for other in control.share(vote, deadline)]
        # All ranks have read the probe before they vote.
        del probe
        for rank, other in enumerate(votes):
            if len(other) != len(vote):
                control.refuse(rank, f"a vote of {len(other)} bytes, expected {len(vote)}")
        all_read, protocols, crowds = zip(*votes, strict=True)
        crowded = any(crowds)
        if crowded:
            control.polls = POLLS_CROWDED
        self._single_copy = single_copy = all(all_read)
        if not single_copy:
            self._withdraw()
        if set(protocols) == {native.PROTOCOL}:
            self._compiled = Compiled(control, self._heap, crowded, single_copy)
            self.exchange = make_exchange(control, single_copy, crowded)
            self._transfer = functools.partial(exchange_bytes, self.exchange, control)
        else:
            self._transfer = RingMessages(control, single_copy)

    @functools.cached_property
    def mail(self) -> PythonMail | CompiledMail:  # type: ignore[override]  # an attribute elsewhere
        """Posted messages of this rank; most communicators have none."""
        if self.exchange is not None:
            return make_mail(self.exchange, self._control)
        alone = Matcher({}, rank=self.rank)
        return mail_of(self._control, getattr(self._transfer, "engine", alone))

    def _can_read(self, probe: Array, deadline: Deadline) -> bool:
        """Return whether this rank may read its peers' memory, and can: it reads their probes.

        Args:
            probe: array with this rank's number, which the peers read.
            deadline: for the step that all ranks make together.
        """
        control = self._control
        control.words[control.location(self.rank, 0) + _SOURCE + 2] = address_of(probe)
        wanted = "shm_single_copy" not in self._disabled
        if wanted:
            self._permission = Permission(control.pid(rank) for rank in range(self.size))
        # No rank reads before all ranks have given their permission.
        control.sync(deadline)
        return wanted and all(
            self._reads_probe_of(rank) for rank in range(self.size) if rank != self.rank
        )

    def _reads_probe_of(self, rank: int) -> bool:
        address = self._control.words[self._control.location(rank, 0) + _SOURCE + 2]
        number = np.full(1, -1, np.int64)
        return self._control.read(rank, address, number) and bool(number[0] == rank)

    def observe(self, recorder: Recorder) -> None:
        self._control.recorder = recorder

    def refuse_broken(self, where: object) -> None:
        self._control.refuse_broken(where)

    def lost(self) -> Set[int]:
        return self._control.lost()

    def abort(self, failure: Failure) -> None:
        self._control.fail(failure)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._control.leave()
            if "mail" in self.__dict__:
                self.mail.close()
            self._withdraw()

    def _withdraw(self) -> None:
        """Take back the permission for peers to read this process."""
        if self._permission is not None:
            self._permission.withdraw()
            self._permission = None

    def group(self, ranks: Sequence[int], deadline: Deadline) -> ShmBackend:
        self._control.refuse_broken("group")
        me, layout = list(ranks).index(self.rank), Layout(len(ranks))
        message = np.zeros(_PATH_BYTES, np.uint8)
        if me == 0:
            try:
                segment = Segment.create(layout.nbytes, me)
            except BackendUnavailableError as error:
                # The other ranks wait for the path, so tell them.
                self.abort(Failure("aborted", self.rank, str(error)))
                raise
            message[: len(segment.path)] = list(segment.path.encode())
            for rank in ranks[1:]:
                self.send(Buffer(message, _UINT8), rank, _GROUP_TAG, deadline)
        else:
            self.recv(Buffer(message, _UINT8), ranks[0], _GROUP_TAG, deadline)
            path = message.tobytes().rstrip(b"\0").decode(errors="replace")
            segment = self._open_of(ranks[0], path, layout.nbytes, me)

        def watch(missing: Sequence[int]) -> None:
            self._control.watch([ranks[r] for r in missing if r != me], "group")

        try:
            control = Control(segment, layout, me)
            child = self._attach(control, self._disabled, deadline, watch)
        except CommunicatorAbortedError:
            # Explain the loss with the rank numbers of this communicator, which the caller knows.
            self._control.explain([rank for rank in ranks if rank != self.rank], "group")
            raise
        # The first communicator's segment has the notices of all calls, also of its groups: a cycle
        # of waits can lead through several communicators.
        child._board = self._board
        return child

    def _open_of(self, rank: int, path: str, nbytes: int, me: int) -> Segment:
        """Open the segment of at least ``nbytes`` bytes that ``rank`` has created.

        Args:
            rank: rank of this communicator.
            path, nbytes: where the segment is, and its least length.
            me: this rank's number in the group.

        Raises:
            PeerLostError: ``rank`` has ended meanwhile.
            BackendUnavailableError: this process cannot open it.
        """
        try:
            return Segment.open(path, nbytes, me)
        except OSError as error:
            self._control.explain([rank], "group")
            few = error.errno in TOO_MANY_FILES
            remedy = RAISE_THE_LIMIT if few else "All ranks must see each other's processes"
            text = f"the segment of rank {rank} cannot be opened: {error}"
            self.abort(Failure("aborted", self.rank, f"group: {text} [rank {self.rank}]"))
            raise BackendUnavailableError(f"group: {text} [rank {self.rank}]. {remedy}.") from error

    def delivered(self) -> bool:
        return "mail" not in self.__dict__ or not self.mail.queued()  # a ring is visible at once

    def post(self, note: Note, rank: int) -> Mapping[int, Note]:
        self._board.post([rank, note])
        notices = self._board.read().values()
        return {notice[0]: notice[1] for notice in notices if _is_noted(notice)}

    def descriptors(self, ranks: Sequence[int]) -> int:
        return 2  # one for the segment, and one for its mapping

    def empty(self, nbytes: int, request: Request, deadline: Deadline) -> Array:
        self._control.refuse_broken(request)
        self._control.arrive(request, deadline)
        return self._heap.empty(nbytes, deadline)

    def adopt(
        self, nbytes: int, move: Callable[[], int], request: Request, deadline: Deadline
    ) -> Array | None:
        self._control.refuse_broken(request)
        self._control.arrive(request, deadline)
        return self._heap.adopt(nbytes, move, "shm_adopt" not in self._disabled, deadline)

    # -- point to point -----------------------------------------------------------------

    def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> None:
        self._transfer(src, dst, None, NOBODY, tag, deadline)

    def recv(self, dst: Buffer, src: int, tag: int, deadline: Deadline) -> int:
        return self._transfer(None, NOBODY, dst, src, tag, deadline)

    def sendrecv(
        self, src: Buffer, to: int, dst: Buffer, source: int, tag: int, deadline: Deadline
    ) -> None:
        if to == self.rank and source == self.rank:
            self._control.refuse_broken(describe(to, source, tag))
            dst.array.view(np.uint8)[:] = src.array.view(np.uint8)
        else:
            self._transfer(src, to, dst, source, tag, deadline)

    # -- collectives ----------------------------------------------------------------------

    def plan(self, request: Request) -> Plan:
        in_c = None if self._compiled is None else self._compiled.plan(request)
        if in_c is not None:
            return in_c
        reading = super().plan(request)
        if self._single_copy or request.operation == "barrier":
            return reading
        sending = functools.partial(getattr(Backend, request.operation), self, request)
        return functools.partial(_mapped_or, reading, sending)

    # -- primitives of the collectives ----------------------------------------------------

    def _open(
        self,
        request: Request,
        src: Array | None,
        dst: Array | None,
        largest: int,
        deadline: Deadline,
    ) -> bool:
        control = self._control
        if control.words[BROKEN]:
            raise control.failure(request)
        parity = self._parity = control.step + 1 & 1
        self._in_slots = largest <= SLOT_BYTES
        if self._in_slots:
            if src is not None:
                # No peer reads the slot any more. All ranks have made this rank's last step, so
                # they have all left the call before it. No later call can have used slots of this
                # parity.
                self._slots_of(src.dtype)[parity][self.rank][: src.size] = src
            control.arrive(request, deadline)
            return True
        words, at = control.words, control.location(self.rank, parity)
        for which, array in ((_SOURCE, src), (_OUTPUT, dst)):
            place = self._heap.locate(array)
            words[at + which], words[at + which + 1], words[at + which + 2] = place
            self._segments[which] = place[0]
        control.arrive(request, deadline)
        mapped = self._segment(_SOURCE) and (dst is None or self._segment(_OUTPUT))
        if not (self._single_copy or mapped):
            raise NotMapped
        return False

    def _segment(self, which: int) -> int:
        """Return the number of the segment that contains all ranks' buffers; 0 if there is none.

        The result is the same on all ranks.
        """
        words, location, parity = self._control.words, self._control.location, self._parity
        number = self._segments[which]
        for rank in range(self.size):
            if words[location(rank, parity) + which] != number:
                return 0
        return number

    def _peer(self, which: int, rank: int, dtype: np.dtype[Any], count: int) -> Region:
        at = self._control.location(rank, self._parity) + which
        number, offset, address = self._control.words[at : at + 3]
        if number:
            mapped = self._heap.view(number, rank, offset, dtype, count)
            if mapped is not None:
                return Region(mapped)
        return RemoteRegion(self._control, rank, address, dtype.itemsize)

    def _region(self, rank: int, dtype: np.dtype[Any], count: int) -> Region:
        if self._in_slots:
            return Region(self._slots_of(dtype)[self._parity][rank])
        return self._peer(_SOURCE, rank, dtype, count)

    def _results(self, rank: int, dtype: np.dtype[Any], count: int) -> Region:
        return self._peer(_OUTPUT, rank, dtype, count)

    def _outputs(self, dtype: np.dtype[Any], count: int) -> list[Array] | None:
        number = self._segment(_OUTPUT)
        if not number:
            return None
        words, outputs = self._control.words, []
        for rank in range(self.size):
            offset = words[self._control.location(rank, self._parity) + _OUTPUT + 1]
            mapped = self._heap.view(number, rank, offset, dtype, count)
            assert mapped is not None  # this rank's own buffer keeps the segment mapped
            outputs.append(mapped)
        return outputs

    def _sync(self, deadline: Deadline) -> None:
        self._control.sync(deadline)

    def _slots_of(self, dtype: np.dtype[Any]) -> list[list[Array]]:
        slots = self._slots.get(dtype)
        if slots is None:
            count = SLOT_BYTES // dtype.itemsize
            raw = self._control.segment.map
            slots = self._slots[dtype] = [
                [np.frombuffer(raw, dtype, count, at) for at in starts]
                for starts in self._control.layout.slots
            ]
        return slots


def _is_noted(notice: object) -> bool:
    """Tell whether a notice is undamaged: of the form that :meth:`ShmBackend.post` writes."""
    match notice:
        case [int(), dict()]:
            return True
    return False


def _open_published(world: World, key: str, layout: Layout, deadline: Deadline) -> Segment:
    """Open the segment that rank 0 created, and ignore an older one of a dead process."""
    while True:
        try:
            path = world.store.get(key, deadline).decode()
            return Segment.open(path, layout.nbytes, world.rank)
        except OSError as error:
            if error.errno in TOO_MANY_FILES:
                raise BackendUnavailableError(
                    f"shm: rank 0's segment cannot be opened: {error} [rank {world.rank}]. "
                    f"{RAISE_THE_LIMIT}."
                ) from error
            if deadline.expired:
                raise RendezvousError(
                    f"shm: rank 0's segment cannot be opened: {error} [rank {world.rank}]. All "
                    "ranks must belong to one user and see each other's processes."
                ) from error
            time.sleep(0.005)
        except NotPublishedError as error:
            raise RendezvousError(
                f"shm: after {deadline.seconds:g} s rank 0 of {world.size} has not arrived "
                f"[rank {world.rank}]. Was it started, on this host?"
            ) from error


def _mapped_or(
    reading: Plan, sending: Plan, src: Buffer | None, dst: Buffer | None, deadline: Deadline
) -> Work[Any] | None:
    """Read the peers' memory; if this is not possible, have the peers send it."""
    try:
        return reading(src, dst, deadline)
    except NotMapped:
        return sending(src, dst, deadline)
