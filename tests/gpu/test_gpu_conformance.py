"""The public conformance suite on ``nccl`` with arrays in GPU memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from collective import cuda
from collective.backends.nccl.library import load
from collective.errors import BackendUnavailableError
from collective.testing import parametrize_with_checks
from tests.support.real_gpu import SharingByHostId, SharingByOption, sizes, why_not

if why_not():
    pytest.skip(why_not(), allow_module_level=True)
try:
    VERSION = load().version
except BackendUnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)

# When ranks share a GPU, NCCL connects over sockets, and an operation takes tens of milliseconds.
HUNG_S = 120.0
# The first version of NCCL that itself allows several ranks on a GPU.
MULTI_RANK = 23000


@parametrize_with_checks(SharingByHostId, sizes=sizes(), kind="cuda", timeout=HUNG_S)
def test_nccl_conforms_on_gpus(check: Callable[[], None]) -> None:
    check()


@pytest.mark.skipif(VERSION < MULTI_RANK, reason="needs NCCL 2.30")
@pytest.mark.skipif(cuda.device_count() >= max(sizes()), reason="no rank has to share a GPU")
@parametrize_with_checks(SharingByOption, sizes=sizes(), kind="cuda", timeout=HUNG_S)
def test_nccl_conforms_with_builtin_gpu_sharing(check: Callable[[], None]) -> None:
    check()
