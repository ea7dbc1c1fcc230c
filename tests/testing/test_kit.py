"""``run_ranks``, pools, faults, and the suite as tests and as a command."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collective
from collective import Communicator, PeerFailedError, PeerLostError
from collective.testing import (
    FaultyBackend,
    RankDiedError,
    RankHungError,
    RankPool,
    RanksFailedError,
    RemoteError,
    all_checks,
    faults,
    parametrize_with_checks,
    run_checks,
    run_ranks,
)
from collective.testing.__main__ import main
from tests.support.interpreter import printed, run_python

BOTH = pytest.mark.parametrize("backend", ["threads", "shm"])


class Unpicklable(Exception):
    """Exception that can be pickled but not unpickled."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what)


class Unreadable:
    """Argument that can be pickled but not unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def total(comm: Communicator, scale: int = 1) -> int:
    return int(comm.all_reduce(np.array([comm.rank * scale]))[0])


def through_the_module(comm: Communicator) -> tuple[int, int, int]:
    total_ = collective.all_reduce(np.array([1]))
    return collective.rank(), collective.size(), int(total_[0])


def process(comm: Communicator) -> int:
    return os.getpid()


def raising(comm: Communicator, rank: int) -> None:
    if comm.rank == rank:
        raise ValueError(f"rank {rank} is out of order")
    comm.barrier()


def hanging(comm: Communicator, seconds: float) -> None:
    if comm.rank == 1:
        time.sleep(seconds)
    comm.barrier()


def dying(comm: Communicator) -> None:
    if comm.rank == 1:
        os._exit(7)
    comm.barrier()


def barriers(comm: Communicator, times: int = 4) -> str:
    for _ in range(times):
        comm.barrier()
    return "done"


def raising_oddly(comm: Communicator) -> None:
    raise Unpicklable("strange", "very")


def returning_oddly(comm: Communicator) -> Any:
    return threading.Lock()


@pytest.mark.quick
@BOTH
def test_run_ranks_returns_results_in_rank_order(backend: str) -> None:
    assert run_ranks(3, total, 2, backend=backend) == [6, 6, 6]
    assert run_ranks(3, total, backend=backend, scale=3) == [9, 9, 9]


@pytest.mark.quick
def test_run_ranks_on_threads_accepts_any_function() -> None:
    seen = {}

    def note(comm: Communicator) -> None:
        seen[comm.rank] = threading.current_thread().name

    run_ranks(2, note)
    assert seen == {0: "rank-0", 1: "rank-1"}


@BOTH
def test_package_calls_use_communicator_of_rank(backend: str) -> None:
    assert run_ranks(3, through_the_module, backend=backend) == [(r, 3, 3) for r in range(3)]


@pytest.mark.quick
@BOTH
def test_ranks_failed_error_begins_with_cause_and_traceback(backend: str) -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(3, raising, 1, backend=backend)
    failure = caught.value
    assert next(iter(failure.errors)) == 1
    assert isinstance(failure.cause, ValueError)
    assert {type(failure.errors[rank]) for rank in (0, 2)} == {PeerFailedError}
    text = str(failure)
    assert failure.__cause__ is failure.cause
    assert text.startswith("rank 1 of 3 failed first: ValueError: rank 1 is out of order\n")
    assert text.count("rank 1 is out of order") == (1 if backend == "threads" else 2)
    assert "".join(failure._render_traceback_()).count("PeerFailedError") == len(
        [line for line in text.splitlines() if "failed, too" in line]
    )
    assert "testing/ranks.py" not in failure.tracebacks[1]


def test_repr_of_pool_has_size_and_transport():
    with RankPool(3, "shm") as pool:
        assert repr(pool) == "<RankPool of 3 ranks over shm>"


@pytest.mark.quick
@pytest.mark.parametrize("pooled", [False, True], ids=["run_ranks", "pool"])
def test_failure_of_ranks_shows_no_frame_of_this_package(pooled: bool) -> None:
    with RankPool(1) as pool, pytest.raises(RanksFailedError) as failed:
        pool.run(raising, 0) if pooled else run_ranks(1, raising, 0)
    own = str(failed.traceback[0].path)
    assert {str(entry.path) for entry in failed.traceback.filter(failed)} == {own}


@BOTH
def test_run_ranks_reports_stack_of_hanging_rank(backend: str) -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(2, hanging, 8.0, backend=backend, timeout=1.0)
    hung = caught.value.errors[1]
    assert isinstance(hung, RankHungError)
    assert "no result after 1 s" in str(hung)
    assert "in hanging" in hung.stack


def test_pool_continues_after_unreadable_job() -> None:
    with RankPool(2, "shm") as pool:
        before = pool.run(process)
        with pytest.raises(RanksFailedError) as caught:
            pool.run(total, Unreadable())
        assert [type(error) for error in caught.value.errors.values()] == [RemoteError] * 2
        assert pool.run(process) == before


def setting(comm: Communicator) -> str | None:
    return os.environ.get("A_SETTING_OF_THIS_TEST")


def test_run_ranks_passes_current_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # The server that forks the processes may have started before the variable was set.
    for value in ("one", "two"):
        monkeypatch.setenv("A_SETTING_OF_THIS_TEST", value)
        assert run_ranks(2, setting, backend="shm") == [value, value]


@pytest.mark.parametrize("name", ["short", "long" * 25])
def test_run_ranks_forks_with_any_temporary_directory(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    directory.mkdir()
    program = (
        "from operator import attrgetter\nfrom collective.testing import preload, run_ranks\n"
        "preload(['json'])\nprint(run_ranks(2, attrgetter('size'), backend='shm'))"
    )
    done = run_python("-c", program, TMPDIR=str(directory))
    assert done.stdout == "[2, 2]\n", done.stderr


@pytest.mark.quick
def test_pool_reports_and_replaces_dead_process() -> None:
    with RankPool(3, "shm") as pool:
        before = pool.run(process)
        with pytest.raises(RanksFailedError) as caught:
            pool.run(dying)
        assert isinstance(caught.value.cause, RankDiedError)
        assert caught.value.cause.exitcode == 7
        assert isinstance(caught.value.errors[0], PeerLostError)
        after = pool.run(process)
        assert [a == b for a, b in zip(before, after)] == [True, False, True]
        assert pool.run(total) == [3, 3, 3]


def test_pool_close_ends_processes_and_removes_directory() -> None:
    with RankPool(2, "shm") as pool:
        pids = pool.run(process)
        directory = pool._directory
        assert directory is not None
        assert os.path.isdir(directory)
    pool.close()
    for pid in pids:
        assert not os.path.exists(f"/proc/{pid}")
    assert not os.path.exists(directory)


@pytest.mark.quick
@BOTH
def test_pool_shared_communicator_lasts_until_job_fails(backend: str) -> None:
    with RankPool(2, backend) as pool:
        first = [pool.run(job_of, shared=True) for _ in range(3)]
        assert first[0] == first[1] == first[2]
        with pytest.raises(RanksFailedError):
            pool.run(raising, 0, shared=True)
        assert pool.run(job_of, shared=True) != first[0]
        assert pool.run(job_of) != pool.run(job_of)


def job_of(comm: Communicator) -> int:
    """Return a number that identifies the communicator within its process."""
    _kept.append(comm)
    return [c is comm for c in _kept].index(True)


_kept: list[Communicator] = []


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    _kept.clear()


@pytest.mark.quick
def test_pool_reports_unpicklable_function_error_and_result() -> None:
    with RankPool(2, "shm") as pool:
        with pytest.raises(TypeError, match="top of a module"):
            pool.run(lambda comm: 1)
        with pytest.raises(RanksFailedError) as caught:
            pool.run(raising_oddly)
        assert isinstance(caught.value.cause, RemoteError)
        assert "Unpicklable: strange" in str(caught.value.cause)
        assert "in raising_oddly" in str(caught.value)
        with pytest.raises(RanksFailedError, match="the result, a lock"):
            pool.run(returning_oddly)
        assert pool.run(total) == [1, 1]


@pytest.mark.quick
def test_run_ranks_checks_size_and_backend() -> None:
    with pytest.raises(collective.InvalidArgumentError, match="size 0"):
        run_ranks(0, total)
    with pytest.raises(collective.BackendNotFoundError, match="shm"):
        run_ranks(2, total, backend="sham")
    with pytest.raises(collective.InvalidArgumentError, match=r"Call run_ranks\(2, total\)"):
        run_ranks(total, 2)  # type: ignore[arg-type]


@pytest.mark.quick
@BOTH
def test_fault_kill_ends_rank_at_call(backend: str) -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(3, barriers, backend=backend, faults=[faults.kill(1, at_call=3)])
    assert isinstance(caught.value.cause, RankDiedError)
    assert {type(caught.value.errors[rank]) for rank in (0, 2)} == {PeerLostError}


@pytest.mark.quick
@pytest.mark.parametrize(
    "fault",
    [
        faults.kill(1, at_call=5), faults.kill(1, at_call=2, after=60.0),
        faults.fail(1, OSError(), at_call=5), faults.delay(1, 0.0, at_call=5),
        faults.kill(1, in_shrink="decision"),
    ],
    ids=str,
)  # fmt: skip
@BOTH
def test_fault_that_never_came_fails_run(backend: str, fault: faults.Fault) -> None:
    if backend == "threads" and fault.seconds:
        return  # a thread is killed at once
    with RankPool(2, backend) as pool:
        with pytest.raises(RanksFailedError) as caught:
            pool.run(barriers, faults=[fault, faults.delay(0, 0.0)])
        text = str(caught.value.cause)
        assert text.startswith(f"{fault}: rank 1 returned after 4 calls, before this fault came")
        assert caught.value.results == {0: "done"}
        assert pool.run(barriers, shared=True) == ["done"] * 2  # the next run has no faults


@pytest.mark.quick
def test_fault_of_absent_rank_is_refused() -> None:
    with pytest.raises(collective.InvalidArgumentError, match=r"faults.kill\(5\): .*no rank 5"):
        run_ranks(2, barriers, faults=[faults.kill(5)])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: faults.kill(-1), "rank -1"),
        (lambda: faults.kill(True), "rank True"),
        (lambda: faults.kill("0"), "rank '0'"),
        (lambda: faults.kill(0, at_call=0), "at_call 0"),
        (lambda: faults.fail(0, OSError(), at_call=1.5), "at_call 1.5"),
        (lambda: faults.delay(0, -1.0), "-1.0 seconds"),
        (lambda: faults.kill(0, after=float("nan")), "nan seconds"),
        (lambda: faults.kill(0, in_shrink="verdict"), "in_shrink 'verdict'"),
        (lambda: faults.kill(0, at_call=1, in_shrink="connect"), "together with in_shrink"),
    ],
)
def test_fault_that_cannot_come_is_refused(make: Any, text: str) -> None:
    with pytest.raises(collective.InvalidArgumentError, match=text):
        make()


@BOTH
def test_fault_delay_delays_calls(backend: str) -> None:
    start = time.monotonic()
    run_ranks(2, barriers, backend=backend, faults=[faults.delay(0, 0.1)])
    elapsed = time.monotonic() - start
    assert elapsed > 0.4
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(
            2, barriers, backend=backend, call_timeout=0.2,
            faults=[faults.delay(0, 0.6, at_call=2)],
        )  # fmt: skip
    assert isinstance(caught.value.errors[1], collective.CollectiveTimeoutError)


@pytest.mark.quick
@BOTH
def test_fault_fail_raises_error_at_call(backend: str) -> None:
    plan = [faults.fail(1, OSError("unplugged"), at_call=2)]
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(2, barriers, backend=backend, faults=plan)
    assert isinstance(caught.value.cause, OSError)
    assert "unplugged" in str(caught.value.errors[0])


@pytest.mark.quick
def test_faulty_backend_connect_raises_type_error() -> None:
    world: Any = None
    with pytest.raises(TypeError, match="connected"):
        FaultyBackend.connect(world, 1.0)


@pytest.mark.quick
def test_checks_have_names_docstrings_and_cases() -> None:
    for name, check in all_checks().items():
        assert name == check.name
        assert name.startswith("check_")
        assert check.__doc__, name
        assert check.__doc__.strip().splitlines()[0].endswith("."), name
        assert check.cases(3), name


@pytest.mark.quick
def test_suite_without_applicable_check_is_refused() -> None:
    with pytest.raises(collective.InvalidArgumentError, match="no check applies"):
        parametrize_with_checks("threads", sizes=(1,), checks=["check_killed_peer"])


@pytest.mark.quick
def test_unknown_check_raises_value_error() -> None:
    with pytest.raises(ValueError, match="check_reduce"):
        run_checks("threads", (2,), checks=["check_red"])


@pytest.mark.quick
def test_parametrize_ids_name_transport_size_and_case() -> None:
    mark = parametrize_with_checks("shm", sizes=(1, 3), checks=["check_broadcast", "check_tags"])
    assert mark.kwargs["ids"] == [
        "shm-1-check_broadcast[root=0]",
        "shm-3-check_broadcast[root=0]",
        "shm-3-check_broadcast[root=1]",
        "shm-3-check_broadcast[root=2]",
        "shm-3-check_tags",
    ]


def test_checks_keep_order_for_any_import_order() -> None:
    program = (
        "import collective.testing.checks_fork, collective.testing.checks_p2p\n"
        "from collective.testing import all_checks\n"
        "print(*all_checks())"
    )
    done = run_python("-c", program)
    assert done.stdout.split() == list(all_checks()), done.stderr
    assert done.stdout.split()[-1] == "check_fork"


def test_command_prints_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["check_barrier", "check_scan"]
    assert main(["threads", "--sizes", "1,2", "--checks", *names]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["threads", "1", "2"]
    assert lines[1].split() == ["check_scan", "pass", "pass"]
    assert lines[2].split() == ["check_barrier", "-", "pass"]
    assert lines[-1].startswith("conforms: 3 passed, 1 skipped")
    assert main(["threads", "--sizes", "2", "--checks", *names, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [(r["check"], r["size"], r["outcome"]) for r in results] == [
        ("check_scan", 2, "passed"),
        ("check_barrier", 2, "passed"),
    ]


LOOPBACK = "tests.support.loopback:Loopback"


@pytest.mark.parametrize(
    "words",
    [["threads", "--sizes", "1,2", "--checks", "check_barrier,check_scan"],
     ["threads", "--checks", "check_barrier,", "check_scan", "--sizes", "1,2"]],
)  # fmt: skip
def test_command_accepts_spaces_and_commas(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    head, *lines = (line.split() for line in capsys.readouterr().out.splitlines()[:3])
    assert head == ["threads", "1", "2"]
    assert [line[0] for line in lines] == ["check_scan", "check_barrier"]


def test_command_lists_untested_properties(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["check_barrier", "check_timeout_tells_last_call"]
    assert main([LOOPBACK, "--sizes", "1,2", "--checks", *names]) == 0
    lines = capsys.readouterr().out.splitlines()
    why = "  does not know the ranks' last calls: check_timeout_tells_last_call"
    assert lines[-4:-1] == ["Not tested:", why, ""]
    assert lines[-1].startswith("conforms in what was tested: 1 passed, 3 skipped; 1 ")


def test_command_does_not_list_refused_calls_as_untested(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["check_barrier", "check_bad_argument"]
    assert main(["shm", "--sizes", "2", "--checks", *names]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Not tested:" not in lines
    assert lines[-1].startswith("conforms: 1 passed, 1 skipped")


@pytest.mark.quick
def test_command_lists_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([LOOPBACK, "--sizes", "2,3", "--list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(lines) == set(all_checks())
    assert lines["check_broadcast"].split(maxsplit=2)[1] == "5"
    why = "  0  skipped: does not know the ranks' last calls. "
    assert why in lines["check_timeout_tells_last_call"]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody"], "one of"),
        (["threads", "--sizes", "1,x"], "positive integers"),
        (["threads", "--checks", "check_everything"], "no check is called"),
    ],
)
def test_command_with_bad_arguments_exits_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_import_loads_neither_pytest_nor_torch() -> None:
    program = (
        "import sys, collective.testing as t; t.all_checks(); "
        "sys.exit('pytest' in sys.modules or 'torch' in sys.modules)"
    )
    printed("-c", program)
