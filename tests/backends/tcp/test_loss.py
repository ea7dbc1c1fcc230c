"""Messages over ``tcp`` that lose their peer, or their time, in the middle."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collective
from collective.control.link import Challenge, Link
from collective.deadline import Deadline
from collective.errors import CollectiveTimeoutError, CommunicatorAbortedError, PeerLostError
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.testing import RanksFailedError, run_ranks
from tests.support.on_ranks import on_ranks, ranks_of

two = ranks_of(("tcp", 2), timeout=40.0)
# Bytes of a message that does not fit into the kernel's buffers.
LONG = 64 << 20


def _half_a_message(comm: Any) -> None:
    """Send the beginning of a message."""
    content = Buffer(np.zeros(LONG, np.uint8), BY_NAME["uint8"])
    arguments = content, 1 - comm.rank, 7, Deadline(20.0)
    threading.Thread(target=comm.inner.transport.send, args=arguments, daemon=True).start()
    # Rank 1 takes nothing off the connection yet, and the kernel's buffers hold less than this.
    time.sleep(0.2)


def _dies_in_the_middle(comm: Any, directory: str) -> None:
    comm.barrier()
    if comm.rank == 0:
        _half_a_message(comm)
        os.kill(os.getpid(), signal.SIGKILL)
    out = np.empty(LONG, np.uint8)
    time.sleep(0.5)
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 0") as caught:
        comm.inner.transport.recv(Buffer(out, BY_NAME["uint8"]), 0, 7, Deadline(20.0))
    assert caught.value.ranks == (0,)
    Path(directory, "seconds").write_text(str(time.monotonic() - began))


def test_sigkill_of_sender_in_the_middle_raises_peer_lost(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError):
        run_ranks(2, _dies_in_the_middle, str(tmp_path), backend="tcp", timeout=30.0)
    assert float((tmp_path / "seconds").read_text()) < 5.0


# The victim of each side of a handshake, and the method in whose place it dies. Rank 2 connects to
# the others, and rank 1 listens for rank 2.
HANDSHAKES = {"connects": (2, Link, "prove"), "listens": (1, Challenge, "answer")}


def _dies_in_the_handshake(comm: Any, side: str, directory: str) -> None:
    victim, place, method = HANDSHAKES[side]
    comm.barrier()
    if comm.rank == victim:
        setattr(place, method, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    began = time.monotonic()
    with pytest.raises(PeerLostError, match=f"rank {victim}") as caught:
        comm.dup()
    assert caught.value.ranks == (victim,)
    Path(directory, str(comm.rank)).write_text(str(time.monotonic() - began))


@pytest.mark.parametrize("side", HANDSHAKES)
def test_sigkill_in_the_handshake_raises_peer_lost(tmp_path: Path, side: str) -> None:
    with pytest.raises(RanksFailedError, match="signal 9"):
        run_ranks(3, _dies_in_the_handshake, side, str(tmp_path), backend="tcp", timeout=30.0)
    seconds = {int(file.name): float(file.read_text()) for file in tmp_path.iterdir()}
    assert seconds.keys() == set(range(3)) - {HANDSHAKES[side][0]}
    assert max(seconds.values()) < 5.0


def _stops(comm: Any, directory: str) -> str:
    pids = comm.all_gather(np.array([os.getpid()]))
    comm.barrier()
    x = np.zeros(LONG, np.uint8)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(CommunicatorAbortedError, match="timed out"):
            comm.recv(x, 0)
        return "aborted"
    try:
        began = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match="rank 1"):
            comm.send(x, 1, timeout=1.0)
        assert time.monotonic() - began < 8.0
    finally:
        os.kill(int(pids[1]), signal.SIGCONT)
    return "timed out"


def test_stopped_receiver_ends_send_at_deadline(tmp_path: Path) -> None:
    ended = run_ranks(2, _stops, str(tmp_path), backend="tcp", timeout=60.0)
    assert ended == ["timed out", "aborted"]


@on_ranks("two")
def test_message_waits_for_receiver_that_computes(comm: Any) -> None:
    """The wait is longer than the silence after which the kernel gives up a control link."""
    x = np.arange(LONG >> 3)
    if comm.rank == 0:
        comm.send(x, 1)
    else:
        time.sleep(8.0)
        np.testing.assert_array_equal(comm.recv(np.empty_like(x), 0), x)


@on_ranks("two")
def test_closing_ends_receive_of_another_thread(comm: Any) -> None:
    group = comm.dup()
    errors: list[BaseException] = []

    def receive() -> None:
        try:
            group.recv(np.empty(3), 1 - comm.rank)
        except collective.CollectiveError as error:
            errors.append(error)

    waiting = threading.Thread(target=receive)
    waiting.start()
    time.sleep(0.2)
    comm.barrier()
    group.close()
    waiting.join(20.0)
    assert len(errors) == 1


@on_ranks("two")
def test_waiting_rank_uses_hardly_any_processor(comm: Any) -> None:
    comm.barrier()
    if comm.rank == 0:
        time.sleep(2.0)
        comm.send(np.ones(1), 1)
    else:
        before = time.process_time()
        comm.recv(np.empty(1), 0)
        # The monitor's comparison of calls is part of it.
        assert time.process_time() - before < 0.04


@on_ranks("two")
def test_threads_exchange_messages_at_once(comm: Any) -> None:
    """Threads wait for messages that other threads take off the connection."""
    peer = 1 - comm.rank
    wrong: list[Any] = []

    def talk(tag: int) -> None:
        for turn in range(30):
            length = 1 + (turn * 7919 + tag * 104729) % 40_000
            x, y = np.full(length, 1000 * tag + turn), np.empty(length, np.int64)
            if (tag + comm.rank) % 2:
                comm.send(x, peer, tag)
                comm.recv(y, peer, tag)
            else:
                comm.recv(y, peer, tag)
                comm.send(x, peer, tag)
            if not (y == x).all():
                wrong.append((tag, turn))

    threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)


@on_ranks("two")
def test_keyboard_interrupt_in_the_middle_ends_the_connection(comm: Any) -> None:
    """No later message can begin where this one has ended."""
    group = comm.dup()
    if comm.rank == 0:
        main = threading.main_thread().ident
        timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        with pytest.raises((KeyboardInterrupt, collective.CollectiveError)):
            group.send(np.zeros(LONG, np.uint8), 1)
        comm.barrier()
    else:
        comm.barrier()
        with pytest.raises(collective.CollectiveError):
            group.recv(np.zeros(LONG, np.uint8), 0)
    group.close()
