"""Ray's key-value store as the store in which the ranks meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collective.control.store import Store
from collective.errors import RendezvousError

_PREFIX = "collective/"


class RayStore(Store):
    """Rendezvous store in the control service of a Ray cluster.

    Ray's head node serves it, so it outlives every rank.

    Args:
        kv: the module ``ray.experimental.internal_kv``.
        name: name of the part of the store that this object uses.
    """

    def __init__(self, kv: Any, name: str) -> None:
        self._kv = kv
        self._name = name

    def __str__(self) -> str:
        return "Ray's key-value store"

    def set(self, key: str, value: bytes) -> None:
        self._ask("set", key, lambda name: self._kv._internal_kv_put(name, value, True))

    def try_get(self, key: str) -> bytes | None:
        value = self._ask("get", key, self._kv._internal_kv_get)
        return None if value is None else bytes(value)

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        # Ray's function returns whether the key had a value already.
        if not self._ask(
            "put_if_absent", key, lambda name: self._kv._internal_kv_put(name, value, False)
        ):
            return value
        first = self.try_get(key)
        if first is None:
            raise RendezvousError(
                f"rendezvous: put_if_absent of {key!r} in {self} failed: another process deleted "
                "the key meanwhile. The ranks of this group are through with it."
            )
        return first

    def delete(self, key: str) -> None:
        self._ask("delete", key, self._kv._internal_kv_del)

    def delete_all(self) -> None:
        """Forget all keys."""
        self._ask("delete", "", lambda name: self._kv._internal_kv_del(name, del_by_prefix=True))

    def _ask(self, what: str, key: str, call: Callable[[bytes], Any]) -> Any:
        try:
            return call(f"{_PREFIX}{self._name}/{key}".encode())
        except Exception as error:  # Ray has other classes in each version, and AttributeError
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise RendezvousError(
                f"rendezvous: {what} of {key!r} in {self} failed: {lines[0].rstrip('.')}. Ray's "
                "head node serves it: keep it running, and make groups in processes that are "
                "connected to it (ray.init)."
            ) from error
