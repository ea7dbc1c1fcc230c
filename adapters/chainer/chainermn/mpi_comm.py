"""What programs of ChainerMN's ask of ``comm.mpi_comm`` beside the communicator's own calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from .objects import ANY_TAG

if TYPE_CHECKING:
    from collective.communicator import Communicator

__all__ = ["MpiComm", "MpiObjectCalls"]


class MpiObjectCalls(Protocol):
    """What is asked of a communicator of ChainerMN's: its calls on objects."""

    comm: Communicator

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def bcast_obj(self, obj: Any, max_buf_len: int = ..., root: int = ...) -> Any:
        """Return the object of ``root``."""

    def gather_obj(self, obj: Any, root: int = ...) -> list[Any] | None:
        """Return the ranks' objects at ``root``."""

    def send_obj(self, obj: Any, dest: int, tag: int = ...) -> None:
        """Send an object."""

    def recv_obj(self, source: int, status: Any = ..., tag: int = ...) -> Any:
        """Receive an object."""

    def get_config(self, name: Any = ...) -> Any:
        """Return a setting."""


class MpiComm:
    """The part of mpi4py's ``MPI.Comm`` that carries objects, over any transport.

    Objects are carried as by the communicator's own calls, and those that ``send`` has sent
    may be received by its ``recv_obj``.

    Args:
        comm: whose ranks they are.
    """

    def __init__(self, comm: MpiObjectCalls) -> None:
        self._comm = comm

    def __repr__(self) -> str:
        return f"<MpiComm over {self._comm.comm!r}>"

    def __getattr__(self, name: str) -> NoReturn:
        calls = sorted(each for each in vars(MpiComm) if not each.startswith("_"))
        raise AttributeError(
            f"mpi_comm.{name}: over {self._comm.comm.backend!r} mpi_comm has {', '.join(calls)}. "
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
        self._comm.comm.barrier()

    Barrier = barrier

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the object of ``root``."""
        return self._comm.bcast_obj(obj, root=root)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return the ranks' objects at ``root``, None elsewhere."""
        return self._comm.gather_obj(sendobj, root=root)

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the ranks' objects."""
        pickle = self._comm.get_config("pickle")
        objects: list[Any] = self._comm.comm.all_gather_object(sendobj, pickle=pickle)
        return objects

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Return this rank's item of the sequence that ``root`` has."""
        pickle = self._comm.get_config("pickle")
        return self._comm.comm.scatter_object(sendobj, root=root, pickle=pickle)

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object to rank ``dest``."""
        self._comm.send_obj(obj, dest, tag)

    def recv(
        self, buf: None = None, source: int = -1, tag: int = ANY_TAG, status: Any = None
    ) -> Any:
        """Receive an object from rank ``source``, by default from any.

        Args:
            buf: of no meaning here.
            source, tag, status: as in :meth:`CollectiveCommunicator.recv_obj`.
        """
        return self._comm.recv_obj(source, status, tag)
