"""Rendezvous: a small key-value store in which the ranks of a job find each other.

It is needed only until a transport is connected: everything later travels over the transport.
Which there are is :mod:`collective.start`'s.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Set

from collective.deadline import Deadline
from collective.errors import RendezvousError, UnsupportedError

__all__ = ["PrefixedStore", "Store", "WrappedStore"]

# A poll costs one failed open(2), some microseconds; ranks of one job start
# milliseconds apart at best, so there is nothing to win below a millisecond.
_POLL_FIRST_S = 0.001


class Store(ABC):
    """What every rendezvous store promises. Keys are short ASCII words, values bytes."""

    #: Whether rank 0's process serves it, and it is gone with that; asked once ranks have met.
    served_by_rank: bool = False

    #: The longest pause between two polls of :meth:`get`, in seconds.
    _poll_last: float = 0.02

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Publish ``value``. Readers see all of it or nothing; a second set replaces it."""

    def get(self, key: str, deadline: Deadline) -> bytes:
        """Return the value of ``key``, waiting for it until ``deadline``.

        Args:
            key: what some rank has published or will publish.
            deadline: moment by which it has to be there.

        Raises:
            RendezvousError: the deadline passed and the key is still absent.
        """
        pause = _POLL_FIRST_S
        while (value := self._poll(key, deadline)) is None:
            if deadline.expired:
                raise RendezvousError(f"rendezvous: nobody published {key!r} at {self}")
            time.sleep(pause)
            pause = min(pause * 1.5, self._poll_last)
        return value

    @abstractmethod
    def try_get(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None if nobody has published it yet."""

    def _poll(self, key: str, deadline: Deadline) -> bytes | None:
        """Return what :meth:`try_get` does, by ``deadline`` if somebody has to answer."""
        return self.try_get(key)

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


class WrappedStore(Store):
    """A store that hands every question on to another one, under a name of its own.

    Subclasses override :meth:`_name`, and the methods whose values differ.

    Args:
        store: the other one.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def __str__(self) -> str:
        return str(self._store)

    @property
    def served_by_rank(self) -> bool:  # type: ignore[override]  # an attribute elsewhere
        return self._store.served_by_rank

    def set(self, key: str, value: bytes) -> None:
        with self._named(key) as name:
            self._store.set(name, value)

    def get(self, key: str, deadline: Deadline) -> bytes:
        # The other store knows how to wait: it may do better than to poll.
        with self._named(key) as name:
            return self._store.get(name, deadline)

    def try_get(self, key: str) -> bytes | None:
        with self._named(key) as name:
            return self._store.try_get(name)

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        with self._named(key) as name:
            return self._store.put_if_absent(name, value)

    def delete(self, key: str) -> None:
        with self._named(key) as name:
            self._store.delete(name)

    def close(self) -> None:
        self._store.close()

    def has_ended(self) -> bool:
        return self._store.has_ended()

    def without(self, ranks: Set[int]) -> None:
        self._store.without(ranks)

    def check(self) -> None:
        self._store.check()

    def _name(self, key: str) -> str:
        """Return the key of the other store that stands for ``key``."""
        return key

    @contextlib.contextmanager
    def _named(self, key: str) -> Iterator[str]:
        """Yield the other store's key; errors name the key that the caller knows."""
        name = self._name(key)
        try:
            yield name
        except RendezvousError as error:
            if name == key:
                raise
            raise RendezvousError(str(error).replace(name, key)) from error


class PrefixedStore(WrappedStore):
    """The keys of another store that begin with a prefix: nobody with another prefix sees them.

    Args:
        store: the other one.
        prefix: what its keys begin with, of which no other is the beginning.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        super().__init__(store)
        self._prefix = prefix

    def _name(self, key: str) -> str:
        return f"{self._prefix}{key}"
