"""Ranks that are copies of a program, forked by one copy of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from collective import BackendUnavailableError
from collective.inner import Participant, RankDiedError, Ranks
from collective.launch.fork_starter import ForkServer, ForkStarter
from collective.launch.ranks import FunctionJob

LIMIT_S = 60.0
STATE: dict[str, Any] = {}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    STATE["at the copy"] = "copied"
    server = ForkServer(
        lambda: STATE.update(begun=True), lambda: (tmp_path / f"ended-{os.getpid()}").touch()
    )
    STATE.clear()
    yield server
    server.close()


def run(server: ForkServer, function: Any, size: int = 2) -> list[Any]:
    with Ranks(size, ForkStarter(server)) as ranks:
        return ranks.results(FunctionJob(function), LIMIT_S)


def state(participant: Participant) -> Any:
    return dict(STATE)


def test_rank_has_the_objects_of_the_moment_of_the_copy(server: ForkServer) -> None:
    assert run(server, state) == [{"at the copy": "copied", "begun": True}] * 2


def variable(participant: Participant) -> str | None:
    return os.environ.get("SET_LATER")


def test_rank_has_the_variables_of_its_start(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SET_LATER", "1")
    assert run(server, variable) == ["1", "1"]


def pid(participant: Participant) -> int:
    return os.getpid()


def test_rank_calls_the_last_function_when_it_is_dismissed(
    server: ForkServer, tmp_path: Path
) -> None:
    pids = run(server, pid)
    assert {path.name for path in tmp_path.iterdir()} == {f"ended-{each}" for each in pids}


def exit_or_kill(participant: Participant) -> None:
    if participant.rank == 0:
        os._exit(7)
    os.kill(os.getpid(), signal.SIGKILL)


def test_death_of_a_rank_has_its_exit_code_and_the_rank_is_replaced(server: ForkServer) -> None:
    with Ranks(2, ForkStarter(server)) as ranks:
        outcomes = ranks.run(FunctionJob(exit_or_kill), LIMIT_S)
        errors = [outcomes[rank].error for rank in range(2)]
        assert all(isinstance(error, RankDiedError) for error in errors)
        assert [getattr(error, "exitcode", None) for error in errors] == [7, -signal.SIGKILL]
        assert len(set(ranks.results(FunctionJob(pid), LIMIT_S))) == 2


def parent(participant: Participant) -> int:
    return os.getppid()


def test_start_without_the_server_is_unavailable(server: ForkServer) -> None:
    (server_pid,) = run(server, parent, 1)
    os.kill(server_pid, signal.SIGKILL)
    with pytest.raises(BackendUnavailableError, match="rank 0 cannot start"):
        run(server, pid, 1)
