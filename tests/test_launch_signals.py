"""Whatever is signalled or killed, and however: the ranks end, and nothing is left."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.launches import (
    DEADLINE_S,
    NOISE_S,
    PROMISED_S,
    Launches,
    Terminal,
    finish,
    launches,
)

__all__ = ["launches"]  # the fixture

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

WAITING = """
    try:
        {before}
        await_all()
        time.sleep(600)
    except KeyboardInterrupt:
        print("cleaned up")
        sys.exit(1)
    """


def test_ctrl_c_lets_the_ranks_clean_up(launches: Launches) -> None:
    process = launches.start("-n", "3", launches.script(WAITING.format(before="pass")))
    launches.until_arrived(3)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130
    assert sorted(done.stdout.splitlines()) == [f"[{r}] cleaned up" for r in range(3)]
    assert done.stderr == "collective run: interrupted\n"
    launches.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_ranks_that_ignore_it(launches: Launches, number: signal.Signals) -> None:
    before = f"signal.signal({int(number)}, signal.SIG_IGN)"
    before += "; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    inherited = signal.signal(number, signal.SIG_DFL)  # nohup, say: the launcher keeps to it
    try:
        process = launches.start("-n", "2", launches.script(WAITING.format(before=before)))
    finally:
        signal.signal(number, inherited)
    launches.until_arrived(2)
    start = time.monotonic()
    process.send_signal(number)
    done = finish(process)
    assert time.monotonic() - start < 2 * PROMISED_S + NOISE_S  # a grace of two seconds first
    assert done.returncode == 128 + number
    ignored = "collective run: interrupted; killed, since it did not heed it: rank 0, 1\n"
    assert done.stderr == (ignored if number == signal.SIGINT else "")
    launches.assert_nothing_left()


def test_second_ctrl_c_ends_at_once(launches: Launches) -> None:
    before = "signal.signal(signal.SIGINT, lambda *_: open('got', 'w'))"
    process = launches.start("-n", "1", launches.script(WAITING.format(before=before)))
    launches.until_arrived(1)
    process.send_signal(signal.SIGINT)
    launches.until((launches.directory / "got").exists)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert finish(process).returncode == 130
    assert time.monotonic() - start < NOISE_S
    launches.assert_nothing_left()


def test_suspending_the_launcher_suspends_the_ranks(launches: Launches) -> None:
    script = launches.script("""
        arrive()
        while True:
            print(time.monotonic())
            time.sleep(0.02)
        """)
    process = launches.start("-n", "1", script)
    launches.until_arrived(1)
    rank = int((launches.directory / "arrived-0").read_text())
    process.send_signal(signal.SIGTSTP)
    launches.until(lambda: state_of(rank) == "T" and state_of(process.pid) == "T")
    process.send_signal(signal.SIGCONT)
    launches.until(lambda: state_of(rank) != "T")
    process.send_signal(signal.SIGTERM)
    assert finish(process).returncode == 128 + signal.SIGTERM
    launches.assert_nothing_left()


def arguments_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


FAMILY = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for own_session in (False, True):
        subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"], start_new_session=own_session)
    await_all()
    time.sleep(600)
    """


@pytest.mark.parametrize("group", [False, True], ids=["process", "group"])
def test_nothing_survives_a_killed_launcher(launches: Launches, group: bool) -> None:
    process = launches.start("-n", "2", launches.script(FAMILY), leads=True)
    launches.until_arrived(2)
    assert len(launches.living()) > 10
    start = time.monotonic()
    (os.killpg if group else os.kill)(process.pid, signal.SIGKILL)
    launches.until(lambda: launches.living() == [] and launches.run_directories() == [])
    assert time.monotonic() - start < PROMISED_S + NOISE_S


def test_nothing_survives_a_killed_supervisor(launches: Launches) -> None:
    process = launches.start("-n", "2", launches.script(FAMILY))
    launches.until_arrived(2)
    (supervisor,) = [
        pid
        for pid in launches.living()
        if pid != process.pid and arguments_of(pid) == arguments_of(process.pid)
    ]
    os.kill(supervisor, signal.SIGKILL)
    done = finish(process)
    assert done.returncode == 137
    assert "supervisor was killed" in done.stderr
    launches.assert_nothing_left()


def test_leftovers_of_killed_launches_are_swept(launches: Launches) -> None:
    process = launches.start("-n", "1", launches.script("arrive(); time.sleep(600)"))
    launches.until_arrived(1)
    for pid in launches.living():  # all at once, so that nobody can clean up
        os.kill(pid, signal.SIGSTOP)
    for pid in launches.living():
        os.kill(pid, signal.SIGKILL)
    process.wait(DEADLINE_S)
    assert len(launches.run_directories()) == 1
    launches.run("-n", "1", launches.script("", "nothing.py"))
    launches.assert_nothing_left()


def test_ctrl_c_on_a_terminal(launches: Launches) -> None:
    script = launches.script(WAITING.format(before="pass"))
    terminal = Terminal(launches, "-n", "2", script, NO_COLOR="1")
    launches.until_arrived(2)
    os.write(terminal.master, b"\x03")
    *lines, last = terminal.read().replace(b"^C", b"").splitlines()
    assert terminal.process.wait(DEADLINE_S) == 130
    assert sorted(lines) == [b"[0] cleaned up", b"[1] cleaned up"]
    assert last == b"collective run: interrupted"
    os.close(terminal.master)
    launches.assert_nothing_left()
