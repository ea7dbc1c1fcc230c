"""Fixtures for Ray's own tests, which ``test_rays_own.py`` copies beside them.

Ray's own fixtures start Ray and new actors for every test, which takes seconds. These start both
once: a test gets actors of earlier tests, whose groups have been destroyed.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

# The workers import the copy of the tests, and the backend from this project.
_FOLDER = os.environ["RAYTESTS"]
sys.path.insert(0, _FOLDER)
os.environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, os.environ["PYTHONPATH"]])
os.environ["RAY_enable_worker_prestart"] = "0"
os.environ["RAY_prestart_worker_first_driver"] = "0"

util: Any = importlib.import_module("raytests.cpu_util")


class _Actors:
    """Stand-in for the tests' class of actors, whose actors serve one test after the other."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._actors: list[Any] = []
        self._used = 0

    def remote(self) -> Any:
        if self._used == len(self._actors):
            self._actors.append(self._kind.remote())
        self._used += 1
        return self._actors[self._used - 1]

    def reset(self) -> None:
        def reset(actor: Any) -> None:  # local, so that Ray does not pickle it by its module
            from ray.util.collective import collective

            for name in list(collective._group_mgr._name_group_map):
                collective.destroy_collective_group(name)
            actor.__init__()

        used, self._used = self._actors[: self._used], 0
        ray.get([actor.__ray_call__.remote(reset) for actor in used], timeout=60)


util.Worker = _Actors(util.Worker)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start Ray with eight CPUs, on one node or on two."""
    nodes = 2 if "distributed" in str(request.config.args) else 1
    node = {"num_cpus": 8 // nodes, "object_store_memory": 160 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    for _ in range(nodes - 1):
        cluster.add_node(**node)
    ray.init(
        address=cluster.address, log_to_driver=False, configure_logging=False,
        runtime_env={"worker_process_setup_hook": "collective.launch.ray.register"},
    )  # fmt: skip
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def ray_start_single_node(cluster: None) -> Iterator[None]:
    yield
    util.Worker.reset()


@pytest.fixture
def ray_start_distributed_2_nodes(cluster: None) -> Iterator[None]:
    yield
    util.Worker.reset()
