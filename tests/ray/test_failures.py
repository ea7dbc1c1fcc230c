"""Actors that die or fail in a group; ``make test-in ENV=ray`` installs Ray and runs this."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed; `make test-in ENV=ray` does that", allow_module_level=True)

import ray
from ray.util import collective as col

import collective
from tests.ray.actors import Member, all_calls, everywhere, expected, group_of, join
from tests.support.launches import NOISE_S, PROMISED_S

pytestmark = pytest.mark.usefixtures("cluster")


def _reduce(name: str) -> str:
    try:
        col.allreduce(np.ones(3), name)
    except collective.PeerLostError as error:
        return f"{error.ranks} {error}"
    return "no error"


def _transport(name: str) -> str:
    return str(col.get_group_handle(name).comm.backend)


def _end() -> None:
    os._exit(1)


def _pid() -> int:
    return os.getpid()


def test_death_of_an_actor_raises_at_its_peer_at_once() -> None:
    members = group_of(2, "exit")
    pid = everywhere(members, _pid)[1]
    waiting = members[0].run.remote(_reduce, "exit")
    began = time.monotonic()
    dying = members[1].run.remote(_end)
    text = ray.get(waiting, timeout=60)
    assert text.startswith("(1,) all_reduce")
    assert f"rank 1 (pid {pid}) has died" in text
    assert time.monotonic() - began < PROMISED_S + NOISE_S
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(dying, timeout=60)
    # The same name again, while one member of the old group lives.
    others = [members[0], *group_of(1, "alone-exit")]
    everywhere(members[:1], col.destroy_collective_group, "exit")
    join(others, "exit")
    assert everywhere(others, _of_length, 3, "exit") == [2.0, 2.0]


@pytest.mark.parametrize("transport", ["tcp", "gloo"])
def test_death_of_an_actor_between_hosts_raises_at_its_peer(transport: str) -> None:
    members = group_of(2, transport, COLLECTIVE_BACKEND=transport)
    assert everywhere(members, _transport, transport) == [transport] * 2
    assert everywhere(members, all_calls, "numpy", transport) == [expected(r, 2) for r in range(2)]
    waiting = members[0].run.remote(_reduce, transport)
    members[1].run.remote(_end)
    assert ray.get(waiting, timeout=60).startswith("(1,) all_reduce")


def test_kill_of_an_actor_reaches_the_driver_as_our_error() -> None:
    members = group_of(2, "kill")
    waiting = members[0].run.remote(_of_length, 3, "kill")
    ray.kill(members[1])
    with pytest.raises(collective.PeerLostError, match="rank 1"):
        ray.get(waiting, timeout=60)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_restarted_actor_joins_the_name_again(transport: str) -> None:
    name = f"restart-{transport}"
    kind = Member.options(
        max_restarts=1, max_task_retries=-1,
        runtime_env={"env_vars": {"COLLECTIVE_BACKEND": transport}},
    )  # fmt: skip
    first, second = (kind.remote() for _ in range(2))
    join([first, second], name)
    pids = everywhere([first, second], _pid)
    waiting = first.run.remote(_reduce, name)
    ray.kill(second, no_restart=False)
    assert ray.get(waiting, timeout=60).startswith("(1,) all_reduce")
    everywhere([first], col.destroy_collective_group, name)
    join([first, second], name)
    assert everywhere([first, second], _transport, name) == [transport] * 2
    assert everywhere([first, second], _of_length, 3, name) == [2.0, 2.0]
    renewed = everywhere([first, second], _pid)
    assert renewed[0] == pids[0]
    assert renewed[1] != pids[1]


def _wait_for_peer(name: str, mark: Path) -> str:
    mark.touch()
    try:
        col.allreduce(np.ones(3), name)
    except collective.CommunicatorClosedError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("transport", ["shm", "tcp", "gloo"])
def test_group_destroyed_by_another_thread_ends_the_waiting_call(
    transport: str, tmp_path: Path
) -> None:
    name, mark = f"destroyed-{transport}", tmp_path / "waits"
    env = {"env_vars": {"COLLECTIVE_BACKEND": transport}}
    members = [Member.options(runtime_env=env, max_concurrency=2).remote() for _ in range(2)]
    join(members, name)
    waiting = members[0].run.remote(_wait_for_peer, name, mark)
    while not mark.exists():
        time.sleep(0.01)
    time.sleep(0.3)
    began = time.monotonic()
    ray.get(members[0].run.remote(col.destroy_collective_group, name), timeout=60)
    assert "another thread of this rank closed" in ray.get(waiting, timeout=60)
    assert time.monotonic() - began < PROMISED_S + NOISE_S
    assert "(0,) all_reduce" in ray.get(members[1].run.remote(_reduce, name), timeout=60)
    everywhere(members[1:], col.destroy_collective_group, name)
    join(members, name)
    assert everywhere(members, _of_length, 3, name) == [2.0, 2.0]


def test_different_calls_raise_on_both_ranks_and_keep_the_group(actors: list[Any]) -> None:
    join(actors[:2], "differ")
    for call in [actors[rank].run.remote(_of_length, 3 + rank, "differ") for rank in range(2)]:
        with pytest.raises(collective.MismatchError):
            ray.get(call, timeout=60)
    assert everywhere(actors[:2], _of_length, 3, "differ") == [2.0, 2.0]


def _of_length(length: int, name: str) -> float:
    x = np.ones(length)
    col.allreduce(x, name)
    return float(x[0])
