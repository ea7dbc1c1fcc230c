"""Handles, as mpi4py's objects are: several Python objects may name one opaque object.

``Comm(comm)`` is a second handle of the same communicator, ``Free`` clears the handle that it is
called on, and a cleared handle equals the null handle of its class. What a handle names is an
:class:`OpaqueObject`. Constants such as ``COMM_WORLD`` pickle as their names.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from functools import cached_property
from types import FunctionType
from typing import Any, ClassVar

from .exceptions import MPIError

_numbers = itertools.count(1)


class OpaqueObject:
    """What handles name: a communicator, a group, a datatype and so on.

    Args:
        fields: its attributes, unless a subclass describes them.

    Attributes:
        number: the integer that stands for it, as C code would have a handle; 0 until asked for.
        constant: the handle that is a name in ``mpi4py.MPI``, or None.
        kind: class of its handles, if it is not the one that a caller names.
    """

    number = 0
    constant: Handle | None = None
    kind: type[Handle] | None = None
    name = ""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    @cached_property
    def attributes(self) -> dict[int, Any]:
        """Values by keyval, set by the program."""
        return {}


def name_methods(cls: type) -> type:
    """Give the functions of a class that other functions made the names that they have in it.

    Methods of objects pickle by these names.
    """
    for name, member in vars(cls).items():
        function = getattr(member, "__func__", member)
        if isinstance(function, FunctionType) and name != "_":
            namesake = getattr(cls, function.__name__, None)
            if getattr(namesake, "__func__", namesake) is not function:
                function.__name__, function.__qualname__ = name, f"{cls.__qualname__}.{name}"
    return cls


class Handle:
    """Base of the classes whose objects are handles.

    Attributes:
        null_error: error class of a call on a null handle, such as ``ERR_COMM``; set by each class.
        constants_end: whether ``Free`` clears also a handle of a constant.
    """

    null_error: ClassVar[int] = 0
    constants_end: ClassVar[bool] = False
    # The class that all handles of this kind derive from, its opaque objects and its constants.
    _kind: ClassVar[type[Handle]]
    _known: ClassVar[weakref.WeakValueDictionary[int, OpaqueObject]]
    _null: ClassVar[Handle | None]
    _names: ClassVar[dict[int, str]]
    _inner: Any
    __slots__ = ("__weakref__", "_inner")

    # Handles are equal by what they name, which Free changes.
    __hash__ = None  # type: ignore[assignment]

    def __init_subclass__(cls, kind: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        name_methods(cls)
        if kind:
            cls._kind, cls._null, cls._names = cls, None, {}
            cls._known = weakref.WeakValueDictionary()

    def __new__(cls, other: Any = None, *args: Any, **options: Any) -> Any:
        """Return a handle of what ``other`` names, or a null handle."""
        self = object.__new__(cls)
        if other is not None and not isinstance(other, cls._kind):
            raise TypeError(
                f"{cls.__name__}: expected {cls._kind.__name__}, got {type(other).__name__}"
            )
        self._inner = None if other is None else other._inner
        return self

    @classmethod
    def _of(cls, inner: OpaqueObject | None) -> Any:
        """Return a handle of this class for an opaque object."""
        self = object.__new__(cls)
        self._inner = inner
        return self

    @classmethod
    def _constant(cls, name: str, inner: OpaqueObject | None = None) -> Any:
        """Return a handle that pickles as ``name`` of ``mpi4py.MPI``."""
        self = cls._of(inner)
        cls._names[id(self)] = name
        if inner is None:
            if cls._null is None:
                cls._kind._null = self
        elif inner.constant is None:
            inner.constant = self
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Handle):
            return NotImplemented
        return self._kind is other._kind and self._inner is other._inner

    def __bool__(self) -> bool:
        return self._inner is not None

    def __reduce__(self) -> str | tuple[Any, ...]:
        name = self._names.get(id(self))
        if name is not None:
            return name
        constant = self._null if self._inner is None else self._inner.constant
        if constant is None:
            raise ValueError(f"cannot pickle {type(self).__name__} object: it is no constant")
        return type(self), (constant,)

    @property
    def _live(self) -> Any:
        """The opaque object; raises ``MPI.Exception`` for a null handle."""
        if self._inner is None:
            raise MPIError(self.null_error)
        return self._inner

    @property
    def handle(self) -> int:
        """Integer that stands for what the handle names; 0 for a null handle."""
        inner = self._inner
        if inner is None:
            return 0
        if not inner.number:
            inner.number = next(_numbers)
            self._known[inner.number] = inner
        return int(inner.number)

    @classmethod
    def fromhandle(cls, handle: int) -> Any:
        """Return a handle for an integer that ``handle`` gave, of the class that fits the object.

        Raises:
            ValueError: there is no such object in this process.
        """
        if handle and handle not in cls._known:
            raise ValueError(f"{cls.__name__}.fromhandle: {handle} names no object")
        inner = cls._known[handle] if handle else None
        return ((inner and inner.kind) or cls)._of(inner)

    def toint(self) -> int:
        """Return the handle as an integer."""
        return self.handle

    py2f = toint

    @classmethod
    def fromint(cls, arg: int, /) -> Any:
        """Return a handle for an integer of :meth:`toint`."""
        return cls.fromhandle(arg)

    f2py = fromint

    def _free(self) -> None:
        """Clear the handle."""
        if self._live.constant is not None and not self.constants_end:
            raise MPIError(self.null_error)
        self._inner = None

    def free(self) -> None:
        """Clear the handle, and free what it names unless that is a constant."""
        if id(self) in self._names or self._inner is None:
            return
        if self._inner.constant is None and hasattr(self, "Free"):
            self.Free()
        self._inner = None


def reader(read: Callable[[Any], Any], what: str) -> tuple[Any, Any]:
    """Return a method that reads something of the opaque object, and the property of it."""

    def get(self: Any) -> Any:
        return read(self._live)

    get.__doc__ = f"Return {what}."
    return get, property(get)


class Named(Handle):
    """Handle of an object that the program may give a name."""

    __slots__ = ()

    def Get_name(self) -> str:
        """Return the name."""
        return str(self._inner.name) if self else f"MPI_{self._names[id(self._null)]}"

    def Set_name(self, name: str) -> None:
        """Set the name."""
        self._live.name = name

    name = property(Get_name, Set_name)


class Constant(int):
    """Integer with a name that stands for memory; each subclass has one object."""

    __slots__ = ()
    _name: ClassVar[str]
    _only: ClassVar[Any]

    def __init_subclass__(cls, name: str, value: int) -> None:
        cls._name, cls._only = name, int.__new__(cls, value)

    def __new__(cls) -> Any:
        return cls._only

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> str:
        return self._name

    def __add__(self, other: object) -> Any:
        raise TypeError(f"{self._name} is no number")


class BottomType(Constant, name="BOTTOM", value=0):
    """Type of ``BOTTOM``, the address 0."""


class InPlaceType(Constant, name="IN_PLACE", value=-1):
    """Type of ``IN_PLACE``: the receive buffer has this rank's input."""


class BufferAutomaticType(Constant, name="BUFFER_AUTOMATIC", value=-2):
    """Type of ``BUFFER_AUTOMATIC``: buffered sends take what memory they need."""


BOTTOM, IN_PLACE, BUFFER_AUTOMATIC = BottomType(), InPlaceType(), BufferAutomaticType()
