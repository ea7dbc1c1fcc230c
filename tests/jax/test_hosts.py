"""Unmodified JAX programs on hosts that are namespaces; ``make test-in ENV=jax`` runs this."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.support.network_hosts import Hosts, needs_hosts

if importlib.util.find_spec("jax") is None:
    pytest.skip("JAX is not installed; `make test-in ENV=jax` does that", allow_module_level=True)

from tests.jax.test_programs import CHECKS, DEADLINE_S, HERE


@pytest.mark.parametrize(
    ("places", "backend", "size"),
    [("host0:1,host1:1", "tcp", 2), ("host0:2,host1:1", "hierarchical", 3)],
)
def test_every_operation_is_right_over_what_auto_takes_between_hosts(
    places: str, backend: str, size: int, tmp_path: Path
) -> None:
    needs_hosts()
    with Hosts(2, tmp_path) as hosts:
        words = ["--jax", "--hosts", places, str(HERE / "operations.py")]
        text = hosts.run(words, COLLECTIVE_TIMEOUT="60").succeed(DEADLINE_S)
    results = re.findall(r"(\d+) checks, (\d+) wrong, over (\w+)", text)
    assert results == [(str(CHECKS), "0", backend)] * size, text
