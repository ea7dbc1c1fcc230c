"""Messages in flight while their rank closes the communicator, on all transports that post them."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from collective.communicator import Communicator
from collective.errors import CollectiveTimeoutError, CommunicatorClosedError
from collective.testing import run_ranks

TRANSPORTS = ["threads", "shm", "tcp", "tests.support.simulated_hosts:Pairs"]


def _receive_for_ever(comm: Communicator) -> str:
    """Let rank 0 close with a receive for which close does not wait; return its error."""
    mail, memory = comm.inner.mail, np.empty(8, np.uint8)
    comm.barrier()
    if comm.rank:
        time.sleep(0.5)
        return ""
    posted = mail.receive(memory, 1, 3)
    comm.close()
    with pytest.raises(CommunicatorClosedError) as caught:
        mail.wait(posted)
    return str(caught.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_posted_message_that_close_ends_has_the_closed_error(transport: str) -> None:
    text, _ = run_ranks(2, _receive_for_ever, backend=transport, timeout=30)
    assert "closed the communicator" in text


def _late_message(comm: Communicator) -> float:
    out = np.empty(300_000)
    if comm.rank == 0:
        work = comm.recv(out, 1, async_op=True)
        comm.close()
        work.wait()
        return float(out[-1])
    time.sleep(0.3)
    comm.send(np.full(300_000, 2.0), 0)
    return 2.0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_close_waits_for_a_receive_in_flight(transport: str) -> None:
    assert run_ranks(2, _late_message, backend=transport, timeout=30) == [2.0, 2.0]


def _own_timeout(comm: Communicator) -> float:
    comm.barrier()
    if comm.rank == 0:
        work = comm.recv(None, 1, async_op=True, timeout=0.3)
        since = time.monotonic()
        comm.close()
        seconds = time.monotonic() - since
        with pytest.raises(CollectiveTimeoutError):
            work.wait()
        return seconds
    time.sleep(1.0)
    return 0.0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_close_waits_for_a_receive_no_longer_than_its_timeout(transport: str) -> None:
    assert 0.2 < run_ranks(2, _own_timeout, backend=transport, timeout=30)[0] < 5.0


def _message_to_itself(comm: Communicator) -> float:
    """Return the seconds until a thread has received what another one of its rank has sent."""
    mail, seconds = comm.inner.mail, []

    def receive() -> None:
        mail.wait(mail.receive(np.empty(8, np.uint8), comm.rank, 3))
        seconds.append(time.monotonic() - since)

    for _ in range(10):
        thread = threading.Thread(target=receive)
        thread.start()
        time.sleep(0.02)  # until the thread waits
        since = time.monotonic()
        mail.send(b"8 bytes!", comm.rank, 3)
        thread.join()
    return min(seconds)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_message_of_rank_to_itself_wakes_its_waiting_thread(transport: str) -> None:
    assert max(run_ranks(2, _message_to_itself, backend=transport, timeout=30)) < 0.2
