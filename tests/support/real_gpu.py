"""``nccl`` on real GPUs, several ranks on one where there are too few.

``GPU_TESTS_NCCL_LIBRARY`` and ``GPU_TESTS_CUDA_LIBRARY`` name other libraries than those that are
found: the ABI fake's, say (../test_gpu_suite.py).
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import ClassVar

from collective import cuda
from collective.backends.nccl import NcclBackend
from collective.contract.world import World
from collective.deadline import Deadline

__all__ = ["OnGpus", "SharingByHostId", "SharingByOption", "sizes", "why_not"]

for _name in ("NCCL_LIBRARY", "CUDA_LIBRARY"):
    if os.environ.get(f"GPU_TESTS_{_name}"):
        os.environ[f"COLLECTIVE_{_name}"] = os.environ[f"GPU_TESTS_{_name}"]

# How NCCL is told to put up with several ranks on one GPU. Kernels of all ranks have to fit on it
# at once, or they wait for ever: hence few CTAs.
# Any version: each rank is on a host of its own, it is made to believe, so it goes over sockets.
_BY_HOSTID = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}
# From 2.30 on it can by itself.
_BY_OPTION = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}


def sizes() -> tuple[int, ...]:
    """Return how many ranks the tests are to have: ``$GPU_TESTS_RANKS``, 2 by default."""
    return tuple(map(int, os.environ.get("GPU_TESTS_RANKS", "2").split()))


def why_not() -> str:
    """Return why the tests cannot run here, empty if they can."""
    if "GPU_TESTS_RANKS" not in os.environ:
        return "make test-gpu runs them"
    return "" if cuda.device_count() else "needs a GPU"


class OnGpus(NcclBackend):
    """The transport, a GPU a rank where there are enough, else several ranks on one."""

    name = "nccl-gpu"
    sharing: ClassVar[str] = "hostid"

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> OnGpus:
        count = cuda.device_count()
        if world.size > count and cls.sharing == "hostid":
            os.environ.update(_BY_HOSTID, NCCL_HOSTID=f"h{world.rank}")
        elif world.size > count:
            os.environ.update(_BY_OPTION)
        options = {**world.options, "device": str(world.local_rank % count)}
        return super().connect(replace(world, options=options), deadline)


class SharingByHostId(OnGpus):
    """The same, by a name."""

    name = "nccl-hostid"


class SharingByOption(OnGpus):
    """The same, and NCCL allows several ranks on a GPU by itself."""

    name = "nccl-multirank"
    sharing = "option"
