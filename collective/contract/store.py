"""Rendezvous: a small key-value store in which the ranks of a job find each other.

It is needed only until a transport is connected: everything later travels over the transport.
Which there are is :mod:`collective.start`'s.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Set

from collective.errors import RendezvousError, UnsupportedError

__all__ = ["Store"]

# A poll costs one failed open(2), some microseconds; ranks of one job start
# milliseconds apart at best, so there is nothing to win below a millisecond.
_POLL_FIRST_S = 0.001
_POLL_LAST_S = 0.02


class Store(ABC):
    """What every rendezvous store promises. Keys are short ASCII words, values bytes."""

    #: Whether rank 0's process serves it, and it is gone with that; asked once ranks have met.
    served_by_rank: bool = False

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Publish ``value``. Readers see all of it or nothing; a second set replaces it."""

    def get(self, key: str, deadline: float) -> bytes:
        """Return the value of ``key``, waiting for it until ``deadline``.

        Args:
            key: what some rank has published or will publish.
            deadline: on the clock of ``time.monotonic()``, in seconds.

        Raises:
            RendezvousError: the deadline passed and the key is still absent.
        """
        pause = _POLL_FIRST_S
        while (value := self.try_get(key)) is None:
            if time.monotonic() >= deadline:
                raise RendezvousError(f"rendezvous: nobody published {key!r} at {self}")
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL_LAST_S)
        return value

    @abstractmethod
    def try_get(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None if nobody has published it yet."""

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        """Publish ``value`` unless ``key`` has one; return the value that it then has.

        Of all who do so at once one wins, and everybody is returned what that one has given: the
        ranks that are left decide so who they are (:meth:`Communicator.shrink`). Whoever repeats
        it is returned the same.

        Raises:
            UnsupportedError: this store cannot.
            RendezvousError: it could, and is gone.
        """
        raise UnsupportedError(
            f"put_if_absent({key!r}): the ranks met at {self}, a {type(self).__name__}, which "
            "cannot keep the first of several values, as shrink() and agree() need it. Have them "
            "meet in a directory that all ranks see, or at an address: COLLECTIVE_STORE=DIR or "
            "tcp://HOST:PORT."
        )

    @abstractmethod
    def delete(self, key: str) -> None:
        """Forget ``key``. An absent key is no error."""

    def close(self) -> None:  # noqa: B027  an offer, not a duty
        """Let go of what works for the store: this rank neither asks nor tells any more."""

    def has_ended(self) -> bool:
        """Tell whether who serves it has ended for certain; False if that cannot be known."""
        return False

    def without(self, ranks: Set[int]) -> None:  # noqa: B027  an offer, not a duty
        """Note that ranks are out, by a decision that this one was part of: they know no more."""

    def check(self) -> None:  # noqa: B027  an offer, not a duty
        """Raise if it is known that the ranks will not meet; asked while they are awaited."""
