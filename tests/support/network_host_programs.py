"""Programs of the ranks of system/test_hosts.py: ``python on_hosts.py NAME [ARGUMENTS]``."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import collective
from collective import elastic
from collective.errors import CollectiveError, RendezvousError


def say(**values: Any) -> None:
    """Print a line that a test can parse."""
    # One write: a launcher mixes the output of its ranks.
    sys.stdout.write(f"SAID {values!r}\n")
    sys.stdout.flush()


def who() -> None:
    """Make a call of each kind, and print the rank's place and transport."""
    with collective.init(start_timeout=40.0) as comm:
        rank, size = comm.rank, comm.size
        assert comm.host == socket.gethostname()
        for count in (3, 300_000):
            x = np.arange(count, dtype=np.float64) + rank
            total = size * np.arange(count) + size * (size - 1) // 2
            assert np.array_equal(comm.all_reduce(x), total)
            assert np.array_equal(comm.all_gather(x).reshape(size, count)[:, 0], np.arange(size))
            received = comm.broadcast(x if rank == 1 else None, root=1)
            assert np.array_equal(received, np.arange(count) + 1)
        right, left = (rank + 1) % size, (rank - 1) % size
        assert comm.sendrecv(np.array([rank]), right, left).item() == left
        with comm.split("host") as local:
            hosts = local.all_gather_object(comm.host)
            assert set(hosts) == {comm.host}
            here = (local.rank, local.size, local.backend)
        comm.barrier()  # ranks connect through rank 0, which must not end before
        transport: Any = comm.inner.transport
        between = getattr(transport, "_outer", transport).name
        say(rank=rank, host=comm.host, backend=comm.backend, here=here, between=between,
            torch="torch" in sys.modules,
            local=(comm.local_rank, comm.local_size), tmpdir=os.environ["TMPDIR"])  # fmt: skip


def without_rank_0() -> None:
    """Wait without end as rank 0; meet as another rank, and print how many have met."""
    if os.environ["RANK"] == "0":
        say(waits=True)
        time.sleep(600.0)
    with collective.init(start_timeout=600.0) as comm:
        comm.barrier()
        say(rank=comm.rank, size=comm.size, local=(comm.local_rank, comm.local_size))


def barriers() -> None:
    """Print the duration of a barrier."""
    with collective.init() as comm:
        comm.barrier()
        since = time.monotonic()
        # An even number: a host that left the first barrier late gains on every other one.
        for _ in range(4):
            comm.barrier()
        seconds = (time.monotonic() - since) / 4
        total = comm.all_reduce(np.full(200_000, comm.rank, np.float32))
        say(rank=comm.rank, backend=comm.backend, seconds=seconds, total=float(total[-1]))


def until_it_breaks(count: str, timeout: str) -> None:
    """Call all_reduce until it fails; print the error and the duration of the last call."""
    comm = collective.init(timeout=float(timeout))
    x = np.ones(int(count), np.float32)
    comm.all_reduce(x, out=x, op="max")
    say(rank=comm.rank, ready=True, pid=os.getpid(), backend=comm.backend)
    while True:
        since = time.monotonic()
        try:
            comm.all_reduce(x, out=x, op="max")
        except CollectiveError as error:
            say(rank=comm.rank, kind=type(error).__name__, text=str(error),
                ranks=getattr(error, "ranks", None), seconds=time.monotonic() - since,
                at=time.monotonic())  # fmt: skip
            return
        time.sleep(0.01)


def receive_until_it_breaks(timeout: str, *sources: str) -> None:
    """Receive from a rank that never sends; print the error.

    Args:
        timeout: seconds until the receive ends.
        sources: each rank's source; a rank whose source is "none" computes meanwhile.
    """
    comm = collective.init(timeout=float(timeout))
    comm.barrier()
    say(rank=comm.rank, ready=True, pid=os.getpid(), backend=comm.backend)
    since = time.monotonic()
    source = sources[comm.rank]
    try:
        if source == "none":
            time.sleep(2 * float(timeout))
            since = time.monotonic()
            comm.barrier()
        else:
            comm.recv(np.empty(1), int(source))
    except CollectiveError as error:
        say(rank=comm.rank, kind=type(error).__name__, text=str(error), source=source,
            ranks=getattr(error, "ranks", None), seconds=time.monotonic() - since,
            at=time.monotonic())  # fmt: skip


def go_on() -> None:
    """Call all_reduce until a rank is lost, then shrink and continue with the survivors."""
    comm = collective.init()
    first = comm.rank
    comm.barrier()
    say(rank=first, ready=True)
    try:
        while True:
            comm.all_reduce(np.ones(1))
    except CollectiveError:
        comm = comm.shrink()
    total = int(comm.all_reduce(np.array([2**first]))[0])
    say(
        rank=first,
        backend=comm.backend,
        origin=comm.membership.origin,
        total=total,
        agreed=comm.membership.agree(),
    )
    comm.close()


def train() -> None:
    """Train elastically until a file ``stop`` exists; print each generation."""
    with collective.init() as comm:
        state = elastic.State(comm, step=0)
        try:
            for generation in elastic.generations(comm, state):
                with generation as comm:
                    say(origin=comm.membership.origin, rank=comm.rank, step=state.step,
                        at=time.monotonic(), host=socket.gethostname(),
                        backend=comm.backend)  # fmt: skip
                    _train_on(comm, state)
        except elastic.PreemptedError:
            say(leaves=True, step=state.step)
            raise
        say(done=True, rank=comm.rank, size=comm.size, step=state.step)


def _train_on(comm: collective.Communicator, state: elastic.State) -> None:
    while not comm.all_reduce(np.array([os.path.exists("stop")]), op="max")[0]:
        time.sleep(0.01)
        state.step += 1
        state.commit()


def meet(seconds: str) -> None:
    """Try to connect; print the error."""
    since = time.monotonic()
    try:
        comm = collective.init(start_timeout=float(seconds))
    except RendezvousError as error:
        say(kind="RendezvousError", text=str(error), seconds=time.monotonic() - since)
    else:
        say(kind="connected", rank=comm.rank)
        comm.close()


def listening() -> None:
    """Print the addresses with listeners while the ranks are connected."""
    with collective.init() as comm:
        comm.barrier()
        say(rank=comm.rank, addresses=sorted(_listened()))
        comm.barrier()


def _listened() -> set[str]:
    addresses = set()
    for line in open("/proc/net/tcp").read().splitlines()[1:]:  # noqa: SIM115
        local, state = line.split()[1], line.split()[3]
        if state == "0A":
            raw = bytes.fromhex(local.partition(":")[0])[::-1]
            addresses.add(socket.inet_ntoa(raw))
    return addresses


if __name__ == "__main__":
    # A test that gives up sends SIGUSR1 to get the stacks of all ranks.
    import faulthandler

    faulthandler.register(signal.SIGUSR1)
    functions: dict[str, Callable[..., None]] = {
        each.__name__: each
        for each in (
            who,
            without_rank_0,
            barriers,
            go_on,
            receive_until_it_breaks,
            until_it_breaks,
            train,
            meet,
            listening,
        )
    }
    functions[sys.argv[1]](*sys.argv[2:])
