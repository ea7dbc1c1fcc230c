"""Objects that are bound to a process, and say so when they are copied or pickled."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from collective.errors import InvalidArgumentError

__all__ = ["NotCopied"]


class NotCopied:
    """Base of classes whose objects refuse to be copied and pickled.

    Attributes:
        instead: what the caller can do, a sentence; for the error.
    """

    __slots__ = ()
    instead: ClassVar[str]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # The module copy calls this, too.
        raise InvalidArgumentError(
            f"{type(self).__name__}: it is bound to this process, and is neither copied nor "
            f"pickled. {self.instead}"
        )
