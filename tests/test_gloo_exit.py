"""A program over gloo ends when it is over, whatever its process groups are still doing."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from tests import warm
from tests.interpreter import run_together

pytest.importorskip("torch", reason="the gloo transport stands on PyTorch")

# Long enough for two imports of PyTorch on a busy machine; a hang is some minutes.
ENDS_S = 45

PROGRAM = """
import os, sys, threading, time
import numpy as np
import collective

rank, directory = int(sys.argv[1]), sys.argv[2]
comm = collective.init("gloo", rank=rank, size=2, store=directory, timeout=200.0)
large = np.ones(16 << 20, np.float32)

def tell(word):
    open(f"{directory}.{word}", "x").close()

def until(word):
    while not os.path.exists(f"{directory}.{word}"):
        time.sleep(0.01)

comm.barrier()
"""

ENDINGS = {
    # What rank 0 does, what rank 1 does, and with which code rank 0 ends.
    "a peer dies in a long call": (
        """
        while True:
            comm.all_reduce(large, out=large, op="max")
        """,
        """
        threading.Timer(0.5, os._exit, (3,)).start()
        while True:
            comm.all_reduce(large, out=large, op="max")
        """,
        1,
    ),
    "a peer dies in a long call of Gloo's": (
        """
        while True:
            comm.all_reduce(large, out=large)
        """,
        """
        threading.Timer(0.5, os._exit, (3,)).start()
        while True:
            comm.all_reduce(large, out=large)
        """,
        1,
    ),
    "a call that nobody waits for": (
        "comm.all_reduce(large, async_op=True)",
        "time.sleep(1)",
        0,
    ),
    "a message that never comes": (
        "comm.recv(None, 1, async_op=True); time.sleep(0.2)",
        "time.sleep(1)",
        0,
    ),
    "a message from anybody that never comes": (
        "comm.recv(None, collective.ANY_SOURCE, async_op=True); time.sleep(0.2)",
        "time.sleep(1)",
        0,
    ),
    "a deadline": (
        """
        try:
            comm.all_reduce(large, timeout=0.3)
        except collective.CollectiveTimeoutError:
            tell("late")
            sys.exit(5)
        """,
        "until('late')",
        5,
    ),
    "an abort": (
        """
        tell("through")
        try:
            comm.recv(None, 1)
        except collective.CommunicatorAbortedError:
            sys.exit(6)
        """,
        "until('through'); time.sleep(0.3); comm.abort('enough')",
        6,
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_ends(ending: str, tmp_path: Path) -> None:
    *parts, code = ENDINGS[ending]
    # What a start of Python adds to it is seen once.
    python = sys.executable if ending == "a message that never comes" else warm.python()
    ranks = (
        ["-c", PROGRAM + textwrap.dedent(part), rank, tmp_path / "s"]
        for rank, part in enumerate(parts)
    )
    done = run_together(*ranks, python=python, timeout=ENDS_S)
    assert done[0].returncode == code, done[0].stderr
    if "dies" in ending:
        assert "PeerLostError" in done[0].stderr
        assert "rank 1" in done[0].stderr
    for each in done:
        assert "terminate called" not in each.stderr
