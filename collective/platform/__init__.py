"""Calls that differ between operating systems: Linux's, and what stands in for them elsewhere.

Other modules call these functions and ask no further which system they run on. :mod:`.linux` has
the calls that only Linux offers. :mod:`.portable` has the same names for every other Unix.
"""

from __future__ import annotations

import sys

if sys.platform.startswith("linux"):
    from .linux import held_port
else:
    from .portable import held_port

__all__ = ["held_port"]
