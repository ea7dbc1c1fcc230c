"""The communicator, through which a program's ranks call each other, and its helper classes."""

from typing import TYPE_CHECKING

from .calls.message import NULL, Status
from .grid import Grid

if TYPE_CHECKING:
    # For type checkers: the same class, with overloads for the calls on arrays.
    from .signatures import Communicator
else:
    from .communicator import Communicator

__all__ = ["NULL", "Communicator", "Grid", "Status"]
