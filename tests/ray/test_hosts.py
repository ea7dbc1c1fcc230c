"""Actors of two hosts, each with a Ray of its own in a namespace: their calls."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed; `make test-in ENV=ray` does that", allow_module_level=True)

from tests.ray.actors import expected
from tests.support.network_hosts import Hosts, Job, needs_hosts

PROGRAM = str(Path(__file__).with_name("between_hosts.py"))
RAY = str(Path(sys.executable).with_name("ray"))
START_S, WORK_S = 120.0, 180.0


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Start Ray on two hosts, run the program on the first, and return what it has found."""
    needs_hosts()
    # Ray's sockets lie in this folder, and the path of a socket has at most 107 characters.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    variables = {"RAY_AUTH_MODE": "disabled", "PYTHONUNBUFFERED": "1"}
    common = ["--block", "--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats"]
    with Hosts(2, tmp_path_factory.mktemp("hosts")) as hosts:

        def start(host: int, *options: str) -> Job:
            address = f"--node-ip-address={hosts.hosts[host].address}"
            return hosts.start([(host, [RAY, "start", address, *options, *common], variables)])

        try:
            head = start(
                0, "--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={folder}"
            )
            head.until("Ray runtime started", timeout=START_S)
            start(1, "--address=10.77.0.1:6379").until("Ray runtime started", timeout=START_S)
            text = hosts.start([(0, [sys.executable, PROGRAM], variables)]).succeed(WORK_S)
        finally:
            hosts.close()
            shutil.rmtree(folder, ignore_errors=True)
    (line,) = [line for line in text.splitlines() if line.startswith("FACTS ")]
    found: dict[str, Any] = json.loads(line.removeprefix("FACTS "))
    return found


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_calls_of_actors_of_two_hosts_are_right(kind: str, facts: dict[str, Any]) -> None:
    wanted = [expected(rank, 2) for rank in range(2)]
    assert facts[f"calls with {kind}"] == json.loads(json.dumps(wanted))  # tuples are lists there


def test_actors_of_two_hosts_meet_over_tcp(facts: dict[str, Any]) -> None:
    assert facts["hosts"] == ["host0", "host1"]
    assert facts["backends"] == ["tcp", "tcp"]
