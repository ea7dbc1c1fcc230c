"""``nccl`` on real GPUs, with several ranks on a GPU if there are too few; for tests/gpu.

``GPU_TESTS_NCCL_LIBRARY`` and ``GPU_TESTS_CUDA_LIBRARY`` name libraries to use instead of the
installed ones, such as those of the ABI fake (../system/test_gpu_suite.py).
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

# Settings with which NCCL accepts several ranks on one GPU. Kernels of all ranks have to fit on the
# GPU at once, or they wait for each other without end: hence few CTAs.
# For any version: NCCL takes each rank for a separate host, so it uses sockets.
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
# Since version 2.30 NCCL has an option for several ranks on a GPU.
_BY_OPTION = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}


def sizes() -> tuple[int, ...]:
    """Return the numbers of ranks for the tests: ``$GPU_TESTS_RANKS``, 2 by default."""
    return tuple(map(int, os.environ.get("GPU_TESTS_RANKS", "2").split()))


def why_not() -> str:
    """Return why the tests cannot run here, or an empty string."""
    if "GPU_TESTS_RANKS" not in os.environ:
        return "make test-gpu runs them"
    return "" if cuda.device_count() else "needs a GPU"


class OnGpus(NcclBackend):
    """``nccl`` with one GPU for each rank, or several ranks on a GPU if there are too few."""

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
    """``nccl`` that shares GPUs by host ids, under a separate name."""

    name = "nccl-hostid"


class SharingByOption(OnGpus):
    """``nccl`` that shares GPUs by NCCL's own option."""

    name = "nccl-multirank"
    sharing = "option"
