"""Choice of the rank that failed first, and the report on that rank."""

from __future__ import annotations

import signal

import pytest

from collective.launch import verdict
from collective.launch.variables import Run
from collective.launch.verdict import FailedRank, first_in_cause

FRAMES = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    f()\n'
CAUSE = FRAMES + "ValueError: boom\nwith a second line\n"
LOST = FRAMES + "collective.errors.PeerLostError: rank 2 is gone\n"
FAILED = FRAMES + f"collective.errors.PeerFailedError: rank 2 failed; its traceback:\n{CAUSE}"
LATE = FRAMES + "collective.errors.CollectiveTimeoutError: rank 2 did not come\n"
ABORTED = FRAMES + "CommunicatorAbortedError: broken\n"
HANDLED = (
    LOST
    + "\nDuring handling of the above exception, another exception occurred:\n\n"
    + FRAMES
    + "KeyError: 'x'\n"
)
COLOURED = LOST.replace("collective", "\x1b[1;35mcollective").replace(":", "\x1b[0m:")


def failure(rank: int, stderr: str, code: int = 1) -> FailedRank:
    return FailedRank(rank, code, stderr.encode())


def report(first: FailedRank) -> str:
    return verdict.report(Run([], 4, {}), [first], first)


@pytest.mark.parametrize("other", [LOST, FAILED, LATE, ABORTED, HANDLED, COLOURED])
@pytest.mark.parametrize("cause", [CAUSE, "", "warning: x\n"], ids=["raised", "exited", "warned"])
def test_first_in_cause_prefers_cause_to_consequence(other: str, cause: str) -> None:
    failures = [failure(0, other), failure(1, other), failure(2, cause)]
    assert first_in_cause(failures).rank == 2


FIRST: dict[str, tuple[list[FailedRank], int]] = {
    "killed rank is a cause": ([failure(0, LOST), failure(2, LOST, -9)], 2),
    "earliest of several causes": (
        [failure(1, LOST), failure(3, CAUSE), failure(2, CAUSE)], 3,
    ),
    "timeout comes before its aborts": ([failure(1, ABORTED), failure(3, LATE)], 3),
    "only consequences": ([failure(1, LOST), failure(0, ABORTED)], 1),
}  # fmt: skip


@pytest.mark.parametrize(("failures", "rank"), FIRST.values(), ids=FIRST)
def test_first_in_cause_names_expected_rank(failures: list[FailedRank], rank: int) -> None:
    assert first_in_cause(failures).rank == rank


@pytest.mark.parametrize(("code", "shell"), [(1, 1), (3, 3), (-9, 137), (-15, 143)])
def test_exit_code_follows_shell_convention(code: int, shell: int) -> None:
    assert failure(0, "", code).exit_code == shell


def test_report_shows_whole_traceback_without_earlier_output() -> None:
    text = report(failure(2, "noise\n" + CAUSE))
    assert text == f"collective run: rank 2 failed first (exit code 1); its traceback:\n{CAUSE}"


@pytest.mark.parametrize(
    "text",
    [
        HANDLED,
        FAILED,
        CAUSE + "\nThe above exception was the direct cause of the following exception:\n\n" + LOST,
        FRAMES.replace("Trace", "  + Exception Group Trace", 1)
        + "  | ExceptionGroup: two (2 sub-exceptions)\n  +-+---------------- 1 ---------------\n",
    ],
)
def test_report_shows_chained_tracebacks_together(text: str) -> None:
    shown = report(failure(0, CAUSE + "something else\n" + text))
    assert shown.split("\n", 1)[1] == text


def test_report_without_traceback_shows_last_lines() -> None:
    lines = [f"line {n}\n" for n in range(100)]
    text = report(failure(1, "".join(lines), -int(signal.SIGSEGV)))
    assert text == (
        "collective run: rank 1 failed first (killed by SIGSEGV); the last lines of its "
        "standard error:\n" + "".join(lines[-20:])
    )


def test_report_without_output_says_so() -> None:
    assert "(exit code 3); it wrote nothing" in report(failure(0, "", 3))
    assert "killed by signal 40" in report(failure(0, "", -40))


def test_report_replaces_undecodable_bytes() -> None:
    assert "\N{REPLACEMENT CHARACTER}" in report(FailedRank(0, 1, b"\xff\xfe broken"))
