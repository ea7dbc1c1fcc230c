"""Store in memory, for ranks that are threads of one process."""

from __future__ import annotations

from collective.contract.store import Store

__all__ = ["MemoryStore"]


class MemoryStore(Store):
    """Dictionary that the threads share; each of its operations is atomic."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def __str__(self) -> str:
        return "the memory of this process"

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        return self._values.setdefault(key, value)

    def try_get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def delete(self, key: str) -> None:
        self._values.pop(key, None)
