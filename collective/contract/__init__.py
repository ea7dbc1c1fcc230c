"""Contract between the communicator and a transport; see ``docs/writing-a-backend.md``."""

from .backend import ANY_SOURCE, Backend
from .capabilities import Capabilities
from .failure import Failure
from .store import Store
from .work import Work
from .world import World

__all__ = ["ANY_SOURCE", "Backend", "Capabilities", "Failure", "Store", "Work", "World"]
