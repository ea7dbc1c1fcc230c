"""The programs of ``collective tour``, as a user would write them.

The programs are texts and not modules of the package, so that the errors that they show name a
place in a user's program.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["READ_ON", "Lesson", "lessons"]

_HELLO = """\
# hello.py
import os

import numpy as np

import collective

with collective.init() as comm:
    print(f"rank {comm.rank} of {comm.size}, process {os.getpid()}")
    x = np.full(3, comm.rank + 1.0)
    print(x, "all add up to", comm.all_reduce(x))
"""

_MISMATCH = """\
# mismatch.py
import numpy as np

import collective

with collective.init() as comm:
    op = "max" if comm.rank == 2 else "sum"  # a mistake
    try:
        comm.all_reduce(np.ones(4), op=op)
    except collective.MismatchError as error:
        print(error)
    print("still usable:", comm.all_reduce(np.ones(2)))
"""

_LOST = """\
# lost.py
import os
import signal
import time

import numpy as np

import collective

comm = collective.init()
for step in range(5):
    if step == 3 and comm.origin[comm.rank] == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # out of memory, say
    began = time.monotonic()
    try:
        total = comm.all_reduce(np.ones(2))
    except collective.PeerLostError as error:
        ms = 1000 * (time.monotonic() - began)
        print(f"{error}\\nknown after {ms:.1f} ms")
        comm = comm.shrink()
        print(f"goes on as rank {comm.rank} of {comm.size}")
        total = comm.all_reduce(np.ones(2))
    print(f"step {step}: {total}")
comm.close()
"""

_PARITY = """\
# parity.py
import hashlib
import importlib.util

import numpy as np

import collective

with collective.init() as comm:
    numbers = np.random.default_rng(comm.rank).standard_normal(1000)
    arrays = {"NumPy": numbers}
    if importlib.util.find_spec("torch"):
        import torch

        arrays["PyTorch"] = torch.from_numpy(numbers)
    for name, x in arrays.items():
        total = comm.all_reduce(x, order="rank")
        bits = hashlib.sha256(np.asarray(total).tobytes()).hexdigest()[:16]
        if comm.rank == 0:
            print(f"{comm.backend}, {name}: {bits}")
"""

READ_ON = """\
Read on (docs/ in the repository, and the site that `make docs` builds):
  docs/tutorials/numpy.md         the first program, with NumPy
  docs/tutorials/pytorch.md       training with PyTorch
  docs/calls.md                   all calls
  docs/how-to/handle-failures.md  errors, and how to continue after a loss
  docs/parity.md                  the same numbers everywhere
`collective doctor` shows what works on this machine; `collective bench` measures its speed.
"""


@dataclass(frozen=True)
class Lesson:
    """Lesson of the tour.

    Attributes:
        title, text: title and introduction, shown before the program.
        file, program: name and text of the program.
        runs: options of ``collective run``, for each run of the program.
        conclude: function of the runs' output that returns the conclusion; raises ValueError if
            the program did not behave as described.
    """

    title: str
    text: str
    file: str
    program: str
    runs: Sequence[Sequence[str]]
    conclude: Callable[[str], str]


def lessons() -> list[Lesson]:
    """Return the lessons, for transports that work here."""
    second = "gloo" if importlib.util.find_spec("torch") else "threads"
    return [
        Lesson(
            "Ranks",
            "A program is started several times, and each process is a rank. All ranks make\n"
            "the same calls, and each rank gets the result.",
            "hello.py",
            _HELLO,
            [["-n", "3"]],
            _conclude_hello,
        ),
        Lesson(
            "A mistake",
            "Rank 2 calls with another operation than the other ranks. No rank hangs or gets\n"
            "a wrong number: each gets an error that shows which rank made which call, where.",
            "mismatch.py",
            _MISMATCH,
            [["-n", "3"]],
            _conclude_mismatch,
        ),
        Lesson(
            "A lost rank",
            "Rank 1 is killed in the middle of the work. The other ranks get an error in\n"
            "their call, and go on as two ranks.",
            "lost.py",
            _LOST,
            [["-n", "3", "--min-ranks", "2"]],
            _conclude_lost,
        ),
        Lesson(
            "The same bits",
            f"The same sum over two transports, shm and {second}, of arrays of every framework\n"
            "that is installed. The program prints a digest of all bits of the result.",
            "parity.py",
            _PARITY,
            [["-n", "3", "--backend", "shm"], ["-n", "3", "--backend", second]],
            _conclude_parity,
        ),
    ]


def _conclude_hello(printed: str) -> str:
    processes = set(re.findall(r"process (\d+)", printed))
    if len(processes) != 3 or printed.count("all add up to [6. 6. 6.]") != 3:
        raise ValueError("expected the sum 1 + 2 + 3 from three processes")
    return "Three processes, and each has the sum. The number in front of a line is its rank."


def _conclude_mismatch(printed: str) -> str:
    reports = printed.count("all_reduce: the ranks made different calls")
    if reports != 3 or printed.count("still usable: [3. 3.]") != 3:
        raise ValueError("expected the error on three ranks, and a call that works afterwards")
    return "Each rank got the error, and the communicator can still be used."


def _conclude_lost(printed: str) -> str:
    times = [float(text) for text in re.findall(r"known after ([0-9.]+) ms", printed)]
    if len(times) != 2 or printed.count("step 4: [2. 2.]") != 2:
        raise ValueError("expected an error for the loss on two ranks, which finish the work")
    return f"The survivors knew after {max(times):.1f} ms, and finished the work as two ranks."


def _conclude_parity(printed: str) -> str:
    found = re.findall(r"(\w+), (\w+): ([0-9a-f]{16})$", printed, re.MULTILINE)
    transports, frameworks, digests = (sorted({line[n] for line in found}) for n in range(3))
    if len(found) != len(transports) * len(frameworks) or len(transports) != 2:
        raise ValueError("expected a line for each framework on each transport")
    if len(digests) != 1:
        raise ValueError("expected the same bits in all results")
    return f"{' and '.join(frameworks)} over {' and '.join(transports)}: the same bits."
