"""Sum an array over the ranks: ``collective run -n 4 examples/hello.py``."""

import numpy as np

import collective

with collective.init() as comm:
    x = np.full(3, comm.rank + 1.0)
    total = comm.all_reduce(x)
    print(f"rank {comm.rank} of {comm.size} on {comm.backend}: {x} -> {total}")
