"""`collective run --bind`: the processors on which ranks run."""

from __future__ import annotations

import os
import re

import pytest

from collective.platform.topology import processors, shares
from tests.support.launches import Launches, launches

__all__ = ["launches"]  # the fixture

TWO = shares(processors(usable=True), 2)
MANY = str(len(os.sched_getaffinity(0)) + 1)
needs_two_cores = pytest.mark.skipif(not TWO, reason="needs two cores")
# The processors of a rank, and how many threads it computes with.
SHOW = "print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"
UNBOUND = re.compile(r"^collective run: --bind: \d+ ranks.* share \d+ cores, .* not bound$", re.M)


def expected() -> list[str]:
    return [f"[{rank}] {share} {len(share)}" for rank, share in enumerate(TWO)]


@needs_two_cores
@pytest.mark.parametrize("where", [["-n", "2"], ["--hosts", "localhost:2"]], ids=["local", "hosts"])
def test_bound_ranks_have_processors_of_their_own(launches: Launches, where: list[str]) -> None:
    done = launches.run(*where, "--bind", launches.script(SHOW))
    assert sorted(done.stdout.splitlines()) == expected(), done.stderr
    assert done.stderr == ""


@needs_two_cores
def test_rank_keeps_its_processors_if_fewer_ranks_than_slots_start(launches: Launches) -> None:
    done = launches.run("--hosts", "localhost:2", "-n", "1", "--bind", launches.script(SHOW))
    assert done.stdout.splitlines() == expected()[:1], done.stderr


@needs_two_cores
def test_bound_rank_keeps_the_number_of_threads_that_the_user_set(launches: Launches) -> None:
    done = launches.run("-n", "2", "--bind", launches.script(SHOW), OMP_NUM_THREADS="7")
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["7", "7"], done.stderr


@needs_two_cores
def test_ranks_divide_only_processors_that_the_launcher_may_use(launches: Launches) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, TWO[1])
    try:
        done = launches.run("-n", "1", "--bind", launches.script(SHOW))
    finally:
        os.sched_setaffinity(0, before)
    assert done.stdout == f"[0] {TWO[1]} {len(TWO[1])}\n", done.stderr


@pytest.mark.parametrize("where", [["-n", MANY], ["--hosts", f"localhost:{MANY}"]], ids=["n", "h"])
def test_more_ranks_than_cores_are_not_bound_and_one_line_says_so(
    launches: Launches, where: list[str]
) -> None:
    # A second attempt says nothing.
    script = launches.script(
        f"{SHOW}\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os._exit(1)"
    )
    done = launches.run(*where, "--bind", "--max-restarts", "1", script)
    every = sorted(os.sched_getaffinity(0))
    assert {line.partition(" ")[2] for line in done.stdout.splitlines()} == {f"{every} 1"}
    assert len(UNBOUND.findall(done.stderr)) == 1, done.stderr


@needs_two_cores
def test_restarted_ranks_are_bound_again(launches: Launches) -> None:
    script = launches.script(f"""
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            die(ValueError("once"))
        {SHOW}
        """)
    done = launches.run("-n", "2", "--bind", "--max-restarts", "1", script)
    assert sorted(done.stdout.splitlines()) == expected(), done.stderr


@needs_two_cores
def test_replacement_has_the_processors_of_the_lost_rank(launches: Launches) -> None:
    script = launches.script(f"""
        joined = __file__ + ".joined"
        if "COLLECTIVE_JOIN" in os.environ:
            {SHOW}
            open(joined, "w").close()
        elif rank == 1:
            os._exit(3)
        while not os.path.exists(joined):  # a rank that has ended would leave its processors free
            time.sleep(0.01)
        """)
    done = launches.run("-n", "2", "--bind", "--min-ranks", "1", "--replace", script)
    assert expected()[1:] == done.stdout.splitlines(), done.stderr


@needs_two_cores
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_bound_ranks_poll_as_ranks_with_enough_cores(launches: Launches, backend: str) -> None:
    script = launches.script("""
        import collective
        from collective.backends.shm.control import POLLS_CROWDED
        with collective.init() as comm:
            transport = comm.inner.transport
            if comm.backend == "tcp":
                print(transport.channel.cores() >= 2)
            else:
                print(transport._control.polls != POLLS_CROWDED)
        """)
    done = launches.run("-n", "2", "--bind", "--backend", backend, script)
    assert sorted(done.stdout.splitlines()) == ["[0] True", "[1] True"], done.stderr


@needs_two_cores
def test_trace_of_bound_rank_names_the_cores_of_all_ranks(launches: Launches) -> None:
    """The profile says by this number whether ranks share cores."""
    script = launches.script("import collective\ncollective.init().barrier()")
    traces = launches.directory / "traces"
    traces.mkdir()
    launches.run("-n", "2", "--bind", script, COLLECTIVE_TRACE=str(traces))
    heads = [path.read_text().partition("\n")[0] for path in sorted(traces.iterdir())]
    assert [f'"cores": {sum(map(len, TWO))},' in head for head in heads] == [True, True]


def test_ranks_that_are_threads_cannot_be_bound(launches: Launches) -> None:
    done = launches.run("-n", "2", "--bind", "--backend", "threads", launches.script(SHOW))
    assert done.returncode == 2
    assert "--bind with backend threads: the ranks are one process. Use" in done.stderr
