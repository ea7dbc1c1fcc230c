"""Tools to test with several ranks: ranks in plain tests, injected faults, the conformance suite.

Nothing here needs a launcher, a port, a GPU or pytest (which only
:func:`parametrize_with_checks` imports)::

    from collective.testing import run_ranks

    def test_sum():
        assert run_ranks(4, lambda comm: comm.all_reduce(np.array([1]))[0]) == [4, 4, 4, 4]

``python -m collective.testing shm`` runs the conformance suite on a transport.
"""

from __future__ import annotations

from collective.inner import Mpiexec, RankDiedError, RankHungError, RanksFailedError
from collective.launch.outcome import RemoteError
from collective.launch.process_starter import preload

from . import faults
from .checks import Check, RankFactory, check
from .conformance import Result, all_checks, parametrize_with_checks, run_checks
from .faults import FaultyBackend
from .kinds import NAMES as KINDS
from .kinds import Kind
from .ranks import RankPool, run_ranks

__all__ = [
    "KINDS",
    "Check",
    "FaultyBackend",
    "Kind",
    "Mpiexec",
    "RankDiedError",
    "RankFactory",
    "RankHungError",
    "RankPool",
    "RanksFailedError",
    "RemoteError",
    "Result",
    "all_checks",
    "check",
    "faults",
    "parametrize_with_checks",
    "preload",
    "run_checks",
    "run_ranks",
]
