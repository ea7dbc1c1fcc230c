"""ChainerMN's programs over our transports, with or without mpi4py.

::

    import collective.adapters.chainer.chainermn

    comm = chainermn.create_communicator("collective")

Importing this is all there is to do. A program that is not to be touched runs with
``python -m collective.adapters.chainer SCRIPT``.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import TracebackType
from typing import Any

import chainermn
from chainermn import communicators, global_except_hook, optimizers

from collective.adapters.chainer import program
from collective.communicator import Communicator
from collective.errors import CommunicatorClosedError, InvalidArgumentError
from collective.start import session

from .communicator import CollectiveCommunicator, opened
from .optimizer import DoubleBufferingOptimizer

__all__ = [
    "NAME",
    "REPLACED",
    "CollectiveCommunicator",
    "DoubleBufferingOptimizer",
    "create_communicator",
    "register",
]

#: What ChainerMN knows it by: ``chainermn.create_communicator(NAME)``.
NAME = "collective"
#: ChainerMN's communicators, those of versions before 7 too, for which ours can stand.
REPLACED = (
    "flat", "hierarchical", "naive", "non_cuda_aware", "pure_nccl", "single_node",
    "two_dimensional",
)  # fmt: skip

_create_communicator = communicators.create_communicator
_create_multi_node_optimizer = optimizers.create_multi_node_optimizer
_global_except_hook = global_except_hook._global_except_hook
_replace: bool | None = None


def create_communicator(
    mpi_comm: Any = None,
    *,
    allreduce_grad_dtype: Any = None,
    batched_copy: bool = True,
    pickle: bool = True,
) -> CollectiveCommunicator:
    """Make a communicator for ChainerMN.

    Collective: every rank calls it.

    Args:
        mpi_comm: whose ranks they are: a :class:`collective.Communicator`, or an ``MPI.Comm`` of
            mpi4py. By default those of ``collective.init()``, which is called if this program
            has not done so.
        allreduce_grad_dtype: the type in which gradients are reduced; by default their own.
        batched_copy: of no meaning here.
        pickle: whether objects may be what only pickle can carry; see
            :class:`CollectiveCommunicator`.

    Raises:
        BackendUnavailableError: MPI does not connect all processes that the launcher started.
    """
    given = mpi_comm
    if isinstance(mpi_comm, Communicator):
        comm, given = mpi_comm, None
    elif mpi_comm is not None:
        comm = session.init(comm=mpi_comm)
    else:
        comm = _joined()
    made = CollectiveCommunicator(
        comm, allreduce_grad_dtype=allreduce_grad_dtype, pickle=pickle, mpi_comm=given,
        own=comm is not mpi_comm,
    )  # fmt: skip
    made.set_config("batched_copy", batched_copy)
    return made


def _joined() -> Communicator:
    """Return a communicator of all ranks that is nobody else's."""
    try:
        current = session.current()
    except CommunicatorClosedError:
        return session.init()
    return current.dup()


@functools.wraps(_create_communicator)
def _create_named(communicator_name: str = "pure_nccl", mpi_comm: Any = None, **kwargs: Any) -> Any:
    if communicator_name != NAME and not _stands_for(communicator_name, mpi_comm):
        made = _create_communicator(communicator_name, mpi_comm, **kwargs)
        # After it has imported mpi4py, which is none of ours to import.
        from collective.start.mpi_world import launched_with

        launched_with(made.mpi_comm)
        return made
    unknown = sorted(set(kwargs) - {"allreduce_grad_dtype", "batched_copy", "pickle"})
    if unknown:
        raise InvalidArgumentError(
            f"create_communicator: unknown options {', '.join(unknown)}; allreduce_grad_dtype, "
            "batched_copy, pickle."
        )
    return create_communicator(mpi_comm, **kwargs)


def _stands_for(name: str, mpi_comm: Any) -> bool:
    """Whether ours takes the place of a communicator of ChainerMN's."""
    if name not in REPLACED or _replace is False:
        return False
    return _replace is True or (mpi_comm is None and importlib.util.find_spec("mpi4py") is None)


@functools.wraps(_create_multi_node_optimizer)
def _create_optimizer(
    actual_optimizer: Any, communicator: Any, double_buffering: bool = False, zero_fill: bool = True
) -> Any:
    if double_buffering and isinstance(communicator, CollectiveCommunicator):
        return DoubleBufferingOptimizer(actual_optimizer, communicator, zero_fill)
    return _create_multi_node_optimizer(actual_optimizer, communicator, double_buffering, zero_fill)


def _tell_and_leave(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Stand for ChainerMN's exception hook, which ends a job by ``MPI_Abort``."""
    here = [each for each in opened if not each.comm.closed]
    if not here:
        _global_except_hook(kind, error, trace)
        return
    before = global_except_hook._orig_except_hook or sys.__excepthook__
    try:
        before(kind, error, trace)
    finally:
        ranks = ", ".join(f"{each.rank} of {each.size}" for each in here)
        print(f"ChainerMN: uncaught exception on rank {ranks}; telling the others", file=sys.stderr)
        for each in here:
            each.comm.fail(error)


def register(replace: bool | None = None) -> None:
    """Make ``chainermn.create_communicator("collective")`` and what it needs work.

    Importing this module does so. Names that a program has taken out of ``chainermn`` before
    stay what they were.

    Args:
        replace: whether ChainerMN's own names (``"naive"``, …) mean ours, too. By default where
            they could not be had, as there is no mpi4py.
    """
    global _replace
    _replace = replace
    for module in (chainermn, communicators):
        module.create_communicator = _create_named
    for module in (chainermn, optimizers):
        module.create_multi_node_optimizer = _create_optimizer
    global_except_hook._global_except_hook = _tell_and_leave
    if sys.excepthook is _global_except_hook:
        sys.excepthook = _tell_and_leave


# A program that is run as it is names communicators of ChainerMN's.
register(replace=program.running() or None)
