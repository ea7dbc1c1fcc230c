"""NCCL and what it needs, as far as one process can tell."""

from __future__ import annotations

import time
from typing import Any

from collective import cuda
from collective.backends.nccl import library
from collective.errors import BackendUnavailableError, CollectiveTimeoutError

__all__ = ["facts", "try_alone"]

_START_S = 6.0  # for what takes a fraction of a second


def facts() -> dict[str, Any]:
    """Return which NCCL is here.

    Returns:
        ``path`` and ``version`` of the library; ``features``, whether this version has each;
        ``error``, why there is none, and ``install``, the command that brings one.
    """
    found = {"path": "", "version": "", "features": {}, "error": ""}
    try:
        loaded = library.load()
    except BackendUnavailableError as error:
        return {**found, "error": str(error), "install": library.install_command()}
    return {
        "path": loaded.path,
        "version": loaded.text,
        "features": loaded.features(),
        "error": "",
        "install": "",
    }


def try_alone() -> None:
    """Make NCCL's communicator of this process alone, on its first GPU, and end it.

    Raises:
        CollectiveError: there is no library, no driver or no GPU, or NCCL fails.
    """
    # Here and not above: it brings the reductions along.
    from collective.backends.nccl.engine import NcclComm

    found = library.load()
    cuda.driver()
    device = cuda.device(0)
    end = time.monotonic() + _START_S

    def poll() -> None:
        if time.monotonic() > end:
            raise CollectiveTimeoutError(
                f"nccl: timed out: NCCL {found.text} does not start within {_START_S:g} s. "
                "NCCL_DEBUG=INFO has it say on standard error what it waits for."
            )

    NcclComm.create(found, found.unique_id(), 0, 1, device, poll).destroy(poll)
