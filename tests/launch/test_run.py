"""`collective run` from outside: starts of programs, and failures of ranks."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.support.interpreter import run_python
from tests.support.launches import DEADLINE_S, NOISE_S, PROMISED_S, Launches, launches

__all__ = ["launches"]  # the fixture

# -- starting ------------------------------------------------------------------------


def test_run_passes_arguments_and_prefixes_output(launches: Launches) -> None:
    script = launches.script("print(sys.argv[1:], rank)")
    done = launches.run("-n", "3", script, "-n", "5", "--", "-m", "x")
    assert done.returncode == 0, done.stderr
    expected = [f"[{r}] ['-n', '5', '--', '-m', 'x'] {r}" for r in range(3)]
    assert sorted(done.stdout.splitlines()) == expected
    assert done.stderr == ""
    launches.assert_nothing_left()


def test_run_passes_arguments_to_module(launches: Launches) -> None:
    launches.script("print(__name__, sys.argv[1:])", "program.py")
    done = launches.run("-n", "1", "-m", "program", "-m", "--backend", "x")
    assert done.stdout == "[0] __main__ ['-m', '--backend', 'x']\n"


def test_run_sets_environment_of_ranks(launches: Launches) -> None:
    script = launches.script("""
        names = ["COLLECTIVE_BACKEND", "COLLECTIVE_TIMEOUT", "MASTER_ADDR", "OMP_NUM_THREADS"]
        names += ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
        names += ["COLLECTIVE_RANK", "COLLECTIVE_SIZE", "COLLECTIVE_LOCAL_RANK"]
        names += ["COLLECTIVE_LOCAL_SIZE"]
        print(" ".join(f"{name}={os.environ.get(name)}" for name in names))
        import socket, stat
        with socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))):
            pass
        status = os.stat(os.environ["COLLECTIVE_STORE"])
        assert stat.S_IMODE(status.st_mode) == 0o700 and status.st_uid == os.getuid()
        """)
    run = ("-n", "1", "--backend", "shm", "--timeout", "7", script)
    cores = len(os.sched_getaffinity(0))
    done = launches.run(*run)
    assert done.stdout == (
        f"[0] COLLECTIVE_BACKEND=shm COLLECTIVE_TIMEOUT=7.0 MASTER_ADDR=127.0.0.1 "
        f"OMP_NUM_THREADS={cores} RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 "
        "COLLECTIVE_RANK=0 COLLECTIVE_SIZE=1 COLLECTIVE_LOCAL_RANK=0 COLLECTIVE_LOCAL_SIZE=1\n"
    ), done.stderr
    assert "OMP_NUM_THREADS=11" in launches.run(*run, OMP_NUM_THREADS="11").stdout


def test_run_hides_variables_of_outer_launch(launches: Launches) -> None:
    script = launches.script("print(os.environ['COLLECTIVE_RANK'], size)")
    done = launches.run("-n", "1", script, COLLECTIVE_RANK="7", COLLECTIVE_SIZE="9", RANK="7")
    assert done.stdout == "[0] 0 1\n", done.stderr


def test_run_makes_package_importable_without_install(launches: Launches) -> None:
    script = launches.script("from collective.errors import CollectiveError; print('found')")
    done = run_python(
        "-m", "collective", "run", "-n", "1", launches.directory / script,
        env=launches.environment(PYTHONPATH=""), timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.stdout == "[0] found\n", done.stderr


def test_run_passes_standard_input_to_rank_0(launches: Launches) -> None:
    script = launches.script("print(repr(sys.stdin.read()))")
    done = launches.execute("-m", "collective", "run", "-n", "2", script, stdin="given")
    assert sorted(done.stdout.splitlines()) == ["[0] 'given'", "[1] ''"]


@pytest.mark.parametrize(
    "program",
    [["-n", "2", "-c"], ["--nproc-per-node", "2", "python", "-c"]],
    ids=["text", "as after mpiexec"],
)
def test_run_starts_a_text(launches: Launches, program: list[str]) -> None:
    done = launches.run(*program, "import os; print(os.environ['COLLECTIVE_SIZE'])")
    assert sorted(done.stdout.splitlines()) == ["[0] 2", "[1] 2"], done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "2", "absent.py"], "script 'absent.py': no such file"),
        (["-n", "0", "x.py"], "'0'; expected an integer >= 1"),
        (["-n", "two", "x.py"], "'two'; expected an integer >= 1"),
        (["-n", "2"], "no program given"),
        (["-n", "2", "--timeout", "-1", "script.py"], "a number of seconds > 0"),
        (["-n", "2", "--min-ranks", "3", "script.py"], "min_ranks: 3 (argument) with 2 ranks"),
        (["-n", "2", "--min-ranks", "0", "script.py"], "min_ranks: '0' (argument); it must be an "),
        (["-n", "2", "--max-restarts", "-1", "script.py"], "'-1'; expected an integer >= 0"),
        (
            ["-n", "2", "--backend", "threads", "--max-restarts", "1", "script.py"],
            "Use --backend shm",
        ),
    ],
)
def test_run_with_wrong_arguments_starts_nothing(
    launches: Launches, arguments: list[str], words: str
) -> None:
    launches.script("print('started')")
    done = launches.run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stdout == ""
    launches.assert_nothing_left()


def test_run_with_misspelt_setting_prints_one_line(launches: Launches) -> None:
    done = launches.run("-n", "3", launches.script(""), COLLECTIVE_TIMOUT="3")
    assert done.returncode == 2
    assert done.stderr.count("COLLECTIVE_TIMEOUT") >= 1
    assert len(done.stderr.splitlines()) == 1


# -- failing -------------------------------------------------------------------------


def test_first_failure_stops_other_ranks_and_is_shown_last(launches: Launches) -> None:
    script = launches.script("""
        await_all()
        if rank == 1:
            def innermost():
                die(ValueError("this is why"))
            innermost()
        # The launcher also ends ranks that ignore SIGTERM.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "600"])
        time.sleep(600)
        """)
    done = launches.run("-n", "3", script)
    took = time.monotonic() - float((launches.directory / "died").read_text())
    assert took < PROMISED_S + NOISE_S
    assert done.returncode == 1
    _, verdict = done.stderr.split("collective run: ")
    lines = verdict.splitlines()
    assert lines[0] == "rank 1 failed first (exit code 1); its traceback:"
    assert lines[1] == "Traceback (most recent call last):"
    assert "in innermost" in verdict
    assert lines[-1] == "ValueError: this is why"
    launches.assert_nothing_left()


def test_other_ranks_share_one_peer_lost_error(launches: Launches) -> None:
    script = launches.script("""
        from collective.errors import PeerLostError  # The import would take too long later.
        await_all()
        if rank == 0:
            die(ValueError("the cause"))
        while not os.path.exists("died"):
            time.sleep(0.01)
        raise PeerLostError("rank 0 is gone")
        """)
    done = launches.run("-n", "3", script)
    assert done.stderr.startswith(
        "collective run: ranks 1, 2 failed, too: PeerLostError: rank 0 is gone, at "
    )
    assert done.stderr.count("PeerLostError: rank 0 is gone") == 1
    assert "rank 0 failed first" in done.stderr
    assert done.stderr.endswith("ValueError: the cause\n")


def test_rank_with_peer_failed_error_is_not_named_first(launches: Launches) -> None:
    script = launches.script("""
        from collective.errors import PeerFailedError
        await_all()
        if rank == 1:
            text = "Traceback (most recent call last):\\nKeyError: 'x'"
            die(PeerFailedError(f"all_reduce: rank 0 failed; its traceback:\\n{text}"))
        import traceback
        cause = KeyError("x")
        while not os.path.exists("died"):
            time.sleep(0.01)
        with open("arrived-1") as file:
            other = f"/proc/{file.read()}"
        # Write and exit at once: the launcher does not wait long for this rank.
        sys.stderr.write("".join(traceback.format_exception(cause)))
        sys.stderr.flush()
        while os.path.exists(other):
            time.sleep(0.001)
        os._exit(1)
        """)
    done = launches.run("-n", "2", script)
    assert "collective run: rank 0 failed first (exit code 1)" in done.stderr


@pytest.mark.parametrize(
    ("statement", "code", "words"),
    [
        ("sys.exit(3)", 3, "(exit code 3); it wrote nothing"),
        ("sys.exit('out of data')", 1, "(exit code 1); the last lines"),
        ("os.abort()", 128 + signal.SIGABRT, "(killed by SIGABRT)"),
        ("os.kill(os.getpid(), 9)", 128 + signal.SIGKILL, "(killed by SIGKILL)"),
        ("sys.exit(0)", 0, ""),
    ],
)
def test_run_returns_exit_code_of_first_failure(
    launches: Launches, statement: str, code: int, words: str
) -> None:
    script = launches.script(f"""
        await_all()
        if rank == 1:
            {statement}
        time.sleep({600 if code else 0})
        """)
    done = launches.run("-n", "2", script)
    assert done.returncode == code
    assert words in done.stderr
    launches.assert_nothing_left()


def test_run_ends_children_of_killed_rank(launches: Launches) -> None:
    script = launches.script("""
        # One process in the rank's group, one in its own session, each with a child.
        for own_session in (False, True):
            command = ["sh", "-c", "sleep 600 & sleep 600"]
            subprocess.Popen(command, start_new_session=own_session)
        await_all()
        if rank == 0:
            open("died", "w").write(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        """)
    done = launches.run("-n", "2", script)
    took = time.monotonic() - float((launches.directory / "died").read_text())
    assert took < PROMISED_S + NOISE_S
    assert done.returncode == 137
    launches.assert_nothing_left()


def test_run_ends_processes_left_by_ranks(launches: Launches) -> None:
    script = launches.script("subprocess.Popen(['sleep', '600'], start_new_session=True)")
    done = launches.run("-n", "2", script)
    assert done.returncode == 0
    launches.assert_nothing_left()
