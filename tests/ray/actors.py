"""Actors of the tests with Ray."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
from ray.util import collective as col


@ray.remote(num_cpus=0, max_restarts=0)
class Member:
    """Process that is a member of groups; it runs the functions of the tests."""

    def __init__(self, registers: bool = True) -> None:
        if registers:
            import collective.launch.ray  # noqa: F401  registers the backend

    def init(self, size: int, rank: int, name: str) -> float:
        began = time.monotonic()
        col.init_collective_group(size, rank, "collective", name)
        return time.monotonic() - began

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def pid(self) -> int:
        return os.getpid()


def join(members: list[Any], name: str) -> list[float]:
    """Make actors the ranks of a group, and return the seconds that each of them took."""
    size = len(members)
    calls = [member.init.remote(size, rank, name) for rank, member in enumerate(members)]
    return list(ray.get(calls, timeout=120))


def group_of(size: int, name: str, **variables: str) -> list[Any]:
    """Return new actors that are the ranks of a group, for tests that end them."""
    kind = Member.options(runtime_env={"env_vars": variables}) if variables else Member
    members = [kind.remote() for _ in range(size)]
    join(members, name)
    return members


def everywhere(members: list[Any], function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a function in all actors at once and return the results by rank."""
    return list(ray.get([member.run.remote(function, *args) for member in members], timeout=120))


def array(kind: str, *values: float) -> Any:
    if kind == "torch":
        import torch

        return torch.tensor(values)
    return np.array(values, np.float32)


def values(x: Any) -> list[float]:
    return [float(value) for value in x]


def all_calls(kind: str, name: str) -> dict[str, Any]:
    """Make every call of Ray's interface and return the results by name."""
    col.barrier(name)  # a declared group is made by the first call; until then its rank is -1
    rank, size = col.get_rank(name), col.get_collective_group_size(name)
    found: dict[str, Any] = {"place": (rank, size)}
    for op in ("SUM", "PRODUCT", "MIN", "MAX"):
        x = array(kind, rank + 1.0, 2.0)
        col.allreduce(x, name, col.types.ReduceOp[op])
        found[f"allreduce {op}"] = values(x)
    x = array(kind, rank + 1.0, 2.0)
    col.broadcast(x, 1, name)
    found["broadcast"] = values(x)
    x = array(kind, rank + 1.0, 2.0)
    col.reduce(x, 1, name)
    found["reduce"] = values(x)
    places = [array(kind, 0.0, 0.0) for _ in range(size)]
    col.allgather(places, array(kind, rank + 1.0, 5.0), name)
    found["allgather"] = [values(place) for place in places]
    x = array(kind, 0.0, 0.0)
    col.reducescatter(x, [array(kind, rank + 10.0 * place, 1.0) for place in range(size)], name)
    found["reducescatter"] = values(x)
    x = array(kind, 7.0, 8.0) if rank == 0 else array(kind, 0.0, 0.0)
    if rank == 0:
        col.send(x, 1, name)
    elif rank == 1:
        col.recv(x, 0, name)
    found["message"] = values(x)
    return found


def expected(rank: int, size: int) -> dict[str, Any]:
    """Return what :func:`all_calls` returns on a rank, computed without a group."""
    ranks = range(size)
    product = float(np.prod([r + 1.0 for r in ranks]))
    total = float(sum(r + 1.0 for r in ranks))
    return {
        "place": (rank, size),
        "allreduce SUM": [total, 2.0 * size],
        "allreduce PRODUCT": [product, 2.0**size],
        "allreduce MIN": [1.0, 2.0],
        "allreduce MAX": [float(size), 2.0],
        "broadcast": [2.0, 2.0],
        "reduce": [total, 2.0 * size] if rank == 1 else [rank + 1.0, 2.0],
        "allgather": [[r + 1.0, 5.0] for r in ranks],
        "reducescatter": [sum(ranks) + 10.0 * rank * size, float(size)],
        "message": [7.0, 8.0] if rank < 2 else [0.0, 0.0],
    }
