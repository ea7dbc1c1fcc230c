"""Parts that `collective run` shows of the tracebacks that ranks write."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.support.launches import Launches, finish, launched, launches

__all__ = ["launches"]  # the fixture

HEAD = "Traceback (most recent call last):"
MISMATCH = """
import collective, numpy as np
def main():
    comm = collective.init()
    comm.all_reduce(np.ones(5 if comm.rank == 7 else 4))
main()
"""


@pytest.fixture(scope="module")
def mismatch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Output of 16 ranks, of which one makes another call."""
    with launched(tmp_path_factory.mktemp("mismatch")) as launches:
        (launches.directory / "mismatch.py").write_text(MISMATCH)
        yield launches.run("-n", "16", "mismatch.py").stderr


def test_mismatch_of_16_ranks_fits_on_a_screen(mismatch: str) -> None:
    rows = sum(max(1, -(-len(line) // 80)) for line in mismatch.splitlines())
    assert rows <= 24
    assert mismatch.count("MismatchError") == 1


def test_mismatch_groups_the_ranks_with_equal_calls(mismatch: str) -> None:
    assert "\n  ranks 0-6, 8-15: all_reduce(float64[4], op=sum) at " in mismatch
    assert "\n  rank 7: all_reduce(float64[5], op=sum) at " in mismatch


def test_mismatch_hides_the_frames_of_the_package(mismatch: str) -> None:
    assert "frames inside collective are hidden; --verbose shows them)" in mismatch
    assert "collective/communicator" not in mismatch
    assert "in main" in mismatch


def test_verbose_run_shows_all_frames_of_all_ranks(launches: Launches) -> None:
    script = launches.script(MISMATCH.replace("7", "1"))
    done = launches.run("-n", "3", "--verbose", script)
    for rank in range(3):
        assert f"[{rank}] collective.errors.MismatchError: " in done.stderr
    assert done.stderr.count("in raise_mismatch\n") == 4  # each rank, and the first failure again
    assert "hidden" not in done.stderr


def test_threads_share_a_traceback(launches: Launches) -> None:
    script = launches.script("raise ValueError('of all')")
    done = launches.run("-n", "3", "--backend", "threads", script, RANK="0", WORLD_SIZE="3")
    assert done.stderr.startswith("collective run: ranks 0-2 failed, rank ")
    assert done.stderr.count("ValueError: of all") == 1


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("import absent_module", "ModuleNotFoundError: No module named 'absent_module'"),
        ("x = = 1", "SyntaxError: invalid syntax"),
        ("import broken_module", "SyntaxError: invalid syntax"),
        ("sys.stderr.write(''); open('absent')", "FileNotFoundError: "),
    ],
)
def test_equal_failures_are_shown_once(launches: Launches, statement: str, words: str) -> None:
    launches.script("x = = 1", "broken_module.py")
    done = launches.run("-n", "3", launches.script(statement))
    assert done.stderr.startswith("collective run: ranks 0-2 failed, rank ")
    assert done.stderr.count(words) == 1
    assert done.returncode == 1


def test_chained_causes_are_shown_once(launches: Launches) -> None:
    done = launches.run("-n", "2", launches.script("""
        try:
            {}["key"]
        except KeyError as error:
            raise RuntimeError(f"rank {rank} has no key") from error
        """))  # fmt: skip
    assert done.stderr.count(HEAD) == 2
    assert done.stderr.count("KeyError: 'key'") == 1
    assert done.stderr.count("has no key\n") == 1


def test_exception_groups_are_shown_once(launches: Launches) -> None:
    done = launches.run("-n", "2", launches.script("""
        errors = []
        for name in ("one", "two"):
            try:
                raise ValueError(name)
            except ValueError as error:
                errors.append(error)
        raise ExceptionGroup("several", errors)
        """))  # fmt: skip
    assert done.stderr.count("  | ExceptionGroup: several (2 sub-exceptions)") == 1
    assert done.stderr.count("    | ValueError: one") == 1
    assert done.stderr.rstrip().endswith("+------------------------------------")


def test_program_that_goes_on_after_a_traceback_shows_it(launches: Launches) -> None:
    script = launches.script("""
        import traceback
        try:
            1 / 0
        except ZeroDivisionError:
            traceback.print_exc()
        while not os.path.exists("seen"):
            time.sleep(0.01)
        """)
    process = launches.start("-n", "2", script)
    assert process.stderr is not None
    lines = []
    while sum("ZeroDivisionError" in line for line in lines) < 2:
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    (launches.directory / "seen").touch()
    done = finish(process)
    assert done.returncode == 0
    for rank in range(2):
        assert f"[{rank}] {HEAD}\n" in lines
        assert f"[{rank}] ZeroDivisionError: division by zero\n" in lines
    assert done.stderr == ""


def test_traceback_stays_before_what_the_rank_prints_next(launches: Launches) -> None:
    script = launches.script("""
        import traceback
        try:
            1 / 0
        except ZeroDivisionError:
            traceback.print_exc()
        time.sleep(0.1)
        print("goes on")
        """)
    done = launches.execute(
        "-c",
        "import os, sys; os.dup2(1, 2); from collective.tools.cli.main import main; main()",
        "run", "-n", "1", script,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0] == f"[0] {HEAD}"
    assert lines[-2:] == ["[0] ZeroDivisionError: division by zero", "[0] goes on"]


def test_traceback_of_a_rank_that_succeeds_is_shown(launches: Launches) -> None:
    script = launches.script("""
        import traceback
        try:
            1 / 0
        except ZeroDivisionError:
            traceback.print_exc()
        """)
    done = launches.run("-n", "1", script)
    assert done.returncode == 0
    assert done.stderr.startswith(f"[0] {HEAD}\n")
    assert done.stderr.endswith("[0] ZeroDivisionError: division by zero\n")


def test_exception_in_another_thread_is_shown(launches: Launches) -> None:
    script = launches.script("""
        import threading
        def fail():
            raise ValueError("in a thread")
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        """)
    done = launches.run("-n", "1", script)
    assert done.returncode == 0
    assert "[0] Exception in thread Thread-1 (fail):\n" in done.stderr
    assert done.stderr.endswith("[0] ValueError: in a thread\n")


def test_words_before_a_traceback_are_shown(launches: Launches) -> None:
    script = launches.script("""
        import traceback
        try:
            1 / 0
        except ZeroDivisionError:
            traceback.print_exc()
        print("and then", file=sys.stderr)
        raise ValueError("at last")
        """)
    done = launches.run("-n", "2", script)
    for rank in range(2):
        assert f"[{rank}] ZeroDivisionError: division by zero\n[{rank}] and then\n" in done.stderr
    assert done.stderr.count("ValueError: at last") == 1


def test_rank_that_is_killed_while_it_writes_loses_nothing(launches: Launches) -> None:
    script = launches.script(f"""
        sys.stderr.write("{HEAD}\\n  File \\"x.py\\", line 1, in f\\n    unfin")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        """)
    done = launches.run("-n", "1", script)
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr == (
        "collective run: rank 0 failed first (killed by SIGKILL); its traceback:\n"
        f'{HEAD}\n  File "x.py", line 1, in f\n    unfin\n'
    )


def test_long_tracebacks_are_shown_whole(launches: Launches) -> None:
    script = launches.script("""
        raise ValueError("\\n".join(f"line {n} of the text" for n in range(10_000)))
        """)
    done = launches.run("-n", "2", script)
    text = "\n".join(f"line {n} of the text" for n in range(10_000))
    assert done.stderr.count(text) == 1
    assert done.stderr.startswith("collective run: ranks 0, 1 failed, rank ")


def test_endless_tracebacks_are_not_held_back(launches: Launches) -> None:
    script = launches.script("""
        sys.stderr.write("Traceback (most recent call last):\\n" + "x" * 79 + "\\n")
        sys.stderr.write(("y" * 79 + "\\n") * 20_000)
        sys.exit(1)
        """)
    done = launches.run("-n", "1", script)
    assert done.stderr.count(f"[0] {'y' * 79}\n") == 20_000


def test_excepthook_of_the_program_is_left_alone(launches: Launches) -> None:
    script = launches.script("""
        sys.excepthook = lambda kind, error, trace: print("my own:", error, file=sys.stderr)
        raise ValueError(f"of rank {rank}")
        """)
    done = launches.run("-n", "2", script)
    for rank in range(2):
        assert f"[{rank}] my own: of rank {rank}\n" in done.stderr


def test_lost_rank_shows_its_traceback_at_once(launches: Launches) -> None:
    script = launches.script("""
        if rank == 1:
            raise ValueError("out of luck")
        while not os.path.exists("seen"):
            time.sleep(0.01)
        """)
    process = launches.start("-n", "2", "--min-ranks", "1", script)
    assert process.stderr is not None
    lines = []
    while "is lost" not in "".join(lines[-1:]):
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    assert lines[-2] == "[1] ValueError: out of luck\n"
    (launches.directory / "seen").touch()
    assert finish(process).returncode == 0


def test_interrupt_keeps_a_traceback_that_came_before(launches: Launches) -> None:
    script = launches.script("""
        import traceback
        try:
            1 / 0
        except ZeroDivisionError:
            traceback.print_exc()
        arrive()
        time.sleep(600)
        """)
    process = launches.start("-n", "1", script)
    launches.until_arrived(1)
    os.kill(process.pid, signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130
    assert "[0] ZeroDivisionError: division by zero\n" in done.stderr
    assert "KeyboardInterrupt" not in done.stderr
