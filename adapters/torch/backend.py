"""Backend of torch.distributed over a communicator, which torch takes from 2.14 on.

torch's own process group calls it by the dispatcher. So hooks, the flight recorder, groups of
several backends, ``split_group`` and ``shrink_group`` are torch's own.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from collective import Communicator, InvalidArgumentError, PeerLostError

from .futures import reach_held_works
from .process_group import GroupCalls
from .untraced import untraced

_c10d: Any = importlib.import_module("torch._C._distributed_c10d")
# Methods of the C++ class that a class in Python overrides since torch 2.14. A torch that lacks one
# has another interface than this module knows.
_METHODS = """
    all_gather_single all_gather_single_coalesced all_to_all_single allgather allgather_coalesced
    allreduce allreduce_coalesced allreduce_sparse alltoall barrier broadcast gather merge
    monitored_barrier recv recv_anysource reduce reduce_scatter reduce_scatter_single
    reduce_scatter_single_coalesced scatter send set_timeout shrink shutdown split
""".split()


@functools.cache
def way() -> str:
    """Return which class makes groups in this torch: ``"Backend"`` or ``"ProcessGroup"``."""
    try:
        type("Probe", (_c10d.Backend,), {})(0, 1)
    except TypeError:  # before torch 2.14: "No constructor defined!"
        return "ProcessGroup"
    known = all(hasattr(_c10d.Backend, name) for name in _METHODS)
    return "Backend" if known else "ProcessGroup"


@untraced
class Backend(GroupCalls, _c10d.Backend):  # type: ignore[misc]
    """Backend of torch.distributed whose ranks are those of a communicator.

    Args:
        comm: communicator, which the backend closes when its group is destroyed.
    """

    supports_splitting = True
    supports_shrinking = True
    supports_reconfigure = False
    supports_window = False

    def __init__(self, comm: Communicator) -> None:
        _c10d.Backend.__init__(self, comm.rank, comm.size)
        super().__init__(comm)
        reach_held_works()
        _give_groups_comm()

    allreduce_sparse = GroupCalls.allreduce
    merge = GroupCalls.refuse_merge

    @property
    def options(self) -> Any:
        """Options that torch hands to :meth:`split`."""
        return _c10d.Backend.Options("collective", timedelta(seconds=self.comm.timeout))

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> Backend:
        """Return a backend of some of the ranks; only these ranks may call this.

        Raises:
            InvalidArgumentError: this rank is not among ``ranks``. torch would crash on None.
        """
        comm = self.comm
        if comm.rank not in ranks:
            raise InvalidArgumentError(
                f"split_group: got ranks {list(ranks)} on rank {comm.rank} (expected this rank "
                f"among them) [rank {comm.rank} of {comm.size}]. Call it on these ranks only."
            )
        backend = Backend(comm.group(sorted(ranks)))
        backend.set_timeout(opts._timeout)
        return backend

    def shrink(self, exclude: Sequence[int], flags: int = 0, opts: Any = None) -> Backend:
        """Return a backend of the surviving ranks; ``dist.shrink_group`` calls this on them.

        Raises:
            PeerLostError: more ranks are lost than ``exclude`` names; torch has numbered the others
                by that list.
        """
        before, comm = self.comm, self.comm.shrink(exclude=list(exclude))
        if comm.size != before.size - len(exclude):
            left = "1 rank is" if comm.size == 1 else f"{comm.size} ranks are"
            comm.close()
            raise PeerLostError(
                f"shrink_group: {left} left without ranks {sorted(exclude)} (expected "
                f"{before.size - len(exclude)}): others are lost, too [rank {before.rank} of "
                f"{before.size}]. Make a new group with dist.init_process_group()."
            )
        return Backend(comm)


@functools.cache
def _give_groups_comm() -> None:
    """Give torch's class of groups the property ``comm``, as the other way's groups have it."""

    def comm(group: Any) -> Communicator:
        for device in group._device_types:
            backend = group._get_backend(device)
            # With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch puts a backend of its own around this one.
            backend = getattr(backend, "wrapped_pg", backend)
            if isinstance(backend, Backend):
                return backend.comm
        raise AttributeError("comm: this process group has no backend 'collective'.")

    dist.ProcessGroup.comm = property(comm)  # type: ignore[attr-defined]
