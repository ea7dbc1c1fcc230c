"""Base class of objects that are bound to a process and cannot be copied or pickled."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from collective.errors import InvalidArgumentError

__all__ = ["NotCopied"]


class NotCopied:
    """Base of classes whose objects refuse to be copied and pickled.

    Attributes:
        instead: sentence for the error text, about what the caller can do instead.
    """

    __slots__ = ()
    instead: ClassVar[str]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # The functions of the module copy call this method, too.
        raise InvalidArgumentError(
            f"{type(self).__name__}: the object is bound to this process and can be neither copied "
            f"nor pickled. {self.instead}"
        )
