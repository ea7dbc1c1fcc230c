"""`close()` leaves nothing of the transport, also if another thread of the rank waits in a call."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import numpy as np

import collective
from collective.testing import run_ranks


def _left() -> tuple[int, int]:
    """Return the numbers of open descriptors and of mapped segments."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), sum("collective" in line for line in maps)


def _close_in_call(comm: collective.Communicator) -> bool:
    comm.barrier()
    before = _left()
    errors: list[str] = []

    def wait(part: collective.Communicator) -> None:
        try:
            part.barrier()
        except collective.CommunicatorClosedError as error:
            errors.append(str(error))

    part = comm.dup()
    if comm.rank == 0:
        thread = threading.Thread(target=wait, args=(part,))
        thread.start()
        time.sleep(0.1)
        part.close()
        thread.join()
        assert len(errors) == 1
        del thread
    comm.barrier()
    part.close()
    del part
    gc.collect()
    comm.barrier()
    return _left() == before


def test_call_ended_by_close_leaves_no_descriptor_and_no_mapping() -> None:
    assert run_ranks(2, _close_in_call, backend="shm") == [True, True]


def _close_after_posted_messages(comm: collective.Communicator) -> bool:
    comm.barrier()
    before = _left()
    with comm.dup() as part:
        after = part.recv(np.empty(3), 1 - comm.rank, async_op=True)
        part.send(np.ones(3), 1 - comm.rank, async_op=True).wait()
        assert after.wait().sum() == 3
    comm.barrier()
    assert part.size == 2  # a program may keep the communicator and its works
    return _left() == before


def test_close_after_posted_messages_leaves_no_descriptor_and_no_mapping() -> None:
    assert run_ranks(2, _close_after_posted_messages, backend="shm") == [True, True]
