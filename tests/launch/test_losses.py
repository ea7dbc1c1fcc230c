"""`collective run --min-ranks` and `--max-restarts`: lost ranks, survivors and restarts."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from collective.deadline import Deadline
from collective.launch.launcher import pause_after, run_attempts, wait
from collective.launch.variables import Run
from tests.support.interpreter import run_python
from tests.support.launches import DEADLINE_S, Launches, finish, launched, launches
from tests.support.mpi_launches import launch_of, needs

__all__ = ["launches"]  # the fixture


# -- survivors -----------------------------------------------------------------------


def test_min_ranks_lets_survivors_continue_and_lists_lost_ranks(launches: Launches) -> None:
    script = launches.script("""
        def gone(pid):
            try:
                return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] in "ZX"
            except (FileNotFoundError, ProcessLookupError):  # before it was opened; and after
                return True
        child = subprocess.Popen(["sleep", "600"])
        await_all()
        if rank == 1:
            open("child.tmp", "w").write(str(child.pid)); os.rename("child.tmp", "child")
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            raise ValueError("out of luck")
        while not os.path.exists("child") or not gone(int(open("child").read())):
            time.sleep(0.01)  # ended with its rank, and not with the run
        child.kill()
        print(os.environ["COLLECTIVE_MIN_RANKS"])
        """)
    done = launches.run("-n", "4", "--min-ranks", "2", script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 2", "[3] 2"]
    assert "rank 1 is lost (killed by SIGKILL); " in done.stderr
    summary = done.stderr[done.stderr.index("collective run: 2 of 4 ranks were lost:") :]
    assert "collective run: rank 1 was lost (killed by SIGKILL); it wrote nothing" in summary
    assert "collective run: rank 2 was lost (exit code 1); its traceback:\nTraceback" in summary
    assert "ValueError: out of luck\n" in summary
    launches.assert_nothing_left()


def test_ranks_learn_at_once_that_another_ended_before_init(launches: Launches) -> None:
    script = launches.script("""
        import collective
        if rank == 0:
            sys.exit(0)  # the launcher stops nobody for this
        collective.init(start_timeout=600)
        """)
    done = launches.run("-n", "2", script)
    assert done.returncode == 1
    assert "rank 0 of 2 ended before all ranks had met: exit code 0 [rank 1]" in done.stderr
    launches.assert_nothing_left()


@needs("mpich")
def test_rank_that_waits_in_mpi_learns_at_once_that_another_ended(tmp_path: Path) -> None:
    with launched(tmp_path, launch_of("mpich").python) as launches:
        script = launches.script("""
            import collective
            if rank == 0:
                sys.exit(0)
            collective.init(start_timeout=600)
            """)
        done = launches.run("-n", "2", "--backend", "mpi", script)
        assert done.returncode == 1
        assert "rank 0 of 2 ended before all ranks had met: exit code 0 [rank 1]" in done.stderr


def test_min_ranks_lets_ranks_meet_without_one_that_was_killed_before(launches: Launches) -> None:
    script = launches.script("""
        import collective
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with collective.init(start_timeout=600) as comm:
            print(comm.rank, comm.size, comm.all_gather_object(rank))
        """)
    done = launches.run("-n", "3", "--min-ranks", "2", script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[1] 0 2 [1, 2]", "[2] 1 2 [1, 2]"]
    launches.assert_nothing_left()


@pytest.mark.parametrize("backend", ["auto", "threads"])
def test_min_ranks_stops_run_with_too_few_survivors(launches: Launches, backend: str) -> None:
    script = launches.script("""
        import collective
        rank = collective.init().rank
        if rank:
            sys.exit(10 + rank)
        time.sleep(600)
        """)
    done = launches.run("-n", "3", "--backend", backend, "--min-ranks", "2", script, RANK="0",
                        WORLD_SIZE="3")  # fmt: skip
    assert done.returncode in (11, 12)
    assert "is lost (exit code 1" in done.stderr
    assert "2 of 3 ranks were lost, but 2 must be left to continue: rank " in done.stderr
    assert f"failed first (exit code {done.returncode})" in done.stderr
    launches.assert_nothing_left()


def test_min_ranks_lets_surviving_threads_continue(launches: Launches) -> None:
    path = launches.directory / "program.py"
    path.write_text("""
import collective
comm = collective.init()
if comm.rank == 1:
    raise KeyError("lost")
try:
    comm.barrier()
except collective.CommunicatorAbortedError:
    print("noticed")
""")
    done = launches.run("-n", "2", "--backend", "threads", "--min-ranks", "1", str(path))
    assert (done.returncode, done.stdout) == (0, "[0] noticed\n"), done.stderr
    assert "collective run: 1 of 2 ranks was lost:\n" in done.stderr
    assert "rank 1 was lost (exit code 1); its traceback:" in done.stderr


@pytest.mark.whole
@needs("openmpi")
def test_min_ranks_lets_open_mpi_shrink_after_exit(launches: Launches) -> None:
    """Open MPI started a wrapper process, which has to die before the other ranks can shrink."""
    script = launches.script("""
        from mpi4py import MPI
        comm = MPI.COMM_WORLD
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        try:
            comm.Barrier()
            if rank == 1:
                os._exit(3)
            while True:
                comm.Barrier()
        except MPI.Exception:
            comm.Revoke()
        print("left", comm.Shrink().allreduce(1))
        """)
    done = run_python(
        "-m", "collective", "run", "-n", "3", "--backend", "mpi", "--min-ranks", "2", script,
        python=launch_of("openmpi").python, cwd=launches.directory, env=launches.environment(),
        timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] left 2", "[2] left 2"]
    assert "rank 1 is lost (exit code 3)" in done.stderr
    launches.assert_nothing_left()


def test_finished_rank_counts_as_left_not_lost(launches: Launches) -> None:
    script = launches.script("""
        await_all()
        if rank == 0:
            sys.exit(0)
        while os.path.exists(f"/proc/{open('arrived-0').read()}"):
            time.sleep(0.01)
        if rank == 1:
            sys.exit(3)
        """)
    done = launches.run("-n", "3", "--min-ranks", "2", script)
    assert done.returncode == 0, done.stderr
    assert "rank 1 is lost (exit code 3); 2 of 3 ranks are left, and 2 are enough." in done.stderr
    assert "1 of 3 ranks was lost" in done.stderr


def test_ctrl_c_after_loss_interrupts_survivor_and_lists_loss(launches: Launches) -> None:
    script = launches.script("""
        if rank == 1:
            sys.exit(3)
        arrive()
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            print("cleaned up")
        """)
    process = launches.start("-n", "2", "--min-ranks", "1", script)
    assert process.stderr is not None
    assert "rank 1 is lost (exit code 3)" in process.stderr.readline()
    launches.until((launches.directory / "arrived-0").exists)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert (done.returncode, done.stdout) == (130, "[0] cleaned up\n")
    assert "1 of 2 ranks was lost" in done.stderr
    launches.assert_nothing_left()


# -- restarts ------------------------------------------------------------------------


def test_max_restarts_starts_all_ranks_with_new_store_and_secret(launches: Launches) -> None:
    script = launches.script("""
        store, names = os.environ["COLLECTIVE_STORE"], ("COLLECTIVE_SECRET", "COLLECTIVE_STORE")
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        assert os.environ["TORCHELASTIC_RESTART_COUNT"] == str(attempt)
        assert not os.path.exists(f"{store}/mine-{rank}")
        open(f"{store}/mine-{rank}", "w").close()
        if rank == 0:
            line = "{} {} {}".format(attempt, *(os.environ[name] for name in names))
            open("attempts", "a").write(line + "\\n")
        if attempt == 0 and rank == 1:
            raise ValueError("not yet")
        if attempt == 0:
            time.sleep(600)
        print("through")
        """)
    done = launches.run("-n", "2", "--max-restarts", "3", script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] through", "[1] through"]
    first = "collective run: rank 1 failed first (exit code 1); its traceback:"
    again = "ValueError: not yet\ncollective run: all 2 ranks start again in 0.5 s (restart 1 of 3)"
    assert first in done.stderr
    assert again in done.stderr
    lines = [line.split() for line in (launches.directory / "attempts").read_text().splitlines()]
    assert [line[0] for line in lines] == ["0", "1"]
    assert lines[0][1] != lines[1][1]
    assert lines[0][2] != lines[1][2]
    launches.assert_nothing_left()


def test_max_restarts_used_up_ends_with_last_exit_code(launches: Launches) -> None:
    script = launches.script("sys.exit(20 + int(os.environ['TORCHELASTIC_RESTART_COUNT']))")
    done = launches.run("-n", "1", "--max-restarts", "2", script)
    assert done.returncode == 22
    again = [line for line in done.stderr.splitlines() if "start again" in line]
    assert [line.partition("again ")[2] for line in again] == [
        "in 0.5 s (restart 1 of 2)",
        "in 1 s (restart 2 of 2)",
    ]
    assert done.stderr.endswith("rank 0 failed first (exit code 22); it wrote nothing to its "
                                "standard error.\n")  # fmt: skip
    launches.assert_nothing_left()


def test_ctrl_c_between_attempts_ends_the_run(launches: Launches) -> None:
    """The run ends, whether Ctrl-C comes in the pause or when the next ranks have started."""
    script = launches.script("""
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit(1)
        time.sleep(600)
        """)
    process = launches.start("-n", "2", "--max-restarts", "5", script)
    assert process.stderr is not None
    while "start again" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    assert finish(process).returncode == 130
    launches.assert_nothing_left()


class _Failing:
    """A supervisor whose ranks have failed."""

    failed = True

    def run(self) -> int:
        return 1


def test_ctrl_c_in_pause_names_the_cancelled_restart(capsys: pytest.CaptureFixture[str]) -> None:
    control, handle = os.pipe()
    os.write(handle, bytes([signal.SIGINT]))
    attempt = contextlib.nullcontext(_Failing())
    assert (
        run_attempts(lambda number, control: attempt, Run([], 2, {}, max_restarts=5), control)
        == 130
    )
    os.close(control)
    os.close(handle)
    assert capsys.readouterr().err.splitlines() == [
        "collective run: all 2 ranks start again in 0.5 s (restart 1 of 5)",
        "collective run: interrupted before restart 1 of 5",
    ]


def test_pause_after_grows_to_a_limit() -> None:
    assert [pause_after(quick) for quick in (0, 1, 2, 3, 100)] == [0.0, 0.5, 1.0, 2.0, 30.0]


@pytest.mark.parametrize(
    ("sent", "result"),
    [
        ([signal.SIGTERM], signal.SIGTERM),
        ([signal.SIGTSTP, signal.SIGINT], signal.SIGINT),
        ([None], signal.SIGKILL),  # the launcher is gone
        ([signal.SIGTSTP, signal.SIGCONT], None),
        ([], None),
    ],
)
def test_wait_ends_at_signal_or_deadline(
    sent: list[signal.Signals | None], result: int | None
) -> None:
    control, handle = os.pipe()
    for number in sent:
        if number is not None:
            os.write(handle, bytes([number]))
    if None in sent:
        os.close(handle)
    # A pause that does not end lasts long enough for the suite's own deadline to fail the test.
    assert wait(control, Deadline(600.0 if result else 0.0)) == result
    os.close(control)
    if None not in sent:
        os.close(handle)
