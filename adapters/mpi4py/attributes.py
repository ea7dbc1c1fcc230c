"""What the program attaches to communicators, datatypes and windows: attributes, error handlers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from .exceptions import CLASSES, MPIError, guarded
from .handles import Handle, OpaqueObject

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
        _keyval(keyval)
        return KEYVAL_INVALID

    def Get_attr(self: Any, keyval: int) -> Any:
        """Return the value of an attribute, or None."""
        attributes, fixed = self._live.attributes, self._fixed_attributes()
        if keyval in fixed:
            return fixed[keyval]
        _keyval(keyval)
        return attributes.get(keyval)

    def Set_attr(self: Any, keyval: int, attrval: Any) -> None:
        """Set an attribute."""
        if _keyval(keyval).nopython:
            attrval = int(attrval)
        self.Delete_attr(keyval)
        self._live.attributes[keyval] = attrval

    def Delete_attr(self: Any, keyval: int) -> None:
        """Delete an attribute."""
        delete = _keyval(keyval).delete
        attributes = self._live.attributes
        if keyval in attributes:
            value = attributes.pop(keyval)
            if delete is not None:
                guarded(delete, self, keyval, value)

    def _fixed_attributes(self) -> dict[int, Any]:
        """Return the attributes that MPI itself sets."""
        return {}


def _keyval(number: int) -> _Keyval:
    if number not in _keyvals:
        raise MPIError(CLASSES["ERR_KEYVAL"])
    return _keyvals[number]


def copy_attributes(handle: Any, copy: OpaqueObject) -> None:
    """Set the attributes of a duplicate, as the keyvals' functions say."""
    for keyval, value in handle._live.attributes.items():
        function = _keyvals[keyval].copy
        if function is True:
            copy.attributes[keyval] = value
        elif callable(function):
            result = guarded(function, handle, keyval, value)
            if result is not NotImplemented:
                copy.attributes[keyval] = result


def delete_attributes(handle: Any) -> None:
    """Delete all attributes of an object that is freed, the newest first."""
    for keyval in reversed(list(handle._live.attributes)):
        handle.Delete_attr(keyval)


class Errhandler(Handle, kind=True):
    """Error handler of a communicator: a function of the program, or none.

    Whichever is set, an error raises :class:`Exception`, as with mpi4py's default.
    """

    __slots__ = ()
    null_error, constants_end = CLASSES["ERR_ERRHANDLER"], True
    Free = Handle._free


ERRHANDLER_NULL = Errhandler._constant("ERRHANDLER_NULL")
ERRORS_RETURN = Errhandler._constant("ERRORS_RETURN", OpaqueObject(function=None))
ERRORS_ABORT = Errhandler._constant("ERRORS_ABORT", OpaqueObject(function=None))
ERRORS_ARE_FATAL = Errhandler._constant("ERRORS_ARE_FATAL", OpaqueObject(function=None))
