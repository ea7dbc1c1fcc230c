"""``MPI.Info``: hints as strings by name, in the order in which they were set."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from .exceptions import CLASSES, MPIError
from .handles import Handle, OpaqueObject

MAX_INFO_KEY, MAX_INFO_VAL = 255, 1024


class Info(Handle, MutableMapping[str, str], kind=True):
    """Hints; also a mapping of strings to strings."""

    __slots__ = ()
    null_error = CLASSES["ERR_INFO"]

    @classmethod
    def Create(cls, items: Any = None) -> Any:
        """Return hints with ``items``: another info, a mapping or pairs."""
        info = cls._of(OpaqueObject(items={}))
        if items:
            info.update(items)
        return info

    @classmethod
    def Create_env(cls, args: Sequence[str] | None = None) -> Any:
        """Return what is known of how the program was started."""
        args = [sys.executable, *sys.argv] if args is None else list(args)
        items = {"maxprocs": "1", "soft": "1", "wdir": os.getcwd(), "thread_level": _LEVEL}
        if args:
            items |= {"command": args[0], "argv": " ".join(args[1:])}
        return cls._of(OpaqueObject(items=items))

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self and self._inner.constant is None:
            return type(self).Create, (self.items(),)
        return super().__reduce__()

    Free = Handle._free

    def Dup(self) -> Any:
        """Return a copy."""
        return type(self)._of(OpaqueObject(items=dict(self._live.items)))

    def Get(self, key: str) -> str | None:
        """Return a value, or None."""
        value: str | None = self._live.items.get(_key(key))
        return value

    def Set(self, key: str, value: str) -> None:
        """Set a value."""
        if not isinstance(value, str):
            raise TypeError(f"Info.Set: a value must be a str, not {type(value).__name__}")
        if len(value) >= MAX_INFO_VAL:
            raise MPIError(CLASSES["ERR_INFO_VALUE"])
        self._live.items[_key(key)] = value

    def Delete(self, key: str) -> None:
        """Delete a value."""
        if self._live.items.pop(_key(key), None) is None:
            raise MPIError(CLASSES["ERR_INFO_NOKEY"])

    def Get_nkeys(self) -> int:
        """Return the number of keys."""
        return len(self._live.items)

    def Get_nthkey(self, n: int) -> str:
        """Return the n-th key."""
        keys = list(self._live.items)
        if not 0 <= n < len(keys):
            raise MPIError(CLASSES["ERR_ARG"])
        return str(keys[n])

    # As a mapping, a null handle is empty, and refuses values by KeyError.

    @property
    def _items(self) -> dict[str, str]:
        return self._inner.items if self else {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __getitem__(self, item: str, /) -> str:
        return self._items[item]

    def __setitem__(self, item: str, value: str, /) -> None:
        if not self:
            raise KeyError(item)
        self.Set(item, value)

    def __delitem__(self, item: str, /) -> None:
        del self._items[item]

    def keys(self) -> list[str]:  # type: ignore[override]
        """Return the keys."""
        return list(self._items)

    def values(self) -> list[str]:  # type: ignore[override]
        """Return the values."""
        return list(self._items.values())

    def items(self) -> list[tuple[str, str]]:  # type: ignore[override]
        """Return keys with values."""
        return list(self._items.items())

    def update(self, items: Any = (), /, **kwds: str) -> None:
        """Set values of another info, a mapping or pairs."""
        if not self:
            raise KeyError("update(): null")
        super().update(items, **kwds)

    def popitem(self) -> tuple[str, str]:
        """Remove the last key, and return it with its value."""
        return self._items.popitem()

    def copy(self) -> Any:
        """Return a copy, null for a null handle."""
        return self.Dup() if self else type(self)()


def _key(key: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"Info: a key must be a str, not {type(key).__name__}")
    if not 0 < len(key) < MAX_INFO_KEY:
        raise MPIError(CLASSES["ERR_INFO_KEY"])
    return key


_LEVEL = "MPI_THREAD_MULTIPLE"
INFO_NULL = Info._constant("INFO_NULL")
INFO_ENV = Info._constant("INFO_ENV", Info.Create_env()._inner)
