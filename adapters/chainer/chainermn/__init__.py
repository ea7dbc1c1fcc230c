"""ChainerMN programs over the transports of ``collective``, with or without mpi4py.

::

    import collective.adapters.chainer.chainermn

    comm = chainermn.create_communicator("collective")

Importing this module is enough. To run a program without changing it, use
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

from collective import Communicator, CommunicatorClosedError, InvalidArgumentError
from collective.adapters.chainer import program
from collective.inner import session

from .communicator import CollectiveCommunicator, opened
from .gradients import DoubleBufferingOptimizer

__all__ = [
    "NAME",
    "REPLACED",
    "CollectiveCommunicator",
    "DoubleBufferingOptimizer",
    "create_communicator",
    "register",
]

#: Name of this communicator in ChainerMN: ``chainermn.create_communicator(NAME)``.
NAME = "collective"
#: ChainerMN's communicators that this one can replace, including those of versions before 7.
REPLACED = (
    "flat", "hierarchical", "naive", "non_cuda_aware", "pure_nccl", "single_node",
    "two_dimensional",
)  # fmt: skip
#: All names that versions of ChainerMN know.
_OF_CHAINERMN = (*REPLACED, "dummy")

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
        mpi_comm: ranks that take part: a :class:`collective.Communicator`, or an ``MPI.Comm`` of
            mpi4py. By default the ranks of ``collective.init()``, which is called if this program
            has not called it.
        allreduce_grad_dtype: dtype in which gradients are reduced; by default their own.
        batched_copy: accepted for compatibility; has no effect.
        pickle: whether objects may need pickle to be sent; see :class:`CollectiveCommunicator`.

    Raises:
        BackendUnavailableError: MPI does not connect all processes that the launcher started.
    """
    mpi = mpi_comm
    if isinstance(mpi_comm, Communicator):
        comm, mpi = mpi_comm, None
    elif mpi_comm is not None:
        comm = session.init(comm=mpi_comm)
    else:
        comm = _joined()
    communicator = CollectiveCommunicator(
        comm, allreduce_grad_dtype=allreduce_grad_dtype, pickle=pickle, mpi_comm=mpi,
        own=comm is not mpi_comm,
    )  # fmt: skip
    communicator.set_config("batched_copy", batched_copy)
    return communicator


def _joined() -> Communicator:
    """Return a communicator of all ranks that nothing else uses."""
    try:
        current = session.current()
    except CommunicatorClosedError:
        return session.init()
    return current.dup()


@functools.wraps(_create_communicator)
def _create_named(communicator_name: str = "pure_nccl", mpi_comm: Any = None, **kwargs: Any) -> Any:
    if communicator_name != NAME and not _stands_for(communicator_name, mpi_comm):
        if mpi_comm is None and communicator_name not in _OF_CHAINERMN and not _has_mpi4py():
            # ChainerMN would ask for mpi4py before it looks at the name.
            raise InvalidArgumentError(
                f"create_communicator: unknown communicator {communicator_name!r} (expected one of "
                f"{', '.join((NAME, *REPLACED))}). Correct the name."
            )
        communicator = _create_communicator(communicator_name, mpi_comm, **kwargs)
        # The call above has imported mpi4py. This package must not import mpi4py itself.
        from collective.start.mpi_world import launched_with

        launched_with(communicator.mpi_comm)
        return communicator
    unknown = sorted(set(kwargs) - {"allreduce_grad_dtype", "batched_copy", "pickle"})
    if unknown:
        raise InvalidArgumentError(
            f"create_communicator: unknown options {', '.join(unknown)} (expected "
            "allreduce_grad_dtype, batched_copy or pickle). Leave them out."
        )
    return create_communicator(mpi_comm, **kwargs)


def _stands_for(name: str, mpi_comm: Any) -> bool:
    """Return whether this package's communicator replaces the one that ChainerMN has by a name."""
    if name not in REPLACED or _replace is False:
        return False
    return _replace is True or (mpi_comm is None and not _has_mpi4py())


def _has_mpi4py() -> bool:
    return importlib.util.find_spec("mpi4py") is not None


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
    """Report an exception to the peers; replaces ChainerMN's hook, which calls ``MPI_Abort``."""
    here = [communicator for communicator in opened if not communicator.comm.closed]
    if not here:
        _global_except_hook(kind, error, trace)
        return
    before = global_except_hook._orig_except_hook or sys.__excepthook__
    try:
        before(kind, error, trace)
    finally:
        ranks = ", ".join(f"{own.rank} of {own.size}" for own in here)
        print(
            f"ChainerMN: uncaught exception on rank {ranks}; notifying the other ranks",
            file=sys.stderr,
        )
        for own in here:
            own.comm.inner.fail(error)


def register(replace: bool | None = None) -> None:
    """Make ``chainermn.create_communicator("collective")`` work, with the functions that it needs.

    Importing this module does so. Names that a program has imported from ``chainermn`` before keep
    their old values.

    Args:
        replace: whether ChainerMN's own names (``"naive"``, …) mean this communicator, too. By
            default they do if there is no mpi4py, without which ChainerMN's cannot be made.
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


# An unchanged program uses the names of ChainerMN's communicators.
register(replace=program.running() or None)
