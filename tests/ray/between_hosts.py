"""Calls of actors of two hosts: ``python between_hosts.py`` prints the facts."""

from __future__ import annotations

import json
import socket
from typing import Any

import ray
from ray.util import collective as col

import collective.launch.ray
from tests.ray.actors import all_calls

HOSTS = ("10.77.0.1", "10.77.0.2")


@ray.remote(num_cpus=0)
class Actor:
    def join(self, rank: int) -> str:
        col.init_collective_group(2, rank, "collective", "pair")
        return str(col.get_group_handle("pair").comm.backend)

    def calls(self, kind: str) -> dict[str, Any]:
        return all_calls(kind, "pair")

    def host(self) -> str:
        return socket.gethostname()


def main() -> None:
    collective.launch.ray.register()
    ray.init(address=f"{HOSTS[0]}:6379", log_to_driver=False, configure_logging=False,
             _node_ip_address=HOSTS[0])  # fmt: skip
    first, second = (Actor.options(resources={f"node:{host}": 0.01}).remote() for host in HOSTS)
    ray.get([actor.__ray_call__.remote(_register) for actor in (first, second)])
    facts: dict[str, Any] = {"hosts": ray.get([first.host.remote(), second.host.remote()])}
    facts["backends"] = ray.get([first.join.remote(0), second.join.remote(1)], timeout=60)
    for kind in ("numpy", "torch"):
        calls = [actor.calls.remote(kind) for actor in (first, second)]
        facts[f"calls with {kind}"] = ray.get(calls, timeout=60)
    print("FACTS", json.dumps(facts), flush=True)
    ray.shutdown()


def _register(actor: Any) -> None:
    import collective.launch.ray  # noqa: F401


if __name__ == "__main__":
    main()
