"""Rendezvous: a small key-value store in which the ranks of a job find each other.

A transport needs the store only until it is connected. After that, the ranks communicate over the
transport. The stores themselves are in :mod:`collective.start`.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Set

from collective.deadline import Deadline
from collective.errors import RendezvousError, UnsupportedError

# A poll costs one failed open(2), some microseconds. Ranks of one job start milliseconds apart at
# best, so a pause below a millisecond gains nothing.
_POLL_FIRST_S = 0.001


class NotPublishedError(RendezvousError):
    """The store works, but nobody has published a key before the deadline."""


class Store(ABC):
    """Base class of the rendezvous stores. Keys are short ASCII words, values are bytes."""

    #: Whether the process of rank 0 serves the store, so that the store ends with that process.
    #: Valid once the ranks have met.
    served_by_rank: bool = False

    #: The longest pause between two polls of :meth:`get`, in seconds.
    _poll_last: float = 0.02

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Publish ``value``, replacing an earlier value. Readers see all of it or nothing."""

    def get(self, key: str, deadline: Deadline) -> bytes:
        """Return the value of ``key``, waiting for it until ``deadline``.

        Args:
            key: a key that some rank has published or will publish.
            deadline: moment by which the value must be there.

        Raises:
            NotPublishedError: the deadline passed and the key is still absent.
            RendezvousError: the store cannot be used.
        """
        pause = _POLL_FIRST_S
        while (value := self._poll(key, deadline)) is None:
            if deadline.expired:
                raise NotPublishedError(f"rendezvous: nobody published {key!r} at {self}")
            time.sleep(pause)
            pause = min(pause * 1.5, self._poll_last)
        return value

    @abstractmethod
    def try_get(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None if nobody has published it yet."""

    def _poll(self, key: str, deadline: Deadline) -> bytes | None:
        """Return what :meth:`try_get` returns; wait until ``deadline`` for a server's answer."""
        return self.try_get(key)

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        """Publish ``value`` unless ``key`` already has one; return the value of ``key``.

        If several ranks call this at once, one of them wins, and all of them get the winner's
        value. In this way the remaining ranks decide on the new members
        (:meth:`Communicator.shrink`). A repeated call returns the same value.

        Raises:
            UnsupportedError: this store does not have the operation.
            RendezvousError: the store has the operation, but is gone.
        """
        raise UnsupportedError(
            f"put_if_absent({key!r}): the ranks met at {self}, a {type(self).__name__} without "
            "an atomic put-if-absent, which shrink() and agree() need. Have the ranks meet in "
            "a directory that all ranks see, or at an address: COLLECTIVE_STORE=DIR or "
            "tcp://HOST:PORT."
        )

    @abstractmethod
    def delete(self, key: str) -> None:
        """Forget ``key``. An absent key is no error."""

    def close(self) -> None:  # noqa: B027  an offer, not a duty
        """Release the resources behind the store; this rank makes no more calls to it."""

    def has_ended(self) -> bool:
        """Tell whether the store's server has certainly ended; False if a rank cannot find out."""
        return False

    def refusals(self) -> tuple[Mapping[str, int], Mapping[str, int]] | None:
        """Return how many connections the store's server has refused.

        Returns:
            Numbers of connections by address: first of those whose secret differs, then of those
            that proved nothing, for example since their certificate was refused. None unless this
            process serves the store.
        """
        return None

    def announced(self) -> Set[tuple[str, int]]:
        """Return the processes that the launcher counts as lost: host and number of each.

        Some may live on a host that is cut off. The numbers are those of
        :class:`~collective.contract.process.RankProcess`. The method waits for nothing.
        """
        return frozenset()

    def without(self, ranks: Set[int]) -> None:  # noqa: B027  an offer, not a duty
        """Note that ``ranks`` are out, by a decision in which this rank took part.

        So these ranks know nothing about the store that this rank does not know.
        """

    def check(self) -> None:  # noqa: B027  an offer, not a duty
        """Raise if the ranks certainly cannot meet; called while a rank waits for the others."""


class WrappedStore(Store):
    """Store that forwards each call to another store, under a changed key.

    Subclasses override :meth:`_name`, and the methods whose values differ.

    Args:
        store: the other store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def __str__(self) -> str:
        return str(self._store)

    @property
    def served_by_rank(self) -> bool:  # type: ignore[override]  # an attribute in Store
        return self._store.served_by_rank

    def set(self, key: str, value: bytes) -> None:
        with self._named(key) as name:
            self._store.set(name, value)

    def get(self, key: str, deadline: Deadline) -> bytes:
        # Let the other store wait: it may have a better way than polling.
        with self._named(key) as name:
            return self._store.get(name, deadline)

    def try_get(self, key: str) -> bytes | None:
        with self._named(key) as name:
            return self._store.try_get(name)

    @property
    def _poll_last(self) -> float:  # type: ignore[override]  # an attribute in Store
        return self._store._poll_last

    def _poll(self, key: str, deadline: Deadline) -> bytes | None:
        with self._named(key) as name:
            return self._store._poll(name, deadline)

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

    def refusals(self) -> tuple[Mapping[str, int], Mapping[str, int]] | None:
        return self._store.refusals()

    def announced(self) -> Set[tuple[str, int]]:
        return self._store.announced()

    def without(self, ranks: Set[int]) -> None:
        self._store.without(ranks)

    def check(self) -> None:
        self._store.check()

    def _name(self, key: str) -> str:
        """Return the key in the other store that stands for ``key``."""
        return key

    @contextlib.contextmanager
    def _named(self, key: str) -> Iterator[str]:
        """Yield the key in the other store; make errors name the caller's key instead."""
        name = self._name(key)
        try:
            yield name
        except RendezvousError as error:
            if name == key:
                raise
            raise type(error)(str(error).replace(name, key)) from error.__cause__


class PrefixedStore(WrappedStore):
    """Part of another store: the keys that begin with a prefix, invisible under other prefixes.

    Args:
        store: the other store.
        prefix: beginning of the keys; no prefix may be the beginning of another prefix.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        super().__init__(store)
        self._prefix = prefix

    def _name(self, key: str) -> str:
        return f"{self._prefix}{key}"


class WatchedStore(PrefixedStore):
    """Store for one meeting of ranks, of which some may never come.

    Args:
        store: the other store.
        prefix: as in :class:`PrefixedStore`.
        look: function that raises if not all awaited ranks will come. Every wait calls it
            repeatedly.
        lasts: whether the other store outlives rank 0 in any case.
    """

    def __init__(
        self, store: Store, prefix: str, look: Callable[[], None], *, lasts: bool = False
    ) -> None:
        super().__init__(store, prefix)
        self._look = look
        self._lasts = lasts

    @property
    def served_by_rank(self) -> bool:  # type: ignore[override]  # an attribute in Store
        return not self._lasts and super().served_by_rank

    # The other store's own get() would wait without calling `look`.
    get = Store.get

    def release(self) -> None:
        """Stop calling ``look``, and drop the reference to it.

        A transport keeps its world and so this store. Through ``look`` the store would keep alive
        what the meeting needed, such as the transport of the previous generation.
        """
        self._look = lambda: None

    def try_get(self, key: str) -> bytes | None:
        self._look()
        return super().try_get(key)

    def _poll(self, key: str, deadline: Deadline) -> bytes | None:
        self._look()
        return super()._poll(key, deadline)

    def check(self) -> None:
        super().check()
        self._look()
