"""Messages of objects as ChainerMN's programs expect them: with any tag, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from collective import ANY_SOURCE, Communicator, InvalidArgumentError

#: Wildcard tag. Every negative tag means any tag, because MPI libraries use different numbers.
ANY_TAG = -1
#: Message tag of all objects; arrays may have any other tag.
OBJECT_TAG = 2**31 - 1


class Letter(NamedTuple):
    """Object in a message, with its sender and tag."""

    source: int
    tag: int
    content: Any


class Mailbox:
    """Sender and receiver of objects, which queues objects that arrive before their ``recv``.

    All objects travel with the same message tag, so that a receiver may accept any tag. Objects of
    one sender arrive in the order in which they were sent.

    Args:
        comm: communicator that carries the messages.
        settings: settings of the ChainerMN communicator; each call reads ``pickle``.
    """

    def __init__(self, comm: Communicator, settings: Mapping[str, Any]) -> None:
        self.comm = comm
        self._settings = settings
        self._kept: list[Letter] = []

    @property
    def pickle(self) -> bool:
        """Whether objects may need pickle to be sent."""
        return bool(self._settings["pickle"])

    def send(self, content: Any, dest: int, tag: int = 0) -> None:
        """Send an object; see :meth:`Communicator.send_object`."""
        if isinstance(tag, bool) or not isinstance(tag, int) or tag < 0:
            raise InvalidArgumentError(
                f"send_obj: tag is {tag!r} (expected an integer of at least 0)."
            )
        letter = tuple(Letter(self.comm.rank, tag, content))
        self.comm.send_object(letter, dest, tag=OBJECT_TAG, pickle=self.pickle)

    def recv(self, source: int, status: Any, tag: int) -> Any:
        """Receive an object from ``source`` (any if negative) with ``tag`` (any if negative).

        The attributes ``source`` and ``tag`` of ``status`` are set, unless ``status`` is None.
        """
        letter = self._next(ANY_SOURCE if source < 0 else source, tag)
        if status is not None:
            status.source, status.tag = letter.source, letter.tag
        return letter.content

    def _next(self, source: int, tag: int) -> Letter:
        for number, letter in enumerate(self._kept):
            if source in (ANY_SOURCE, letter.source) and (tag < 0 or letter.tag == tag):
                return self._kept.pop(number)
        while True:
            received = self.comm.recv_object(source, tag=OBJECT_TAG, pickle=self.pickle)
            letter = Letter(*received)
            if tag < 0 or letter.tag == tag:
                return letter
            self._kept.append(letter)


class MpiComm:
    """Replacement for ``comm.mpi_comm`` in ChainerMN's programs: mpi4py's calls for objects.

    Objects travel in the same way as those of the communicator's own calls, over any transport. So
    the communicator's ``recv_obj`` can receive an object that ``send`` has sent.

    Args:
        mailbox: mailbox of the communicator.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox, self._comm = mailbox, mailbox.comm

    def __repr__(self) -> str:
        return f"<MpiComm over {self._comm!r}>"

    def __getattr__(self, name: str) -> NoReturn:
        calls = sorted(call for call in vars(MpiComm) if not call.startswith("_"))
        raise AttributeError(
            f"mpi_comm.{name}: over {self._comm.backend!r} mpi_comm has {', '.join(calls)}. "
            "Use the calls of the communicator itself, or those of its .comm. Or start the "
            "program with mpiexec, and make the communicator by create_communicator(..., "
            "mpi_comm=MPI.COMM_WORLD).",
            name=name,
            obj=self,
        )

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._comm.size

    def Get_rank(self) -> int:
        """Return this rank."""
        return self._comm.rank

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return self._comm.size

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self._comm.barrier()

    Barrier = barrier

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the object of ``root``."""
        return self._comm.broadcast_object(obj, root=root, pickle=self._mailbox.pickle)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return the ranks' objects at ``root``, and None on other ranks."""
        return self._comm.gather_object(sendobj, root=root, pickle=self._mailbox.pickle)

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the list of the ranks' objects."""
        return self._comm.all_gather_object(sendobj, pickle=self._mailbox.pickle)

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Return this rank's item of the root's sequence."""
        return self._comm.scatter_object(sendobj, root=root, pickle=self._mailbox.pickle)

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object to rank ``dest``."""
        self._mailbox.send(obj, dest, tag)

    def recv(
        self, buf: None = None, source: int = -1, tag: int = ANY_TAG, status: Any = None
    ) -> Any:
        """Receive an object from rank ``source``, by default from any rank.

        Args:
            buf: accepted for compatibility; has no effect.
            source, tag, status: as in :meth:`CollectiveCommunicator.recv_obj`.
        """
        return self._mailbox.recv(source, status, tag)
