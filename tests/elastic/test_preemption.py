"""SIGTERM in elastic training: the rank leaves after a commit, and the others lose no step."""

from __future__ import annotations

import os
import re
import signal
import time

import collective
from collective import elastic
from collective.testing import run_ranks
from tests.support.launches import Launches, finish, launches

__all__ = ["launches"]  # the fixture

# Rank 1 gets the signal in step 2, before the call of that step.
TRAINING = """
    import numpy as np, collective
    from collective import elastic
    with collective.init() as comm:
        first = comm.rank
        state = elastic.State(comm, total=np.zeros(1), step=0)
        try:
            for generation in elastic.generations(comm, state):
                with generation as comm:
                    while state.step < 6:
                        if first == 1 and state.step == 2:
                            os.kill(os.getpid(), signal.SIGTERM)
                        state.total += comm.all_reduce(np.ones(1))
                        state.step += 1
                        state.commit()
        except elastic.PreemptedError as error:
            print("leaves at step", state.step, "with code", error.code)
            raise
        print("total", state.total[0], "of", comm.size)
    """


def test_rank_that_gets_sigterm_leaves_after_its_commit(launches: Launches) -> None:
    done = launches.run("-n", "3", "--min-ranks", "2", launches.script(TRAINING))
    assert done.returncode == 0, done.stderr
    assert "[1] leaves at step 3 with code 143\n" in done.stdout
    # Three steps of three ranks, and three of two. Without a notice it would be 2 * 3 + 4 * 2.
    assert sorted(re.findall(r"\[(\d)\] total (\S+) of (\d)", done.stdout)) == [
        ("0", "15.0", "2"),
        ("2", "15.0", "2"),
    ]
    assert "rank 1 is lost (exit code 143); 2 of 3 ranks are left, and 2 are enough." in done.stderr
    launches.assert_nothing_left()


# Every rank gets the signal, some of them before a call and some after it.
ALL_LEAVE = """
    import numpy as np, collective
    from collective import elastic
    with collective.init() as comm:
        first = comm.rank
        state = elastic.State(comm, total=np.zeros(1), step=0)

        def save():
            with open("new", "w") as file:
                file.write(f"{state.step} {state.total[0]}")
            os.rename("new", "saved")

        for generation in elastic.generations(comm, state, save=save):
            with generation as comm:
                while state.step < 50:
                    if first < 2 and state.step == 2:
                        os.kill(os.getpid(), signal.SIGTERM)
                    state.total += comm.all_reduce(np.ones(1))
                    if first == 2 and state.step == 3:
                        os.kill(os.getpid(), signal.SIGTERM)
                    state.step += 1
                    state.commit()
    """


def test_last_commit_is_saved_if_all_ranks_get_sigterm(launches: Launches) -> None:
    done = launches.run("-n", "3", "--min-ranks", "1", launches.script(ALL_LEAVE))
    assert done.returncode == 143, done.stderr
    # Ranks 0 and 1 leave after step 3. Rank 2 makes one more step, and is rank 0 then.
    assert (launches.directory / "saved").read_text() == "4 10.0"
    assert "SIGTERM" not in done.stderr
    launches.assert_nothing_left()


def test_rank_0_that_leaves_says_how_to_save_the_last_commit(launches: Launches) -> None:
    body = ALL_LEAVE.replace(", save=save", "")
    done = launches.run("-n", "3", "--min-ranks", "1", launches.script(body))
    # Rank 0 of the first ranks says so, and then rank 2, which is the next rank 0.
    said = re.findall(r"\[(\d)\] collective: rank 0 leaves after SIGTERM\. If all", done.stderr)
    assert said == ["0", "2"], done.stderr
    assert "pass save= to elastic.generations" in done.stderr
    assert not (launches.directory / "saved").exists()


def test_rank_that_leaves_is_not_awaited_while_it_saves(launches: Launches) -> None:
    body = ALL_LEAVE.replace("first < 2 and", "first == 0 and").replace("first == 2 and", "0 and")
    body = body.replace(
        'with open("new"', 'arrive(); time.sleep(3600)\n            with open("new"'
    )
    process = launches.start(
        "-n", "3", "--min-ranks", "1", launches.script(body + "    arrive()\n")
    )
    launches.until_arrived(3)  # the others have ended their training, while rank 0 saves
    process.terminate()
    finish(process)


def test_rank_that_leaves_is_replaced(launches: Launches) -> None:
    body = TRAINING.replace(
        "state.step < 6", "state.step < 6 or comm.size < 3 and state.step < 9000"
    )
    done = launches.run("-n", "3", "--min-ranks", "2", "--replace", launches.script(body))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of 3\n") == 3, done.stdout + done.stderr
    launches.assert_nothing_left()


def test_later_second_sigterm_ends_rank_at_once(launches: Launches) -> None:
    body = """
        import collective
        from collective import elastic
        with collective.init() as comm:
            for generation in elastic.generations(comm, elastic.State(comm, step=0)):
                with generation:
                    os.kill(os.getpid(), signal.SIGTERM)
                    print("goes on")
                    arrive()
                    time.sleep(600)
        """
    process = launches.start("-n", "1", launches.script(body))
    launches.until_arrived(1)
    time.sleep(1.0)  # signals within a second count as one
    os.kill(int((launches.directory / "arrived-0").read_text()), signal.SIGTERM)
    done = finish(process)
    assert done.stdout == "[0] goes on\n"
    assert done.returncode == 128 + signal.SIGTERM


def test_handler_of_program_stays(launches: Launches) -> None:
    body = """
        import collective
        from collective import elastic
        def own(*_): print("own handler")
        signal.signal(signal.SIGTERM, own)
        with collective.init() as comm:
            state = elastic.State(comm, step=0)
            for generation in elastic.generations(comm, state):
                with generation:
                    os.kill(os.getpid(), signal.SIGTERM)
                    state.commit()
            assert signal.getsignal(signal.SIGTERM) is own
        """
    done = launches.run("-n", "1", launches.script(body))
    assert (done.returncode, done.stdout) == (0, "[0] own handler\n"), done.stderr


def test_default_action_of_sigterm_is_back_after_training() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with collective.init(size=1, rank=0) as comm:
            for generation in elastic.generations(comm, elastic.State(comm, step=0)):
                with generation:
                    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def _on_a_thread(comm: collective.Communicator) -> None:
    before = signal.getsignal(signal.SIGTERM)
    for generation in elastic.generations(comm, elastic.State(comm, step=0)):
        with generation:
            assert signal.getsignal(signal.SIGTERM) is before


def test_ranks_that_are_threads_do_not_touch_sigterm() -> None:
    run_ranks(2, _on_a_thread, backend="threads")
