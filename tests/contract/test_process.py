"""How it is seen of a process of this host that it has ended."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from collective.contract.process import RankProcess
from tests.support.interpreter import started

PRINTING = "from collective.contract.process import RankProcess as P; print(P.own(), flush=True); "


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[str], RankProcess]]:
    """Another process, as it says itself."""
    with started("-c", PRINTING + "input()") as running:
        assert running.stdout is not None
        found = RankProcess.parse(running.stdout.readline().strip())
        assert found is not None
        yield running, found


def test_one_that_runs_has_not_ended(other: tuple[subprocess.Popen[str], RankProcess]) -> None:
    assert not other[1].has_ended()


def test_one_that_its_parent_has_not_looked_at_has_ended(
    other: tuple[subprocess.Popen[str], RankProcess],
) -> None:
    running, process = other
    running.kill()
    os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)
    assert process.has_ended()


def test_one_that_is_gone_has_ended(other: tuple[subprocess.Popen[str], RankProcess]) -> None:
    running, process = other
    running.kill()
    running.wait()
    assert process.has_ended()


def test_another_of_the_same_number_is_not_it() -> None:
    own = RankProcess.own()
    assert own is not None
    assert own._replace(started=own.started - 1).has_ended()


def test_nothing_is_known_of_other_hosts() -> None:
    own = RankProcess.own()
    assert own is not None
    assert not own._replace(host="another", pid=2**22 + 1).has_ended()


@pytest.mark.parametrize("text", [None, "", "None", "host", "host 12", "host x-y", 7])
def test_what_is_none_is_not_believed(text: object) -> None:
    assert RankProcess.parse(text) is None


def test_a_process_that_cannot_be_looked_at_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    own = RankProcess.own()
    assert own is not None

    def read(path: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    monkeypatch.setattr(Path, "read_bytes", read)
    assert not own.has_ended()
