"""Which tracebacks are alike, and which of their frames are hidden."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import collective
from collective.launch.outcome import RanksFailedError
from collective.launch.screen import RankOutput, Screen
from collective.launch.tracebacks import (
    alike,
    find_traceback,
    hide_internal_frames,
    split_traceback,
)
from collective.launch.variables import Run
from collective.launch.verdict import FailedRank, first_in_cause, losses, report

HOME = os.path.dirname(collective.__file__)
HEAD = "Traceback (most recent call last):\n"
OWN = '  File "/x/train.py", line 12, in step\n    comm.all_reduce(x)\n    ^^^^^^^^^^\n'
INNER = f'  File "{HOME}/ops.py", line 3, in f\n    g()\n'
HIDDEN_1 = "  (1 frame inside collective is hidden; --verbose shows it)\n"
HIDDEN_2 = "  (2 frames inside collective are hidden; --verbose shows them)\n"
CHAINED = "\nThe above exception was the direct cause of the following exception:\n\n"


def hidden(text: str) -> str:
    return "".join(f"{line}\n" for line in hide_internal_frames(text.splitlines()))


def margin(text: str) -> str:
    return "".join(f"  | {line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (HEAD + OWN + INNER + "ValueError: x\n", HEAD + OWN + HIDDEN_1 + "ValueError: x\n"),
        (HEAD + OWN + INNER * 2 + "E: x\n  y\n", HEAD + OWN + HIDDEN_2 + "E: x\n  y\n"),
        (HEAD + OWN + INNER + OWN + "E\n", HEAD + OWN + HIDDEN_1 + OWN + "E\n"),
        (
            HEAD + OWN + INNER + "  [Previous line repeated 1 more time]\nE\n",
            HEAD + OWN + HIDDEN_2 + "E\n",
        ),
        (
            HEAD + OWN + INNER + "E\n" + CHAINED + HEAD + OWN + INNER + "E\n",
            HEAD + OWN + HIDDEN_1 + "E\n" + CHAINED + HEAD + OWN + HIDDEN_1 + "E\n",
        ),
        (margin(OWN + INNER + "E"), margin(OWN + HIDDEN_1 + "E")),
        (OWN + INNER.replace("File", "\x1b[35mFile\x1b[0m"), OWN + HIDDEN_1),
        (HEAD + INNER * 2 + "E\n", HEAD + INNER * 2 + "E\n"),
        ("no frames\n", "no frames\n"),
    ],
    ids=[
        "one", "several", "between", "repeated", "chained", "group", "coloured", "only-internal",
        "none",
    ],
)  # fmt: skip
def test_internal_frames_become_one_line(text: str, shown: str) -> None:
    assert hidden(text) == shown


@pytest.mark.parametrize(
    ("texts", "groups"),
    [
        (["E [rank 0 of 3]", "E [rank 1 of 3]", "E [rank 2 of 3]"], [[0, 1, 2]]),
        (["rank 0 has no data", "rank 1 has no data", "other"], [[0, 1], [2]]),
        (["rank 1 is lost", "rank 0 is lost"], [[0], [1]]),
        (["rank 1: f [rank 0]", "rank 1: f [rank 1]", "rank 1: f [rank 2]"], [[0, 1, 2]]),
        (["a", "b", "a"], [[0, 2], [1]]),
        (["x" + HIDDEN_1, "x" + HIDDEN_2], [[0, 1]]),
        (["x", "\x1b[31mx\x1b[0m"], [[0, 1]]),
    ],
)
def test_ranks_with_equal_texts_are_grouped(texts: list[str], groups: list[list[int]]) -> None:
    assert alike(list(enumerate(texts))) == groups


@pytest.mark.parametrize(
    ("output", "offset"),
    [
        (b"Traceback (most recent call last):\n", 0),
        (b"a line\nTraceback (most recent call last):\n", 7),
        (b"a bar\r  + Exception Group Traceback (most recent call last):\n", 6),
        (b"\x1b[31mTraceback (most recent call last):", 0),
        (b"Exception in thread Thread-1 (f):\n", 0),
        (b"a line\n[rank12]: Traceback (most recent call last):\n", 7),
        (b"[rank12] Traceback (most recent call last):\n", None),
        (b'  File "x.py", line 3\n    a = = b\n', 0),
        (b'  File "x.py", line 3 in f\n', None),  # of faulthandler
        (b'  File "x.py", line 3, in f\n', None),  # of traceback.print_stack()
        (b"my Traceback (most recent call last):\n", None),
    ],
)
def test_start_of_a_traceback_is_recognised(output: bytes, offset: int | None) -> None:
    assert find_traceback(output) == offset


def test_output_is_split_before_the_last_chain() -> None:
    first = (HEAD + OWN + "A: 1\nsome words\n").encode()
    last = (HEAD + OWN + "B: 2\n" + CHAINED + HEAD + OWN + "C: 3\n").encode()
    assert split_traceback(first + last) == (first, last)
    assert split_traceback(b"words\n") == (b"words\n", b"")


RUN = Run([], 4, {})


def failure(rank: int, text: str, code: int = 1) -> FailedRank:
    return FailedRank(rank, code, text.encode())


def mismatch(rank: int) -> str:
    return HEAD + OWN + INNER + f"MismatchError: they differ [rank {rank} of 4]\n"


def test_report_shows_equal_tracebacks_once() -> None:
    text = report(
        RUN, [], failure(2, mismatch(2)), [failure(rank, mismatch(rank)) for rank in (0, 1, 3)]
    )
    assert text == (
        "collective run: ranks 0-3 failed, rank 2 first (exit code 1); its traceback:\n"
        + HEAD + OWN + HIDDEN_1 + "MismatchError: they differ [rank 2 of 4]\n"
    )  # fmt: skip


def test_report_drops_the_rank_that_torch_puts_before_each_line() -> None:
    def prefixed(rank: int) -> str:
        chain = HEAD + OWN + "E: first\n" + CHAINED + mismatch(rank)
        return "".join(f"[rank{rank}]: {line}" * (line != "\n") or line for line in
                       chain.splitlines(keepends=True))  # fmt: skip

    text = report(RUN, [], failure(2, prefixed(2)), [failure(0, prefixed(0))])
    assert text == (
        "collective run: ranks 0, 2 failed, rank 2 first (exit code 1); its traceback:\n"
        + HEAD + OWN + "E: first\n" + CHAINED
        + HEAD + OWN + HIDDEN_1 + "MismatchError: they differ [rank 2 of 4]\n"
    )  # fmt: skip


def test_consequence_is_recognised_behind_the_rank_that_torch_puts_before_it() -> None:
    lost = HEAD + OWN + "[rank0]: PeerLostError: rank 2 is lost\n"
    cause = FailedRank(1, 1, (HEAD + OWN + "E: why\n").encode())
    assert first_in_cause([FailedRank(0, 1, lost.encode()), cause]) is cause


def test_report_shows_the_first_failure_last() -> None:
    lost = HEAD + OWN + "PeerLostError: rank 2 is lost\n"
    first = failure(2, HEAD + OWN + "E: why\n", 3)
    text = report(RUN, [], first, [failure(r, lost) for r in (0, 1, 3)])
    assert text == (
        "collective run: ranks 0, 1, 3 failed, too: PeerLostError: rank 2 is lost, at "
        "/x/train.py:12, in step: comm.all_reduce(x)\n"
        f"collective run: rank 2 failed first (exit code 3); its traceback:\n{HEAD}{OWN}E: why\n"
    )


def test_verbose_report_shows_internal_frames() -> None:
    assert report(Run([], 4, {}, verbose=True), [], failure(0, mismatch(0))).endswith(mismatch(0))


def test_summary_of_losses_shows_equal_tracebacks_once() -> None:
    failures = [failure(1, HEAD + OWN + "E\n"), failure(4, "", -9), failure(2, HEAD + OWN + "E\n")]
    assert losses(Run([], 6, {}), failures) == (
        "collective run: 3 of 6 ranks were lost:\n"
        "collective run: ranks 1, 2 were lost (exit code 1); the traceback of rank 1:\n"
        f"{HEAD}{OWN}E\n"
        "collective run: rank 4 was lost (killed by SIGKILL); it wrote nothing to its standard "
        "error.\n"
    )


def test_error_of_several_ranks_shows_equal_tracebacks_once() -> None:
    errors: dict[int, BaseException] = {rank: ValueError("x") for rank in (3, 0, 1, 2)}
    tracebacks = {rank: f"Traceback\nValueError: x [rank {rank} of 4]\n" for rank in errors}
    tracebacks[0] = "Traceback\nValueError: another\n"
    assert str(RanksFailedError(errors, tracebacks, {}, 4)) == (
        "rank 3 of 4 failed first: ValueError: x\n"
        "----- rank 3 -----\nTraceback\nValueError: x [rank 3 of 4]\n"
        "ranks 1, 2 failed alike\n"
        "----- rank 0 -----\nTraceback\nValueError: another"
    )


# -- when they are held back -------------------------------------------------------------------


@pytest.fixture
def stream() -> Iterator[RankOutput]:
    reader, writer = os.pipe()
    yield RankOutput(0, Screen(writer), keep=1000, holds_tracebacks=True)
    os.close(reader)
    os.close(writer)


def test_traceback_is_held_back_from_its_first_line(stream: RankOutput) -> None:
    stream.feed(b"words\n" + HEAD.encode())
    stream.feed(b"  more\n")
    assert (stream.held, stream.in_traceback) == (HEAD.encode() + b"  more\n", True)
    assert stream.tail == b"words\n" + HEAD.encode() + b"  more\n"


def test_first_line_of_a_traceback_may_come_in_pieces(stream: RankOutput) -> None:
    for start in range(0, len(HEAD), 5):
        stream.feed(HEAD[start : start + 5].encode())
    assert stream.held == stream.tail == HEAD.encode()


def test_first_line_that_is_already_shown_is_not_held_back(stream: RankOutput) -> None:
    stream.feed(HEAD[:5].encode())
    stream.show_unfinished()
    stream.feed(HEAD[5:].encode())
    assert not stream.in_traceback
    assert stream.tail == HEAD.encode()


def test_released_line_continues(stream: RankOutput) -> None:
    stream.feed(HEAD.encode() + b"  half")
    stream.release(ends=False)
    stream.feed(b" and half\n")
    assert stream.tail == HEAD.encode() + b"  half and half\n"
