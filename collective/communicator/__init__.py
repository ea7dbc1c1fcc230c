"""The object that a user holds: ranks that can call each other."""

from .communicator import Communicator
from .grid import Grid
from .point_to_point import NULL, Status

__all__ = ["NULL", "Communicator", "Grid", "Status"]
