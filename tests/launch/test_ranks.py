"""Ranks that run jobs: each job gives one outcome for each rank, for every kind of starter."""

from __future__ import annotations

import os
import re
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from collective.errors import BackendUnavailableError
from collective.launch.command_starter import Command, CommandStarter
from collective.launch.outcome import Outcome, RankDiedError, RankHungError, RemoteError
from collective.launch.process_starter import ProcessStarter
from collective.launch.ranks import FunctionJob, Job, Participant, Ranks, Starter, ThreadStarter
from tests.support.interpreter import ROOT, run_python
from tests.support.launches import DEADLINE_S

PROGRAM = "import sys; from collective.launch import rank_line; rank_line.main(sys.argv[1:])"


def by_hand(address: str) -> list[Command]:
    """Return the commands that start two ranks without MPI."""
    shared = {"PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", PROGRAM, address]
    return [(command, {**shared, "RANK": str(rank)}) for rank in range(2)]


STARTERS: dict[str, Callable[[], Starter]] = {
    "threads": ThreadStarter,
    "processes": ProcessStarter,
    "commands": lambda: CommandStarter(2, by_hand),
}


@pytest.fixture(scope="module")
def kept() -> Iterator[dict[str, Ranks]]:
    """Yield ranks of each kind, shared by all tests; dead or closed ranks are replaced."""
    ranks_by_kind = {name: Ranks(2, starter()) for name, starter in STARTERS.items()}
    yield ranks_by_kind
    for ranks in ranks_by_kind.values():
        ranks.close()


@pytest.fixture(params=STARTERS)
def ranks(request: pytest.FixtureRequest, kept: dict[str, Ranks]) -> Ranks:
    return kept[request.param]


@pytest.fixture(params=["processes", "commands"])
def processes(request: pytest.FixtureRequest, kept: dict[str, Ranks]) -> Ranks:
    return kept[request.param]


def run(ranks: Ranks, function: Callable[..., Any], *args: Any, **options: Any) -> list[Outcome]:
    outcomes = ranks.run(FunctionJob(function, args), **{"timeout": 60.0, **options})
    return [outcomes[rank] for rank in range(2)]


def who(participant: Participant) -> tuple[int, int]:
    return participant.rank, os.getpid()


class Note:
    """An object that a rank keeps; it writes to a file how it was ended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def close(self) -> None:
        self.path.write_text("closed")

    def abort(self, reason: str) -> None:
        self.path.write_text(reason)


def keep(participant: Participant, folder: Path) -> int:
    participant.kept.setdefault("note", Note(folder / str(participant.rank)))
    return id(participant.kept["note"])


def raising(participant: Participant) -> int:
    if participant.rank == 1:
        raise ArithmeticError("no such number")
    return 5


def sleeping(participant: Participant, seconds: float) -> None:
    if participant.rank == 1:
        time.sleep(seconds)


def dying(participant: Participant) -> None:
    if participant.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def forking(participant: Participant, path: Path) -> None:
    """Let rank 1 die and leave a child that has inherited its open files."""
    if participant.rank == 1:
        if os.fork():
            os._exit(7)
        end = time.monotonic() + 60
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.05)
        os._exit(0)


def printing(participant: Participant) -> int:
    for _ in range(64):
        os.write(1, b"x" * 65535 + b"\n")
    return participant.rank


def lock(participant: Participant) -> Any:
    return threading.Lock()


def test_ranks_keep_processes_and_objects_between_jobs(ranks: Ranks, tmp_path: Path) -> None:
    first = [run(ranks, who), run(ranks, keep, tmp_path)]
    assert [outcome.value[0] for outcome in first[0]] == [0, 1]
    second = [run(ranks, who), run(ranks, keep, tmp_path)]
    assert [[o.value for o in each] for each in first] == [
        [o.value for o in each] for each in second
    ]
    ranks.close()
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["closed"] * 2


def test_rank_exception_has_traceback_of_user_code_only(ranks: Ranks) -> None:
    well, failed = run(ranks, raising)
    assert (well.value, well.error) == (5, None)
    assert isinstance(failed.error, ArithmeticError)
    assert "in raising" in failed.traceback
    assert "ranks.py" not in failed.traceback.replace(__file__, "")


def test_rank_that_hangs_is_reported_with_stack_and_replaced(ranks: Ranks) -> None:
    before = run(ranks, who)
    _, hung = run(ranks, sleeping, 90.0, timeout=0.5)
    assert isinstance(hung.error, RankHungError)
    assert "in sleeping" in hung.error.stack
    after = run(ranks, who)
    assert [outcome.value[0] for outcome in after] == [0, 1]
    in_threads = before[0].value[1] == os.getpid()
    assert in_threads or after[1].value != before[1].value


class SlowJob(Job):
    """A job that takes two seconds to load, as on a busy machine."""

    def load(self) -> None:
        time.sleep(2.0)

    def run(self, participant: Participant) -> int:
        return participant.rank


def test_ranks_may_start_for_as_long_as_the_job_may_take(
    processes: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(processes, who)
    monkeypatch.setattr("collective.launch.ranks.LOAD_S", 0.5)
    outcomes = processes.run(SlowJob(), 60.0)
    assert [outcomes[rank].value for rank in range(2)] == [0, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_has_not_started_in_time_is_ended_with_its_stack(
    processes: Ranks, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    assert run(processes, who)
    monkeypatch.setattr("collective.launch.ranks.LOAD_S", 0.5)
    error = processes.run(SlowJob(), 0.1)[rank].error
    assert str(error).startswith(f"rank {rank}: no start after 0.5 s; the rank was ended")
    assert "in load" in error.stack


def test_ranks_that_have_all_been_ended_are_replaced(ranks: Ranks) -> None:
    outcomes = run(ranks, all_sleeping, 90.0, timeout=0.5)
    assert [type(outcome.error) for outcome in outcomes] == [RankHungError] * 2
    assert [outcome.value[0] for outcome in run(ranks, who)] == [0, 1]


def all_sleeping(participant: Participant, seconds: float) -> None:
    time.sleep(seconds)


def test_ranks_get_only_grace_time_after_first_failure(ranks: Ranks) -> None:
    assert run(ranks, who)
    outcomes = run(ranks, failing_while_the_other_waits, timeout=600.0, grace=0.5)
    assert isinstance(outcomes[0].error, ArithmeticError)
    assert isinstance(outcomes[1].error, RankHungError)


def failing_while_the_other_waits(participant: Participant) -> None:
    if participant.rank == 0:
        raise ArithmeticError("first")
    time.sleep(90.0)


def test_rank_that_is_killed_is_reported_and_replaced(processes: Ranks) -> None:
    before = run(processes, who)
    well, dead = run(processes, dying)
    assert well.error is None
    assert isinstance(dead.error, RankDiedError)
    after = run(processes, who)
    assert after[1].value != before[1].value


def test_rank_death_error_contains_its_last_output(kept: dict[str, Ranks]) -> None:
    _, dead = run(kept["commands"], complaining)
    assert re.search(r"rank 1: its process has ended.*\n.*as it was told", str(dead.error))


def complaining(participant: Participant) -> None:
    if participant.rank == 1:
        os.write(2, b"it goes, as it was told\n")
        os._exit(3)


def test_rank_death_is_noticed_despite_forked_child(processes: Ranks, tmp_path: Path) -> None:
    # The child, too, holds the rank's end of the control connection.
    try:
        _, dead = run(processes, forking, tmp_path / "over", timeout=20.0)
    finally:
        (tmp_path / "over").touch()
    assert isinstance(dead.error, RankDiedError)


def test_ranks_may_write_more_than_a_pipe_holds(kept: dict[str, Ranks]) -> None:
    assert [outcome.value for outcome in run(kept["commands"], printing)] == [0, 1]


def test_rank_that_connects_and_says_nothing_does_not_hold_up_the_start() -> None:
    program = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
    command = [sys.executable, "-c", f"{program} s.recv(1)"]
    starter = CommandStarter(1, lambda address: [([*command, address], {})], patience=0.5)
    with pytest.raises(BackendUnavailableError, match="0 of 1 ranks have started"):
        starter.start([0])


def test_ranks_connect_back_with_long_temporary_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with Ranks(2, CommandStarter(2, by_hand)) as ranks:
        assert [outcome.value[0] for outcome in run(ranks, who)] == [0, 1]
    assert list(folder.iterdir()) == []


def test_function_or_result_that_cannot_be_pickled_raises(processes: Ranks) -> None:
    with pytest.raises(TypeError, match="top of a module"):
        processes.run(FunctionJob(lambda one: 1), 60.0)
    for outcome in run(processes, lock):
        assert isinstance(outcome.error, RemoteError)
        assert "the result, a lock" in str(outcome.error)
    assert [outcome.value[0] for outcome in run(processes, who)] == [0, 1]


OF_MAIN = """
import multiprocessing.process
from collective.testing import run_ranks
start = multiprocessing.process.BaseProcess.start
def start_aloud(process):
    print("a process starts")
    start(process)
multiprocessing.process.BaseProcess.start = start_aloud
def total(comm):
    return comm.rank
print(run_ranks(2, total, backend="shm"))
"""


@pytest.mark.parametrize(
    ("arguments", "program", "place"),
    [
        (["-"], OF_MAIN, "<stdin>"),
        (["-c", OF_MAIN], "", "<string>"),
        (
            ["-c", "import builtins; builtins.get_ipython = print" + OF_MAIN],
            "",
            "a notebook or an ",
        ),
        (["-"], OF_MAIN.replace("2, total", "2, print, total"), "<stdin>"),
    ],
    ids=["stdin", "command", "notebook", "argument"],
)
def test_function_that_processes_cannot_import_is_refused_before_they_start(
    arguments: list[str], program: str, place: str
) -> None:
    done = run_python(*arguments, stdin=program, timeout=DEADLINE_S)
    assert done.returncode == 1
    assert done.stdout == ""
    error = done.stderr.splitlines()[-1]
    assert error.startswith(
        "TypeError: run: functions for ranks that are processes must live in a "
    )
    assert f"total is defined in {place}" in error
    assert error.endswith(
        "Save it in a .py file, and import it from there; or use backend='threads'."
    )


def test_program_from_standard_input_may_start_ranks_with_an_importable_function() -> None:
    done = run_python(
        "-",
        stdin="""
import os
from collective.launch.process_starter import ProcessStarter
from collective.launch.ranks import FunctionJob, Ranks
from tests.launch.test_ranks import who
with Ranks(2, ProcessStarter()) as ranks:
    print([rank for rank, _ in ranks.results(FunctionJob(who), 60.0)], __file__)
""",
        timeout=DEADLINE_S,
    )
    assert done.stdout == "[0, 1] <stdin>\n", done.stderr


def test_function_of_the_program_itself_is_refused_for_commands(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("""
from collective.launch.command_starter import CommandStarter
from collective.launch.ranks import FunctionJob
def work(one):
    pass
CommandStarter(2, lambda address: []).encode(FunctionJob(work))
""")
    done = run_python(program, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=DEADLINE_S)
    assert "work is defined in the program that was started. Save it" in done.stderr


def test_commands_that_start_no_ranks_raise_with_their_output() -> None:
    def commands(address: str) -> list[Command]:
        return [(["sh", "-c", "echo no ranks today; exit 3"], {})]

    with (
        Ranks(2, CommandStarter(2, commands)) as ranks,
        pytest.raises(BackendUnavailableError, match=r"(?s)0 of 2 ranks.*no ranks today"),
    ):
        run(ranks, who)


SEGMENT = """
import mmap, sys
file = open(sys.argv[2], 'wb+')
file.truncate(4096)
memory = mmap.mmap(file.fileno(), 4096)
"""


def test_ranks_that_hang_are_ended_with_shared_memory_of_mpi_library() -> None:
    segment = Path(f"/dev/shm/mpich_shm_{secrets.token_hex(8)}_0")

    def commands(address: str) -> list[Command]:
        ((command, variables), other) = by_hand(address)
        return [([*command[:2], SEGMENT + PROGRAM, address, str(segment)], variables), other]

    with Ranks(2, CommandStarter(2, commands)) as ranks:
        outcomes = run(ranks, hanging_alone, timeout=0.5)
        assert isinstance(outcomes[0].error, RankHungError)
    exists = segment.exists()
    segment.unlink(missing_ok=True)
    assert not exists


def hanging_alone(participant: Participant) -> None:
    if participant.rank == 0:
        time.sleep(90.0)


def test_rank_that_connects_and_sends_nothing_has_not_started() -> None:
    def commands(address: str) -> list[Command]:
        program = (
            "import socket, sys; from collective.platform import short_path\n"
            "with short_path(sys.argv[1]) as path: socket.socket(socket.AF_UNIX).connect(path)"
        )
        return [([sys.executable, "-c", program, address], {"PYTHONPATH": str(ROOT)})]

    with (
        Ranks(2, CommandStarter(2, commands)) as ranks,
        pytest.raises(BackendUnavailableError, match="0 of 2 ranks"),
    ):
        run(ranks, who)


def test_interrupted_job_leaves_no_results_for_next_job(
    processes: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(processes, who)
    with monkeypatch.context() as patch:
        patch.setattr(processes._starter, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(processes, raising)
    assert [outcome.value[0] for outcome in run(processes, who)] == [0, 1]


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_ranks_that_are_interrupted_between_jobs_run_the_next_job(processes: Ranks) -> None:
    first = [outcome.value for outcome in run(processes, process_and_handler)]
    # Many rounds, because a rank may still be in its send when its outcome has already arrived.
    for _ in range(200):
        for pid, _ in first:
            os.kill(pid, signal.SIGINT)
        assert [outcome.value for outcome in run(processes, process_and_handler)] == first


def process_and_handler(participant: Participant) -> tuple[int, bool]:
    return os.getpid(), signal.getsignal(signal.SIGINT) is signal.default_int_handler
