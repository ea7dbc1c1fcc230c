"""What ranks of the tests that are processes have imported before they are forked.

The server imports it, in whose process nothing else runs. Threads of OpenMP are started by a
first computation, so none are lost in a fork.
"""

from __future__ import annotations

import gc
import importlib.util
import os

# Ranks share two cores with other tests, and a thread of OpenMP that waits spins. Its library
# reads this when it is loaded; each rank has the variables of the test in the end.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest  # noqa: F401

import collective.testing

if importlib.util.find_spec("torch") is not None:
    # An optimizer imports it when it is made, which takes as long as all else of PyTorch.
    import torch._dynamo  # noqa: F401

    import collective.adapters.torch
    import collective.backends.gloo  # noqa: F401

# No rank looks at all of this again whenever it collects garbage.
gc.collect()
gc.freeze()
