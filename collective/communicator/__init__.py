"""The object that a user holds: ranks that can call each other."""

from typing import TYPE_CHECKING

from .grid import Grid
from .prepared import PreparedCall
from .status import NULL, Status

if TYPE_CHECKING:
    # The same class, with overloads for the calls on arrays.
    from .signatures import Communicator
else:
    from .communicator import Communicator

__all__ = ["NULL", "Communicator", "Grid", "PreparedCall", "Status"]
