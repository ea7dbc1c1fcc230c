"""What ranks write, as it comes out of `collective run`."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from tests.launches import (
    DEADLINE_S,
    Launches,
    Terminal,
    finish,
    launches,
)

__all__ = ["launches"]  # the fixture

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def test_lines_appear_while_the_ranks_run(launches: Launches) -> None:
    script = launches.script("print('early'); arrive(); time.sleep(600)")
    process = launches.start("-n", "1", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "[0] early\n"
    process.send_signal(signal.SIGTERM)
    finish(process)


def test_lines_stay_whole_and_none_is_lost(launches: Launches) -> None:
    script = launches.script("""
        for i in range(2000):
            for piece in (str(i), "-", "x" * 100, "\\n"):
                sys.stdout.write(piece)
        sys.stdout.write("no newline")
        """)
    done = launches.run("-n", "3", script)
    for rank in range(3):
        mine = [x for x in done.stdout.splitlines() if x.startswith(f"[{rank}] ")]
        expected = [f"[{rank}] {i}-{'x' * 100}" for i in range(2000)]
        assert mine == [*expected, f"[{rank}] no newline"]


def test_slow_reader_slows_the_ranks_and_loses_nothing(launches: Launches) -> None:
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


def test_terminal_is_described_to_the_ranks(launches: Launches) -> None:
    script = launches.script("""
        names = ("COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
        print(" ".join(os.environ[name] for name in names), repr(sys.stdin.read()))
        """)
    terminal = Terminal(launches, "-n", "2", script)
    lines = sorted(terminal.read().replace(b"\r", b"").splitlines())
    assert lines == [b"\x1b[33m[1]\x1b[0m 56 1 0 ''", b"\x1b[36m[0]\x1b[0m 56 1 1 ''"]
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
