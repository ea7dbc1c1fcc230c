"""Attributes of communicators, datatypes and windows, by keyvals that the program makes."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from .exceptions import CLASSES, MPIError
from .handles import Inner

__all__ = ["KEYVAL_INVALID", "Attributed", "copy_attributes", "delete_attributes"]

KEYVAL_INVALID = 0
_numbers = itertools.count(1000)


class _Keyval(NamedTuple):
    copy: Any
    delete: Any
    nopython: bool


_keyvals: dict[int, _Keyval] = {}


class Attributed:
    """Methods of the classes whose objects have attributes."""

    __slots__ = ()

    @classmethod
    def Create_keyval(
        cls,
        copy_fn: Callable[..., Any] | bool | None = None,
        delete_fn: Callable[..., None] | None = None,
        nopython: bool = False,
    ) -> int:
        """Return a new keyval.

        Args:
            copy_fn: called by ``Dup`` with (object, keyval, value); returns the duplicate's value,
                or ``NotImplemented`` for none. False or None: duplicates have no attribute; True:
                they have the same value.
            delete_fn: called with (object, keyval, value) when an attribute goes.
            nopython: whether values are integers, such as addresses.
        """
        keyval = next(_numbers)
        _keyvals[keyval] = _Keyval(copy_fn, delete_fn, nopython)
        return keyval

    @classmethod
    def Free_keyval(cls, keyval: int) -> int:
        """Free a keyval; attributes that are set keep it until they go."""
        if keyval not in _keyvals:
            raise MPIError(CLASSES["ERR_KEYVAL"])
        return KEYVAL_INVALID

    def Get_attr(self: Any, keyval: int) -> Any:
        """Return the value of an attribute, or None."""
        self._live  # noqa: B018
        if keyval in self._fixed_attributes():
            return self._fixed_attributes()[keyval]
        if keyval not in _keyvals:
            raise MPIError(CLASSES["ERR_KEYVAL"])
        return self._live.attributes.get(keyval)

    def Set_attr(self: Any, keyval: int, attrval: Any) -> None:
        """Set an attribute."""
        if keyval not in _keyvals:
            raise MPIError(CLASSES["ERR_KEYVAL"])
        attributes = self._live.attributes
        if _keyvals[keyval].nopython:
            attrval = int(attrval)
        if keyval in attributes:
            _delete(self, keyval, attributes)
        attributes[keyval] = attrval

    def Delete_attr(self: Any, keyval: int) -> None:
        """Delete an attribute."""
        if keyval not in _keyvals:
            raise MPIError(CLASSES["ERR_KEYVAL"])
        attributes = self._live.attributes
        if keyval in attributes:
            _delete(self, keyval, attributes)

    def _fixed_attributes(self) -> dict[int, Any]:
        """Return the attributes that MPI itself sets."""
        return {}


def _delete(handle: Any, keyval: int, attributes: dict[int, Any]) -> None:
    value = attributes.pop(keyval)
    delete = _keyvals[keyval].delete
    if delete is not None:
        _guarded(delete, handle, keyval, value)


def copy_attributes(handle: Any, copy: Inner) -> None:
    """Set the attributes of a duplicate, as the keyvals' functions say."""
    for keyval, value in handle._live.attributes.items():
        function = _keyvals[keyval].copy
        if function is True:
            copy.attributes[keyval] = value
        elif callable(function):
            result = _guarded(function, handle, keyval, value)
            if result is not NotImplemented:
                copy.attributes[keyval] = result


def delete_attributes(handle: Any) -> None:
    """Delete all attributes of an object that is freed, the newest first."""
    attributes = handle._live.attributes
    for keyval in reversed(list(attributes)):
        _delete(handle, keyval, attributes)


def _guarded(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a program's function; its error becomes ``ERR_OTHER``."""
    try:
        return function(*args)
    except MPIError:
        traceback.print_exc()
        raise
    except BaseException as error:
        traceback.print_exc()
        raise MPIError(CLASSES["ERR_OTHER"], f"keyval: {error!r}") from error
