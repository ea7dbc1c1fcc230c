"""``collective --version``: what is installed here, in a line or three."""

from __future__ import annotations

import platform

import numpy as np

import collective
from collective import native
from collective.contract import registry
from collective.errors import BackendUnavailableError
from collective.start.choice import gpus

__all__ = ["text"]


def text(verbose: bool = False) -> str:
    """Return the version; if ``verbose``, the transports and the native core, too.

    Nothing is imported or tried to find that out; ``collective doctor`` does.
    """
    version = f"collective {collective.__version__}"
    if not verbose:
        return version
    here, missing = [], []
    for name in registry.names():
        try:
            registry.require(name)
            here.append(name)
        except BackendUnavailableError:
            missing.append(name)
    if "nccl" in here and not gpus():
        here.remove("nccl")
        missing.append("nccl (no GPU)")
    transports = f"transports: {', '.join(here)}"
    if missing:
        transports += f"; not here: {', '.join(missing)}"
    about = f"Python {platform.python_version()}, NumPy {np.__version__}"
    return f"{version}, {about}\n{transports}\nnative core: {native.status()}"
