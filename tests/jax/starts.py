"""A program that makes one sum and ends, in one of several ways."""

from __future__ import annotations

import os
import sys

import jax
from jax.experimental import multihost_utils

if "explicit" in sys.argv:
    address, size, rank = sys.argv[2:5]
    jax.distributed.initialize(address, int(size), int(rank))
elif "torch" in sys.argv:  # with the variables of programs for torch.distributed
    address, size, rank = (os.environ[name] for name in ("MASTER_PORT", "WORLD_SIZE", "RANK"))
    jax.distributed.initialize(f"127.0.0.1:{address}", int(size), int(rank))
else:
    jax.distributed.initialize()
total = multihost_utils.process_allgather(jax.numpy.ones(3)).sum()
if "shutdown" in sys.argv:
    jax.distributed.shutdown()
print(f"{__name__} {sys.argv[1:2]} {float(total)}", flush=True)
