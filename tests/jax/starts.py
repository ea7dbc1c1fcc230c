"""A program that makes a sum and ends, in one of several ways."""

from __future__ import annotations

import os
import sys

import jax
from jax.experimental import multihost_utils
from jax.extend import backend

if "explicit" in sys.argv:
    address, size, rank = sys.argv[2:5]
    jax.distributed.initialize(address, int(size), int(rank))
elif "torch" in sys.argv:  # with the variables of programs for torch.distributed
    address, size, rank = (os.environ[name] for name in ("MASTER_PORT", "WORLD_SIZE", "RANK"))
    jax.distributed.initialize(f"127.0.0.1:{address}", int(size), int(rank))
elif "address" in sys.argv:  # the numbers are the launcher's
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}")
else:
    jax.distributed.initialize()
total = multihost_utils.process_allgather(jax.numpy.ones(3)).sum()
if "again" in sys.argv or "exchanged" in sys.argv:  # with another backend and another coordinator
    # At a port of its own: a fast process would connect to the first coordinator while it stops.
    address, (size, rank) = sys.argv[2], (int(os.environ[n]) for n in ("WORLD_SIZE", "RANK"))
    jax.distributed.shutdown()
    backend.clear_backends()
    if "exchanged" in sys.argv:
        rank = size - 1 - rank
    jax.distributed.initialize(f"127.0.0.1:{address}", size, rank)
    ones = jax.numpy.ones(3)
    try:
        total = multihost_utils.process_allgather(ones).sum()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit()
if "shutdown" in sys.argv:
    jax.distributed.shutdown()
print(f"{__name__} {sys.argv[1:2]} {float(total)}", flush=True)
