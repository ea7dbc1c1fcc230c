"""The object that a user holds: ranks that can call each other."""

from .communicator import Communicator
from .point_to_point import Status

__all__ = ["Communicator", "Status"]
