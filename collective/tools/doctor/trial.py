"""Trial of a transport by two ranks: correct results, and the speed."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import Any

import numpy as np

from collective import (
    BackendError,
    CollectiveError,
    CollectiveTimeoutError,
    Communicator,
    UnsupportedError,
    init,
)
from collective.inner import (
    Mpiexec,
    Participant,
    RankHungError,
    Ranks,
    RanksFailedError,
    framework,
    registry,
    under_mpiexec,
)
from collective.launch.ranks import FunctionJob

Array = np.ndarray[Any, Any]

_SMALL_BYTES, _LARGE_BYTES = 8, 16 << 20
_SMALL_CALLS, _ROUNDS = 50, 5
_CALL_S, _TRIAL_S = 20.0, 40.0


def run(name: str, mpiexec: str = "") -> dict[str, Any]:
    """Start two ranks on transport ``name`` and return what :func:`exercise` returns.

    Args:
        name: registered name of the transport.
        mpiexec: program that starts the ranks, if they are an MPI world.

    Raises:
        CollectiveTimeoutError: a rank did not answer or go on in time.
        CollectiveError: the trial failed; the text has the cause.
    """
    devices = registry.find(name).capabilities.devices
    if not devices & {"cpu", "cuda"}:
        raise UnsupportedError(
            f"trial: transport {name!r} takes arrays on {', '.join(sorted(devices))} only; the "
            "trial can only use arrays on the CPU and on NVIDIA's GPUs."
        )
    from collective.testing import run_ranks

    try:
        if mpiexec:
            # Start the ranks in this process's session: whoever kills the session ends them, too.
            program = Mpiexec(program=mpiexec)
            starter = under_mpiexec(2, program, lasting=False, session=False)
            with Ranks(2, starter) as ranks:
                results = ranks.results(FunctionJob(_try, (name,)), _TRIAL_S)
        else:
            results = run_ranks(2, exercise, backend=name, timeout=_TRIAL_S, call_timeout=_CALL_S)
    except RanksFailedError as error:
        rank, cause = next(iter(error.errors.items()))
        # Errors of this package name the rank. For other errors, add the rank and the class.
        kind = (
            "" if isinstance(cause, CollectiveError) else f"rank {rank}: {type(cause).__name__}: "
        )
        slow = (CollectiveTimeoutError, RankHungError)
        if any(isinstance(cause, slow) for cause in error.errors.values()):
            raise CollectiveTimeoutError(f"{kind}{cause}") from error
        raise BackendError(f"{kind}{cause}", name) from error
    facts: dict[str, Any] = results[0]
    return facts


def exercise(comm: Communicator) -> dict[str, Any]:
    """Do this rank's part: an all-reduce, broadcasts and messages with known results.

    Collective: both ranks. The arrays are on the CPU, or on GPUs if the transport needs that.

    Returns:
        ``latency_s`` of an all-reduce of ``small_bytes``, and ``bandwidth``, bytes a second
        of an all-reduce of ``large_bytes``; medians over the rounds, of the slower rank.

    Raises:
        BackendError: a result is wrong.
    """
    kind = framework("numpy" if "cpu" in comm.capabilities.devices else "cuda")
    kind.settle(comm.rank)

    def put(array: Array) -> Any:
        return kind.make(array, str(array.dtype), ())

    def expect(call: str, got: Any, wanted: Array) -> None:
        found = kind.read(got)
        if not np.array_equal(found, wanted):
            raise BackendError(
                f"{call}: wrong result on rank {comm.rank}: got {found[:3]}…, expected "
                f"{wanted[:3]}….",
                comm.backend,
            )

    ranks = np.arange(1000.0)
    expect("all_reduce", comm.all_reduce(put(ranks + comm.rank)), 2 * ranks + 1)
    for root in range(comm.size):
        mine = put(ranks + comm.rank)
        expect("broadcast", comm.broadcast(mine, root=root), ranks + root)
    if comm.rank == 0:
        comm.send(put(ranks), dst=1, tag=3)
        expect("recv", comm.recv(put(0 * ranks), src=1, tag=4), -ranks)
    else:
        expect("recv", comm.recv(put(0 * ranks), src=0, tag=3), ranks)
        comm.send(put(-ranks), dst=0, tag=4)
    latency = _median(comm, put(np.ones(_SMALL_BYTES // 8)), _SMALL_CALLS)
    large = _median(comm, put(np.ones(_LARGE_BYTES // 4, np.float32)), 1)
    slowest = kind.read(comm.all_reduce(put(np.array([latency, large])), op="max"))
    return {
        "small_bytes": _SMALL_BYTES,
        "latency_s": float(slowest[0]),
        "large_bytes": _LARGE_BYTES,
        "bandwidth": _LARGE_BYTES / float(slowest[1]),
    }


def _median(comm: Communicator, x: Any, calls: int) -> float:
    """Return the median seconds of an all-reduce of ``x``; the first round does not count."""
    out = np.empty_like(x)
    rounds = []
    for _ in range(1 + _ROUNDS):
        comm.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            comm.all_reduce(x, out=out)
        if not isinstance(out, np.ndarray):
            out.stream.synchronize()
        rounds.append((time.perf_counter() - start) / calls)
    return statistics.median(rounds[1:])


def _try(_: Participant, name: str) -> dict[str, Any]:
    """Take part as one of the two ranks that mpiexec has started."""
    os.chdir(tempfile.gettempdir())  # settings files in the current directory must not apply
    with init(name, timeout=_CALL_S, start_timeout=_CALL_S) as comm:
        if comm.size != 2:
            raise BackendError(
                f"mpiexec started 2 ranks, but each is in a world of {comm.size}: this mpiexec "
                "does not belong to the MPI library.",
                name,
            )
        return exercise(comm)
