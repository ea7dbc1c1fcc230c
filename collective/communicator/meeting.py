"""Where the ranks of one generation meet: a part of the store of all."""

from __future__ import annotations

from collections.abc import Callable

from collective.contract.store import Store

__all__ = ["PrefixedStore"]


class PrefixedStore(Store):
    """Keys of their own in the store of all.

    Args:
        store: of all generations.
        prefix: no other generation's.
        look: raises if those who are awaited will not all come.
    """

    def __init__(self, store: Store, prefix: str, look: Callable[[], None]) -> None:
        self._store = store
        self._prefix = prefix
        self._look = look

    def release(self) -> None:
        """Look no more: a transport keeps its world, which is not to keep the last transport."""
        self._look = lambda: None

    def __str__(self) -> str:
        return str(self._store)

    def set(self, key: str, value: bytes) -> None:
        self._store.set(f"{self._prefix}.{key}", value)

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        return self._store.put_if_absent(f"{self._prefix}.{key}", value)

    def try_get(self, key: str) -> bytes | None:
        self._look()
        return self._store.try_get(f"{self._prefix}.{key}")

    def delete(self, key: str) -> None:
        self._store.delete(f"{self._prefix}.{key}")

    def check(self) -> None:
        self._store.check()
        self._look()
