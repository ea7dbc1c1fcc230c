"""Contract between the communicator and a transport; see ``docs/writing-a-backend.md``."""

from collective.control.store import Store

from .backend import ANY_SOURCE, Backend, Capabilities
from .failure import Failure
from .work import Work
from .world import World

__all__ = ["ANY_SOURCE", "Backend", "Capabilities", "Failure", "Store", "Work", "World"]
