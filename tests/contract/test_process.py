"""Detecting that a process of this host has ended."""

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
    """Yield a running process, and the identity that it reports about itself."""
    with started("-c", PRINTING + "input()") as running:
        assert running.stdout is not None
        process = RankProcess.parse(running.stdout.readline().strip())
        assert process is not None
        yield running, process


def test_running_process_has_not_ended(other: tuple[subprocess.Popen[str], RankProcess]) -> None:
    assert not other[1].has_ended()


def test_zombie_process_has_ended(
    other: tuple[subprocess.Popen[str], RankProcess],
) -> None:
    running, process = other
    running.kill()
    os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)
    assert process.has_ended()


def test_reaped_process_has_ended(other: tuple[subprocess.Popen[str], RankProcess]) -> None:
    running, process = other
    running.kill()
    running.wait()
    assert process.has_ended()


def test_process_with_reused_pid_has_ended() -> None:
    own = RankProcess.own()
    assert own is not None
    assert own._replace(started=own.started - 1).has_ended()


def test_process_of_other_host_has_not_ended() -> None:
    own = RankProcess.own()
    assert own is not None
    assert not own._replace(host="another", pid=2**22 + 1).has_ended()


@pytest.mark.parametrize("text", [None, "", "None", "host", "host 12", "host x-y", 7])
def test_parse_of_malformed_text_returns_none(text: object) -> None:
    assert RankProcess.parse(text) is None


def test_process_with_unreadable_state_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    own = RankProcess.own()
    assert own is not None

    def read(path: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    monkeypatch.setattr(Path, "read_bytes", read)
    assert not own.has_ended()
