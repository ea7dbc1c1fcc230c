"""Futures whose functions run on other ranks.

``collective run --mpi4py -m mpi4py.futures program.py`` runs the program on rank 0, and the other
ranks work for its executors. ``MPICommExecutor`` does the same for a block of a program that all
ranks run. An executor of any other program has processes of its own, on this host.
"""

from __future__ import annotations

from .pool import *  # noqa: F403
from .pool import __all__ as __all__
