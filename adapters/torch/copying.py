"""Copies of a wrapper, which connect to the other ranks when they train."""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import nn

from collective.errors import CommunicatorClosedError
from collective.start.session import current

if TYPE_CHECKING:
    from collective.communicator import Communicator

__all__ = ["Copyable"]


class Copyable(nn.Module):
    """Base of a wrapper whose copies and pickles omit the objects that belong to a communicator.

    Connecting is collective, but often a single rank makes a copy, for a checkpoint or for averaged
    weights. So a copy connects in the first forward pass that all ranks make.

    Attributes:
        module: wrapped module.
        comm: communicator that connects the ranks; None in a loaded wrapper that has not trained.
    """

    #: Names of the attributes that :meth:`_connect` creates.
    _of_connection: ClassVar[frozenset[str]]
    module: nn.Module
    comm: Communicator
    _connected: bool
    _sync: bool  # whether gradients of the next forward pass are reduced

    @abstractmethod
    def _connect(self) -> None:
        """Create the objects that reduce the gradients, over ``self.comm``. Collective."""

    def _find_ranks(self) -> bool:
        """Connect a copy that is about to train.

        Returns:
            False if the copy is not connected: there is no communicator, or no parameter requires a
            gradient.
        """
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            return False
        if self.comm is None:
            try:
                self.comm = current()
            except CommunicatorClosedError:
                return False
        self._connect()
        return True

    def __copy__(self) -> Self:
        """Return a wrapper of the same module that shares all other attributes, too."""
        twin = self.__class__.__new__(self.__class__)
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin.comm = self.comm
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that are copied and pickled."""
        left_out = {"comm", *self._of_connection}
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        untyped: Any = super()
        untyped.__setstate__(state)
        self.comm = None  # type: ignore[assignment]  # the wrapper connects before any use
        self._connected = False
        self._sync = True
