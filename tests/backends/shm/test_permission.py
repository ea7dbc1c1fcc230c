"""Permission to read a rank's memory under Yama. The tests simulate Yama; the processes are real.

``prctl`` is recorded and not called, because most machines have no Yama and would show no effect.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collective.backends.shm import permission
from collective.backends.shm.permission import Permission
from collective.communicator import Communicator
from tests.support.on_ranks import on_ranks, ranks_of

two = ranks_of(("shm", 2))
#: Program that starts two children, and prints its own process ID and theirs.
_PARENT = """
import os, subprocess, sys
words = [sys.executable, "-c", "input()"]
children = [subprocess.Popen(words, stdin=subprocess.PIPE) for _ in "ab"]
print(os.getpid(), *(child.pid for child in children), flush=True)
input()
for child in children:
    child.communicate(b"\\n")
"""


class Family:
    """A process and its two children, which end together with the process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PARENT],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.parent, *self.children = map(int, self._process.stdout.readline().split())

    def close(self) -> None:
        self._process.communicate("\n", timeout=60)


@pytest.fixture
def family() -> Iterator[Family]:
    started = Family()
    yield started
    started.close()


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Record the arguments of prctl, under a ptrace scope of 1."""
    scope = tmp_path / "ptrace_scope"
    scope.write_text("1\n")
    arguments: list[int] = []
    monkeypatch.setattr(permission, "_SCOPE", scope)
    monkeypatch.setattr(permission, "allow_to_read", arguments.append)
    monkeypatch.setattr(permission, "_granted", type(permission._granted)())
    return arguments


def test_siblings_grant_permission_to_parent(allowed: list[int], family: Family) -> None:
    permission_held = Permission(family.children)
    assert allowed == [family.parent]
    permission_held.withdraw()
    permission_held.withdraw()
    assert allowed == [family.parent, 0]


def test_rank_that_started_others_is_common_ancestor(allowed: list[int], family: Family) -> None:
    permission_held = Permission([family.parent, *family.children])
    assert allowed == [family.parent]
    permission_held.withdraw()


def test_permission_follows_widest_open_communicator(allowed: list[int], family: Family) -> None:
    wide = Permission([os.getpid(), *family.children])
    narrow = Permission(family.children)
    wide.withdraw()
    narrow.withdraw()
    assert allowed == [os.getpid(), os.getpid(), family.parent, 0]


def test_dropped_permission_widens_nothing(allowed: list[int], family: Family) -> None:
    dropped = Permission([os.getpid(), *family.children])
    del dropped
    permission_held = Permission(family.children)
    assert allowed[-1] == family.parent
    permission_held.withdraw()


def test_processes_without_common_ancestor_get_no_permission(
    allowed: list[int], family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    permission_held = Permission(family.children)
    find_ancestors = permission._ancestors
    monkeypatch.setattr(
        permission, "_ancestors", lambda pid: [7] if pid == 7 else find_ancestors(pid)
    )
    Permission([os.getpid(), 7]).withdraw()
    assert allowed == [family.parent], "the permission of another communicator has changed"
    permission_held.withdraw()


@pytest.mark.parametrize("scope", ["0", "2", "3", None])
def test_scope_other_than_1_needs_no_permission(allowed: list[int], scope: str | None) -> None:
    if scope is None:
        permission._SCOPE.unlink()
    else:
        permission._SCOPE.write_text(scope)
    Permission([os.getpid()]).withdraw()
    assert allowed == []


def test_forked_child_inherits_no_permission(allowed: list[int]) -> None:
    permission_held = Permission([os.getpid()])
    child = os.fork()
    if child == 0:
        os._exit(len(permission._granted))
    assert os.waitpid(child, 0)[1] == 0
    permission_held.withdraw()


@contextlib.contextmanager
def _pretended() -> Iterator[list[int]]:
    """Let this process see a ptrace scope of 1, and record the permissions that it grants."""
    original, permitted = (permission._SCOPE, permission.allow_to_read), list[int]()
    with tempfile.NamedTemporaryFile("w") as scope:
        scope.write("1")
        scope.flush()
        permission._SCOPE, permission.allow_to_read = Path(scope.name), permitted.append
        try:
            yield permitted
        finally:
            permission._SCOPE, permission.allow_to_read = original


@on_ranks("two")
def test_communicator_grants_permission_until_closed(comm: Communicator) -> None:
    with _pretended() as permitted:
        group = comm.dup()
        pids = group.all_gather(np.array([os.getpid()])).tolist()
        wanted = permission._common_ancestor()
        group.close()
    assert permitted == [wanted, 0]
    assert all(wanted in permission._ancestors(pid) for pid in pids)


@on_ranks("two")
def test_communicator_without_single_copy_grants_nothing(comm: Communicator) -> None:
    backend: Any = comm.inner.transport
    disabled = backend._disabled
    backend._disabled = "" if comm.rank == 1 else "shm_single_copy"
    with _pretended() as permitted:
        group = comm.dup()
        assert len(permission._granted) == 0
        group.close()
    backend._disabled = disabled
    assert len(permitted) == 2 * comm.rank
    assert permitted[1:] == [0] * comm.rank
