"""The object a user holds: ranks that can call each other.

What it can do is a class a topic, each in a file of its own, on the path that all calls go
(:mod:`.calls`).
"""

from __future__ import annotations

from collections.abc import Callable

from .allocating import Allocating
from .foreign_names import ForeignNames
from .generations import Generations
from .listener import CallEvent, Hook
from .plain_calls import PlainCalls

__all__ = ["Communicator"]


class Communicator(PlainCalls, Allocating, Generations, ForeignNames):
    """Ranks 0 to ``size - 1``, connected by one transport.

    Collective calls are made by all ranks in one order. One thread uses a communicator at
    a time; calls with ``async_op=True`` go on in the background, in the order in which they
    were made. An array passed in is never changed unless it is ``out``.

    As a context manager it is closed at the end of the body. An exception in the body
    aborts the peers: their calls raise ``PeerFailedError`` with its traceback.

    Attributes:
        rank, size: which of how many this is.
        local_rank, local_size: the same among the ranks of this host.
        host: the name of this host.
        timeout: seconds that a call may take, unless it says otherwise.
        capabilities: what the transport can do.
    """

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return (
            f"<Communicator rank {self.rank} of {self.size} over {self.backend} on {self.host} "
            f"(local rank {self.local_rank} of {self.local_size}){state}>"
        )

    @property
    def check(self) -> str:
        """Whether calls are compared before they are sent: "auto", "always" or "never"."""
        return self._check

    def hook(
        self,
        before: Callable[[CallEvent], object] | None = None,
        after: Callable[[CallEvent, BaseException | None], object] | None = None,
    ) -> Callable[[], None]:
        """Have functions called around every call that reaches the transport.

        For a program's own accounting: how many bytes, how long, how often. They run in the thread
        that makes the call, which is a lane's for what was started with ``async_op=True``, and
        must not make calls themselves. An exception of theirs is the call's. Groups that are made
        of this communicator have hooks of their own.

        Args:
            before: is given the call as it begins.
            after: is given the call and what it raised, or None.

        Returns:
            A function that ends it.
        """
        hook = Hook(before, after)
        self.listen(hook)
        return lambda: self._forget(hook)
