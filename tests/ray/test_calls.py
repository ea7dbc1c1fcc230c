"""Ray's collective interface over our transports; ``make test-in ENV=ray`` runs this."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed; `make test-in ENV=ray` does that", allow_module_level=True)

import ray
from ray.util import collective as col

import collective
import collective.launch.ray
from tests.ray.actors import Member, all_calls, everywhere, expected, join

pytestmark = pytest.mark.usefixtures("cluster")


def keys(name: str) -> list[bytes]:
    """Return the keys of our groups with this name in Ray's key-value store."""
    from ray.experimental import internal_kv

    return list(internal_kv._internal_kv_list(f"collective/tests/{name}"))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("size", [2, 3])
def test_calls_of_group_made_in_actors_are_right(size: int, kind: str, actors: list[Any]) -> None:
    name = f"calls-{kind}-{size}"
    join(actors[:size], name)
    found = everywhere(actors[:size], all_calls, kind, name)
    assert found == [expected(rank, size) for rank in range(size)]


def test_calls_of_declared_group_are_right(actors: list[Any]) -> None:
    col.create_collective_group(actors[:2], 2, [1, 0], "collective", "declared")
    found = everywhere(actors[:2], all_calls, "numpy", "declared")
    assert found == [expected(1, 2), expected(0, 2)]


def test_connected_group_leaves_no_keys(actors: list[Any]) -> None:
    join(actors[:2], "keys")
    assert keys("group/keys") == []


def test_new_group_deletes_keys_of_a_failed_one_of_its_name_alone(actors: list[Any]) -> None:
    from ray.experimental import internal_kv

    other = b"collective/tests/group/failed%2Fother/roll/card-1"
    for key in (b"collective/tests/group/failed/0123/address", other):
        internal_kv._internal_kv_put(key, b"1")
    join(actors[:2], "failed")
    assert keys("group/failed") == [other]
    join(actors[:2], "failed/other")
    assert keys("group/failed") == []


def test_group_of_two_connects_within_seconds(actors: list[Any]) -> None:
    assert min(max(join(actors[:2], f"quick-{turn}")) for turn in range(3)) < 10.0


def test_actors_are_in_several_groups_at_once(actors: list[Any]) -> None:
    join(actors[:2], "forward")
    join(actors[1::-1], "reversed")
    first, second = everywhere(actors[:2], _sums, "forward", "reversed")
    assert first == (0, 1, 3.0, 3.0)
    assert second == (1, 0, 3.0, 3.0)


def _sums(*names: str) -> tuple[float, ...]:
    sums = []
    for name in names:
        x = np.array([col.get_rank(name) + 1.0])
        col.allreduce(x, name)
        sums.append(float(x[0]))
    return (*map(col.get_rank, names), *sums)


def test_name_of_destroyed_group_is_used_again(actors: list[Any]) -> None:
    join(actors[:2], "again")
    everywhere(actors[:2], col.destroy_collective_group, "again")
    join(actors[1::-1], "again")
    assert everywhere(actors[:2], _sums, "again") == [(1, 3.0), (0, 3.0)]


def test_mixed_frameworks_of_one_list_are_right(actors: list[Any]) -> None:
    join(actors[:2], "mixed")
    assert everywhere(actors[:2], _mixed) == [([1.0, 2.0], [2.0]), ([1.0, 2.0], [4.0])]


def _mixed() -> tuple[list[float], list[float]]:
    import torch

    rank = col.get_rank("mixed")
    places = [np.zeros(1, np.float32), torch.zeros(1)]
    col.allgather(places, torch.tensor([rank + 1.0]), "mixed")
    out = torch.zeros(1)
    col.reducescatter(out, [np.ones(1, np.float32), torch.tensor([2.0])], "mixed")
    return [float(place[0]) for place in places], [float(out[0])]


@pytest.mark.parametrize("length", [3, 1 << 16])
def test_array_that_ray_passed_receives_the_result(length: int, actors: list[Any]) -> None:
    name = f"passed-{length}"  # the longer array lies in Ray's object store
    join(actors[:2], name)
    calls = [actor.run.remote(_reduced, np.ones(length), name) for actor in actors[:2]]
    assert ray.get(calls, timeout=60) == [(False, 2.0), (False, 2.0)]


def _reduced(x: Any, name: str) -> tuple[bool, float]:
    writable = bool(x.flags.writeable)
    col.allreduce(x, name)
    return writable, float(x.mean())


def test_unregistered_actor_is_registered_from_the_driver() -> None:
    actor = Member.remote(registers=False)
    with pytest.raises(ValueError, match="Backend COLLECTIVE not registered"):
        ray.get(actor.init.remote(1, 0, "alone"), timeout=120)
    collective.launch.ray.register([actor])
    join([actor], "alone")
    assert everywhere([actor], _sums, "alone") == [(0, 1.0)]


def test_differing_sizes_raise_on_both_ranks(actors: list[Any]) -> None:
    calls = [actors[0].init.remote(2, 0, "sizes"), actors[1].init.remote(3, 1, "sizes")]
    for call in calls:
        with pytest.raises(collective.RendezvousError, match="differ in the number of ranks: 2 on"):
            ray.get(call, timeout=120)
