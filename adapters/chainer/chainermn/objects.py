"""Objects from rank to rank as ChainerMN's programs expect them: of any tag, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from collective import ANY_SOURCE
from collective.communicator import Communicator
from collective.errors import InvalidArgumentError

__all__ = ["ANY_TAG", "OBJECT_TAG", "Letter", "Mailbox", "MpiComm"]

#: Every negative tag means any, as MPI libraries have different ones for it.
ANY_TAG = -1
#: With what all objects travel; arrays may have any other tag.
OBJECT_TAG = 2**31 - 1


class Letter(NamedTuple):
    """An object on its way."""

    source: int
    tag: int
    content: Any


class Mailbox:
    """Sends and receives objects, and keeps those that came before they were asked for.

    All objects have one tag in the messages themselves, so that a receiver may ask for any. Of
    one sender they arrive in the order in which they were sent.

    Args:
        comm: carries the messages.
        settings: of the communicator of ChainerMN's; ``pickle`` is what counts at each call.
    """

    def __init__(self, comm: Communicator, settings: Mapping[str, Any]) -> None:
        self.comm = comm
        self._settings = settings
        self._kept: list[Letter] = []

    @property
    def pickle(self) -> bool:
        """Whether objects may be what only pickle can carry."""
        return bool(self._settings["pickle"])

    def send(self, content: Any, dest: int, tag: int = 0) -> None:
        """Send an object; see :meth:`Communicator.send_object`."""
        if isinstance(tag, bool) or not isinstance(tag, int) or tag < 0:
            raise InvalidArgumentError(f"send_obj: tag {tag!r}; an integer from 0.")
        letter = tuple(Letter(self.comm.rank, tag, content))
        self.comm.send_object(letter, dest, tag=OBJECT_TAG, pickle=self.pickle)

    def recv(self, source: int, status: Any, tag: int) -> Any:
        """Receive an object from ``source`` (any if negative) with ``tag`` (any if negative).

        ``status`` gets the attributes ``source`` and ``tag``, unless it is None.
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
    """What ChainerMN's programs ask of ``comm.mpi_comm``: the part of mpi4py that carries objects.

    Objects are carried as by the communicator's own calls, over any transport, and those that
    ``send`` has sent may be received by its ``recv_obj``.

    Args:
        mailbox: the communicator's.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox, self._comm = mailbox, mailbox.comm

    def __repr__(self) -> str:
        return f"<MpiComm over {self._comm!r}>"

    def __getattr__(self, name: str) -> NoReturn:
        calls = sorted(each for each in vars(MpiComm) if not each.startswith("_"))
        raise AttributeError(
            f"mpi_comm.{name}: over {self._comm.backend!r} mpi_comm has {', '.join(calls)}. "
            "Use the calls of the communicator itself, or those of its .comm; or start the "
            "program with mpiexec, and make it with create_communicator(..., "
            "mpi_comm=MPI.COMM_WORLD).",
            name=name,
            obj=self,
        )

    @property
    def rank(self) -> int:
        """This rank."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._comm.size

    def Get_rank(self) -> int:
        """Return this rank."""
        return self._comm.rank

    def Get_size(self) -> int:
        """Return how many ranks there are."""
        return self._comm.size

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        self._comm.barrier()

    Barrier = barrier

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the object of ``root``."""
        return self._comm.broadcast_object(obj, root=root, pickle=self._mailbox.pickle)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return the ranks' objects at ``root``, None elsewhere."""
        return self._comm.gather_object(sendobj, root=root, pickle=self._mailbox.pickle)

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the ranks' objects."""
        return self._comm.all_gather_object(sendobj, pickle=self._mailbox.pickle)

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Return this rank's item of the sequence that ``root`` has."""
        return self._comm.scatter_object(sendobj, root=root, pickle=self._mailbox.pickle)

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object to rank ``dest``."""
        self._mailbox.send(obj, dest, tag)

    def recv(
        self, buf: None = None, source: int = -1, tag: int = ANY_TAG, status: Any = None
    ) -> Any:
        """Receive an object from rank ``source``, by default from any.

        Args:
            buf: of no meaning here.
            source, tag, status: as in :meth:`CollectiveCommunicator.recv_obj`.
        """
        return self._mailbox.recv(source, status, tag)
