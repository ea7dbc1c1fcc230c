"""Contents of the screen when several ranks write lines, progress bars and prompts."""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Iterator

import pytest

from collective.launch.screen import RankOutput, Screen
from tests.support.launches import DEADLINE_S, Launches, Terminal, finish, launches

__all__ = ["launches"]  # the fixture


class Output:
    """A screen on a pipe, with the streams of two ranks."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.screen = Screen(self.writer)
        self.a = RankOutput(0, self.screen, keep=0)
        self.b = RankOutput(1, self.screen, keep=0)

    def written(self) -> bytes:
        self.screen.flush()
        data = b""
        while select.select([self.reader], [], [], 0)[0]:
            data += os.read(self.reader, 65536)
        return data

    def shown(self) -> list[str]:
        """Return the lines that a terminal would show."""
        lines, row, column = [""], 0, 0
        for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|.|\n|\r", self.written().decode()):
            if token == "\n":
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            elif token == "\r":
                column = 0
            elif token.endswith("K") and token.startswith("\x1b"):
                lines[row] = ""
            elif token.endswith("A") and token.startswith("\x1b"):
                row = max(0, row - int(token[2:-1] or 1))
            else:
                lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + 1 :]
                column += 1
        return lines


@pytest.fixture
def output() -> Iterator[Output]:
    output = Output()
    yield output
    os.close(output.reader)
    os.close(output.writer)


# Writes of rank 0, of rank 1 (whose line ends) and of rank 0 again; then the expected output.
WRITTEN: dict[str, tuple[str, str, str, str]] = {
    "lines": ("one\ntwo\n", "three\n\n", "", "[0] one\n[0] two\n[1] three\n[1] \n"),
    "pieces of a line wait for its end": (
        "one", "other\n", " and two\n", "[1] other\n[0] one and two\n",
    ),
    "a last line without an end": ("last words", "", "", "[0] last words\n"),
    "Windows' line ends": ("one\r\ntwo\r\n", "", "", "[0] one\r\n[0] two\r\n"),
    "colour reaches no prefix, erasing removes none": (
        "\x1b[2K\x1b[31mred\x1b[0m\n", "", "", "\x1b[2K[0] \x1b[31mred\x1b[0m\n",
    ),
    "a cursor that was hidden is shown again": (
        "\x1b[?25l10%\r", "", "", "\x1b[?25l[0] 10%\r\n\x1b[?25h",
    ),
    "sequences without text are no line": (
        "\x1b[?25ldone\n\x1b[?25h", "\x1b[2K\r", "", "\x1b[?25l[0] done\n\x1b[?25h",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("first", "other", "then", "written"), WRITTEN.values(), ids=WRITTEN)
def test_rank_output_writes_expected_lines(
    output: Output, first: str, other: str, then: str, written: str
) -> None:
    output.a.feed(first.encode())
    output.b.feed(other.encode())
    output.a.feed(then.encode())
    output.a.finish()
    output.screen.restore()
    assert output.written().decode() == written


def test_rank_output_joins_pieces_of_multibyte_characters(output: Output) -> None:
    for byte in "grün ☃\n".encode():
        output.a.feed(bytes([byte]))
    assert output.written().decode() == "[0] grün ☃\n"


@pytest.mark.parametrize(
    "pieces",
    [
        [b"10%\r", b"20%\r", b"30%\n"],
        [b"10%\r20%", b"\r", b"30%\n"],
        [b"\r10%", b"\r20%", b"\r30%", b"\n"],
        [b"\r\x1b[2K10%", b"\r\x1b[2K20%", b"\r\x1b[2K30%\n"],
        [b"10%\r", b"30%\r", b"\n"],
    ],
)
def test_progress_bar_stays_in_its_line(output: Output, pieces: list[bytes]) -> None:
    output.a.feed(b"before\n")
    for piece in pieces:
        output.a.feed(piece)
    output.b.feed(b"after\n")
    assert output.shown() == ["[0] before", "[0] 30%", "[1] after", ""]


def test_progress_bar_continues_below_line_of_another_rank(output: Output) -> None:
    for percent in (b"10%", b"20%"):
        output.a.feed(percent + b"\r")
    output.b.feed(b"hello\n")
    output.a.feed(b"30%\r40%\r")
    assert output.written() == b"[0] 10%\r[0] 20%\r\n[1] hello\n[0] 30%\r[0] 40%\r"
    output.screen.fresh_line()
    assert output.written() == b"\n"


def test_unfinished_line_is_shown_and_continued(output: Output) -> None:
    output.a.feed(b"loading")
    assert output.a.silent_since is not None
    output.a.show_unfinished()
    assert output.a.silent_since is None
    output.a.feed(b" ...")
    output.a.show_unfinished()
    output.a.feed(b" done\n")
    assert output.written() == b"[0] loading ... done\n"


def test_unfinished_line_is_repeated_after_an_interruption(output: Output) -> None:
    output.a.feed(b"loading")
    output.a.show_unfinished()
    output.b.feed(b"hello\n")
    output.a.feed(b" done\n")
    assert output.shown() == ["[0] loading", "[1] hello", "[0] loading done", ""]


def test_two_bars_of_one_rank_are_redrawn_in_place(output: Output) -> None:
    output.a.feed(b"x 1\ny 1")
    output.a.show_unfinished()
    output.a.feed(b"\r\x1b[2K\x1b[1A\x1b[2Kx 2\ny 2")
    output.a.show_unfinished()
    assert output.shown() == ["[0] x 2", "[0] y 2"]


def test_cursor_of_a_rank_stays_out_of_lines_of_others(output: Output) -> None:
    output.a.feed(b"x 1\ny 1")
    output.a.show_unfinished()
    output.b.feed(b"hello\n")
    output.a.feed(b"\r\x1b[2K\x1b[1A\x1b[2Kx 2\ny 2\n")
    assert output.shown() == ["[0] x 1", "[0] y 1", "[1] hello", "[0] x 2", "[0] y 2", ""]


def test_endless_line_takes_bounded_memory(output: Output) -> None:
    for _ in range(40):
        output.a.feed(b"z" * 65536)
        output.written()
    output.a.finish()
    assert len(output.a._line) == 0
    tail = RankOutput(0, output.screen, keep=1000)
    for number in range(10_000):
        tail.feed(f"{number}\n".encode())
        output.written()
    assert len(tail._tail) <= 2000
    assert tail.tail.endswith(b"9998\n9999\n")


def test_screen_notices_closed_reader(output: Output) -> None:
    reader, writer = os.pipe()
    screen = Screen(writer)
    os.close(reader)
    screen.write(b"lost")
    screen.flush()
    assert screen.broken
    assert not screen.waiting
    os.close(writer)


def test_screen_does_not_block_on_slow_reader(output: Output) -> None:
    output.screen.write(b"x" * (2 << 20))
    output.screen.flush()
    assert output.screen.full
    total = 0
    while output.screen.waiting:
        total += len(output.written())
    assert total + len(output.written()) == 2 << 20


# -- real launches -------------------------------------------------------------------------------


def test_lines_appear_while_the_ranks_run(launches: Launches) -> None:
    script = launches.script("print('early'); arrive(); time.sleep(600)")
    process = launches.start("-n", "1", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "[0] early\n"
    process.send_signal(signal.SIGTERM)
    finish(process)


def test_lines_of_ranks_stay_whole_and_complete(launches: Launches) -> None:
    script = launches.script("""
        for i in range(2000):
            for piece in (str(i), "-", "x" * 100, "\\n"):
                sys.stdout.write(piece)
        sys.stdout.write("no newline")
        """)
    done = launches.run("-n", "3", script)
    for rank in range(3):
        lines = [x for x in done.stdout.splitlines() if x.startswith(f"[{rank}] ")]
        expected = [f"[{rank}] {i}-{'x' * 100}" for i in range(2000)]
        assert lines == [*expected, f"[{rank}] no newline"]


def test_slow_reader_slows_ranks_and_loses_no_line(launches: Launches) -> None:
    script = launches.script("""
        for i in range(400):
            print(f"{i:04}", "x" * 20_000)
        open("finished", "w").close()
        """)
    process = launches.start("-n", "1", script)
    time.sleep(0.5)
    assert not (launches.directory / "finished").exists()
    done = finish(process)
    assert [line[4:8] for line in done.stdout.splitlines()] == [f"{i:04}" for i in range(400)]


def test_reader_that_leaves_ends_the_run(launches: Launches) -> None:
    process = launches.start("-n", "2", launches.script("while True: print('y' * 1000)"))
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(DEADLINE_S) == 128 + signal.SIGPIPE
    launches.assert_nothing_left()


def test_ranks_get_description_of_terminal_and_rank_0_what_is_typed(launches: Launches) -> None:
    script = launches.script("""
        names = ("COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
        print(" ".join(os.environ[name] for name in names), repr(sys.stdin.readline()))
        """)
    terminal = Terminal(launches, "-n", "2", script)
    os.write(terminal.master, b"typed\n")
    echo, *lines = terminal.read().replace(b"\r", b"").splitlines()
    assert echo == b"typed"
    assert sorted(lines) == [
        b"\x1b[33m[1]\x1b[0m 56 1 0 ''",
        b"\x1b[36m[0]\x1b[0m 56 1 1 'typed\\n'",
    ]
    assert terminal.process.wait(DEADLINE_S) == 0
    os.close(terminal.master)


def test_bar_and_prompt_are_live_on_a_terminal(launches: Launches) -> None:
    script = launches.script("""
        sys.stdout.write("\\r 50%")
        while not os.path.exists("seen-1"):
            time.sleep(0.01)
        sys.stdout.write("\\r 99%")
        while not os.path.exists("seen-2"):
            time.sleep(0.01)
        print("\\rdone")
        """)
    terminal = Terminal(launches, "-n", "1", script, NO_COLOR="1")
    assert terminal.read(b"50%") == b"[0]  50%"
    (launches.directory / "seen-1").touch()
    assert terminal.read(b"99%") == b"\r[0]  99%"
    (launches.directory / "seen-2").touch()
    assert terminal.read() == b"\r[0] done\r\n"
    assert terminal.process.wait(DEADLINE_S) == 0
    os.close(terminal.master)
