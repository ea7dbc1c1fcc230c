"""A Ray of the tests' own, on this host, or none at all."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.interpreter import ROOT

# Without Ray, test_calls.py alone is collected: it is skipped with one line that says why.
if importlib.util.find_spec("ray") is None:
    collect_ignore_glob = [
        "test_failures.py", "test_hosts.py", "test_rays_own.py", "test_run.py", "test_train.py",
    ]  # fmt: skip


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Start Ray with a small object store and no dashboard, and stop it at the end."""
    import ray

    os.environ["PYTHONPATH"] = str(ROOT)  # for Ray's workers
    os.environ["RAY_DEDUP_LOGS"] = "0"
    ray.init(
        address="local", num_cpus=2, object_store_memory=80 << 20, include_dashboard=False,
        log_to_driver=False, configure_logging=False, _node_ip_address="127.0.0.1",
        namespace="tests",
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def actors(cluster: None) -> list[Any]:
    """Return three actors, which tests share, since an actor takes seconds to start."""
    from tests.ray.actors import Member

    return [Member.remote() for _ in range(3)]
