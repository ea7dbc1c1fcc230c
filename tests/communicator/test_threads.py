"""Calls of two threads of a rank on one communicator."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from collective.errors import PeerFailedError
from tests.support.on_ranks import on_ranks, ranks_of
from tests.support.selection import in_whole

ranks = ranks_of(("threads", 2), ("shm", 2), in_whole(("gloo", 2)))
posting = ranks_of(("threads", 2), ("shm", 2))


@on_ranks("ranks")
def test_call_of_second_thread_raises_on_every_rank(comm: Any) -> None:
    shared = comm.dup()

    def wait_for_other() -> None:
        with pytest.raises(PeerFailedError):
            shared.barrier()

    if comm.rank == 0:
        waiting = threading.Thread(target=wait_for_other)
        waiting.start()
        while shared.recorder.running() is None:
            time.sleep(0.001)
        with pytest.raises(RuntimeError, match=r"another thread of this rank .* comm\.dup\(\)"):
            shared.all_reduce(np.ones(3))
        comm.send(np.ones(1), 1)
        waiting.join()
    else:
        comm.recv(np.ones(1), 0)
        with pytest.raises(PeerFailedError, match="another thread of this rank"):
            shared.barrier()


@pytest.mark.parametrize("waits", ["wait", "wait with a timeout", "done"])
@on_ranks("posting")
def test_message_may_end_in_another_thread_while_one_waits(comm: Any, waits: str) -> None:
    if comm.rank == 0:
        comm.send(np.ones(3), 1)
    else:
        work = comm.recv(None, 0, async_op=True)
        ending, waiting = threading.Event(), threading.Event()
        end = work._end

        def end_late() -> None:
            ending.set()
            waiting.wait(10)
            end()

        work._end = end_late
        helper = threading.Thread(target=work.wait)
        helper.start()
        assert ending.wait(10)
        later = threading.Timer(0.05, waiting.set)
        later.start()
        if waits == "done":
            assert not work.done()
        result = work.wait(10.0) if waits == "wait with a timeout" else work.wait()
        helper.join()
        later.join()
        assert result.tolist() == [1.0] * 3
    assert comm.all_reduce(1) == 2
