"""JAX's key-value store as the store in which the ranks meet."""

from __future__ import annotations

from typing import Any

from collective import RendezvousError
from collective.control.store import Store

_ANSWER_MS = 5000


class JaxStore(Store):
    """Rendezvous store in the coordination service of ``jax.distributed``.

    The process of rank 0 serves it, unless the program uses another server.

    Args:
        client: JAX's client of the service, ``jax._src.distributed.global_state.client``.
    """

    served_by_rank = True

    def __init__(self, client: Any) -> None:
        self._client = client

    def __str__(self) -> str:
        return "JAX's coordination service"

    def set(self, key: str, value: bytes) -> None:
        try:
            self._client.key_value_set_bytes(key, bytes(value), allow_overwrite=True)
        except Exception as error:  # JAX's own class has another name in each version
            raise self._failure("set", key, error) from error

    def try_get(self, key: str) -> bytes | None:
        try:
            return bytes(self._client.key_value_try_get_bytes(key))
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise self._failure("get", key, error) from error

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        try:
            self._client.key_value_set_bytes(key, bytes(value), allow_overwrite=False)
            return value
        except Exception as error:
            if "ALREADY_EXISTS" not in str(error):
                raise self._failure("put_if_absent", key, error) from error
        try:
            return bytes(self._client.blocking_key_value_get_bytes(key, _ANSWER_MS))
        except Exception as error:
            raise self._failure("put_if_absent", key, error) from error

    def delete(self, key: str) -> None:
        try:
            self._client.key_value_delete(key)
        except Exception as error:
            raise self._failure("delete", key, error) from error

    def _failure(self, what: str, key: str, error: Exception) -> RendezvousError:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return RendezvousError(
            f"rendezvous: {what} of {key!r} in {self} failed: {lines[0].rstrip('.')}. The process "
            "of rank 0 serves it: keep it running for as long as other ranks connect."
        )
