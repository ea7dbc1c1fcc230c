"""Imports that process ranks of the tests share; add a module here if most ranks need it.

The fork server imports this module, and nothing else runs in its process. OpenMP starts threads at
the first computation, so a fork loses no threads.
"""

from __future__ import annotations

import gc
import importlib.util
import os

# Ranks share two cores with other tests, and a waiting OpenMP thread spins. OpenMP reads the
# variable when it is loaded; each rank gets the variables of its test later.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest  # noqa: F401

import collective.testing

if importlib.util.find_spec("torch") is not None:
    # The first optimizer imports this module, which takes as long as the rest of PyTorch.
    import torch._dynamo  # noqa: F401

    import collective.adapters.torch
    import collective.backends.gloo  # noqa: F401

# No rank scans these objects again in its garbage collections.
gc.collect()
gc.freeze()
