"""The public suite on ``nccl`` with arrays in the memory of GPUs."""

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

# NCCL connects over sockets when ranks share a GPU: tens of milliseconds an operation.
HUNG_S = 120.0
# From this version on NCCL itself allows several ranks on a GPU.
MULTI_RANK = 23000


@parametrize_with_checks(SharingByHostId, sizes=sizes(), kind="cuda", timeout=HUNG_S)
def test_conformance(check: Callable[[], None]) -> None:
    check()


@pytest.mark.skipif(VERSION < MULTI_RANK, reason="needs NCCL 2.30")
@pytest.mark.skipif(cuda.device_count() >= max(sizes()), reason="no rank has to share a GPU")
@parametrize_with_checks(SharingByOption, sizes=sizes(), kind="cuda", timeout=HUNG_S)
def test_conformance_with_nccls_own_sharing(check: Callable[[], None]) -> None:
    check()
