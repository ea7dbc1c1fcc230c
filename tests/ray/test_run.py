"""Functions on ranks that are actors of their own; ``make test-in ENV=ray`` runs this."""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed; `make test-in ENV=ray` does that", allow_module_level=True)

import ray

import collective
from collective.launch.outcome import RankDiedError, RanksFailedError
from collective.launch.ray import run
from tests.ray.test_calls import keys
from tests.support.launches import NOISE_S, PROMISED_S

pytestmark = pytest.mark.usefixtures("cluster")


def nothing_is_left() -> bool:
    """Return whether actors, placement groups and keys are gone within a minute."""
    from ray._private import state  # the public list needs the dashboard
    from ray.util import placement_group_table

    end = time.monotonic() + 60
    while time.monotonic() < end:
        groups = placement_group_table().values()
        ranks = [a for a in state.actors().values() if a["ActorClassName"].endswith("_RankActor")]
        actors = [actor for actor in ranks if actor["State"] != "DEAD"]
        if not actors and not keys("run/") and all(group["state"] == "REMOVED" for group in groups):
            return True
        time.sleep(0.1)
    return False


def _total(comm: collective.Communicator, factor: float) -> tuple[int, float, bool]:
    total = comm.all_reduce(np.array([factor * (comm.rank + 1)]))
    return comm.rank, float(total[0]), os.getpid() == os.getppid()


def test_results_of_ranks_are_in_their_order() -> None:
    assert run(_total, 2, 2.0) == [(0, 6.0, False), (1, 6.0, False)]
    assert nothing_is_left()


def _keys(comm: collective.Communicator) -> list[bytes]:
    comm.barrier()  # rank 0 deletes the keys before it calls this function
    return keys("run/")


def test_running_ranks_leave_no_keys_for_a_driver_that_is_killed() -> None:
    assert run(_keys, 2) == [[], []]


def _fail(comm: collective.Communicator) -> None:
    if comm.rank == 1:
        raise ZeroDivisionError("planted")
    comm.barrier()


def test_error_of_a_rank_comes_with_its_traceback_first() -> None:
    with pytest.raises(RanksFailedError) as caught:
        run(_fail, 2)
    assert list(caught.value.errors) == [1, 0]
    assert isinstance(caught.value.cause, ZeroDivisionError)
    assert 'raise ZeroDivisionError("planted")' in caught.value.tracebacks[1]
    assert isinstance(caught.value.errors[0], collective.PeerFailedError)
    assert nothing_is_left()


def _die(comm: collective.Communicator, note: Path) -> None:
    if comm.rank == 1:
        note.write_text(str(time.monotonic()))
        os._exit(3)
    comm.barrier()


def test_death_of_a_rank_ends_the_run_at_once(tmp_path: Path) -> None:
    note = tmp_path / "death"
    with pytest.raises(RanksFailedError, match="rank 1 has died") as caught:
        run(_die, 2, note)
    assert time.monotonic() - float(note.read_text()) < PROMISED_S + NOISE_S
    assert isinstance(caught.value.cause, RankDiedError)
    assert nothing_is_left()


def _shrink(comm: collective.Communicator) -> tuple[str, float]:
    comm.barrier()  # a rank that dies while others connect ends the run
    if comm.rank == 1:
        os._exit(3)
    try:
        comm.barrier()
    except collective.PeerLostError:
        comm = comm.shrink()
    return comm.backend, float(comm.all_reduce(np.ones(1))[0])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_min_ranks_let_the_others_continue(transport: str) -> None:
    variables = {"env_vars": {"COLLECTIVE_BACKEND": transport}}
    first, second, third = run(_shrink, 3, num_cpus=0.5, min_ranks=1, runtime_env=variables)
    assert first == third == (transport, 2.0)
    assert isinstance(second, RankDiedError)
    assert nothing_is_left()


def test_more_ranks_than_resources_are_refused() -> None:
    with pytest.raises(collective.InvalidArgumentError, match=r"need 99 CPU, and Ray's cluster"):
        run(_total, 99, 1.0)


def test_resources_in_use_are_named() -> None:
    from ray.util import placement_group, remove_placement_group

    other = placement_group([{"CPU": 1}])
    ray.get(other.ready())
    try:
        with pytest.raises(collective.RendezvousError, match="has not placed 2 ranks with 1 CPU"):
            run(_total, 2, 1.0, start_timeout=0.5)
    finally:
        remove_placement_group(other)
    assert nothing_is_left()


def _wait(comm: collective.Communicator, gate: Any) -> None:
    ray.get(gate.arrive.remote())
    comm.recv(np.zeros(1), 1 - comm.rank)


@ray.remote(num_cpus=0)
class Gate:
    def __init__(self) -> None:
        self.arrived = 0

    def arrive(self) -> None:
        self.arrived += 1

    def count(self) -> int:
        return self.arrived


def test_interrupt_during_the_placement_leaves_nothing() -> None:
    from ray.util import placement_group, placement_group_table, remove_placement_group

    other = placement_group([{"CPU": 1}])
    ray.get(other.ready())
    interrupted: list[float] = []

    def interrupt() -> None:
        while not any(g["state"] == "PENDING" for g in placement_group_table().values()):
            time.sleep(0.05)
        interrupted.append(time.monotonic())
        os.kill(os.getpid(), 2)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(_total, 2, 1.0, start_timeout=60.0)
        assert time.monotonic() - interrupted[0] < PROMISED_S + NOISE_S
    finally:
        thread.join()
        remove_placement_group(other)
    assert nothing_is_left()


def test_interrupt_of_the_driver_ends_the_ranks() -> None:
    gate = Gate.remote()

    def interrupt() -> None:
        while ray.get(gate.count.remote()) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), 2)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(_wait, 2, gate)
    thread.join()
    assert nothing_is_left()
