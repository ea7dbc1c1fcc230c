"""Signals and kills: the ranks always end, and leave no process and no directory.

After Ctrl-C one line tells where a rank was, whatever tracebacks the ranks print.
"""

from __future__ import annotations

import os
import re
import signal
import time
import traceback
from pathlib import Path

import pytest

import collective
from collective.launch.tracebacks import Location, sift, site_of, summary
from tests.support.launches import (
    DEADLINE_S,
    NOISE_S,
    PROMISED_S,
    Launches,
    Terminal,
    finish,
    launches,
)

__all__ = ["launches"]  # the fixture

WAITING = """
    try:
        {before}
        await_all()
        time.sleep(600)
    except KeyboardInterrupt:
        print("cleaned up")
        sys.exit(1)
    """


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_to_launcher_ends_ranks_that_ignore_it(
    launches: Launches, number: signal.Signals
) -> None:
    before = f"signal.signal({int(number)}, signal.SIG_IGN)"
    before += "; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    # Tests may run under nohup, and a launcher that inherits an ignored signal ignores it, too.
    inherited = signal.signal(number, signal.SIG_DFL)
    try:
        process = launches.start("-n", "2", launches.script(WAITING.format(before=before)))
    finally:
        signal.signal(number, inherited)
    launches.until_arrived(2)
    start = time.monotonic()
    process.send_signal(number)
    done = finish(process)
    assert time.monotonic() - start < 2 * PROMISED_S + NOISE_S  # The ranks get 2 s of grace first.
    assert done.returncode == 128 + number
    ignored = "collective run: interrupted; killed after ignoring the interrupt: ranks 0, 1\n"
    assert done.stderr == (ignored if number == signal.SIGINT else "")
    launches.assert_nothing_left()


def test_suspended_launcher_suspends_its_ranks(launches: Launches) -> None:
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
def test_killed_launcher_leaves_no_process(launches: Launches, group: bool) -> None:
    process = launches.start("-n", "2", launches.script(FAMILY), leads=True)
    launches.until_arrived(2)
    assert len(launches.living()) > 10
    start = time.monotonic()
    (os.killpg if group else os.kill)(process.pid, signal.SIGKILL)
    launches.until(lambda: launches.living() == [] and launches.run_directories() == [])
    assert time.monotonic() - start < PROMISED_S + NOISE_S


def test_killed_supervisor_leaves_no_process(launches: Launches) -> None:
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


def test_launch_sweeps_leftovers_of_killed_launch(launches: Launches) -> None:
    process = launches.start("-n", "1", launches.script("arrive(); time.sleep(600)"))
    launches.until_arrived(1)
    for pid in launches.living():  # Stop all first, so that no process can clean up.
        os.kill(pid, signal.SIGSTOP)
    for pid in launches.living():
        os.kill(pid, signal.SIGKILL)
    process.wait(DEADLINE_S)
    assert len(launches.run_directories()) == 1
    launches.run("-n", "1", launches.script("", "nothing.py"))
    launches.assert_nothing_left()


def test_ctrl_c_on_terminal_interrupts_ranks_and_launcher(launches: Launches) -> None:
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


@pytest.mark.parametrize("backend", ["shm", "threads"])
def test_ctrl_c_prints_one_line_with_place_of_one_rank(launches: Launches, backend: str) -> None:
    (launches.directory / "train.py").write_text(
        "import time\n"
        "import collective\n"
        "def load():\n"
        "    open('loading', 'w').close()\n"
        "    time.sleep(600)\n"
        "comm = collective.init()\n"
        "load() if comm.rank == 0 else comm.barrier()\n"
    )
    process = launches.start("-n", "3", "--backend", backend, "train.py", leads=True)
    launches.until(Path(launches.directory, "loading").exists)
    os.killpg(process.pid, signal.SIGINT)
    done = finish(process)
    # The file exists a moment before rank 0 reaches the next line.
    assert re.fullmatch(
        r"collective run: interrupted; rank 0 was at train.py:[45], in load: .*\n", done.stderr
    )
    assert (done.returncode, done.stdout) == (130, "")
    launches.assert_nothing_left()


def test_ctrl_c_twice_kills_at_once(launches: Launches) -> None:
    # SIGTERM, which the launcher sends after the grace, would leave a file.
    script = launches.script("""
        signal.signal(signal.SIGINT, lambda *_: open(f"interrupted-{rank}", "w"))
        signal.signal(signal.SIGTERM, lambda *_: open("terminated", "w"))
        arrive()
        while True:
            time.sleep(600)
        """)
    process = launches.start("-n", "2", script, leads=True)
    launches.until_arrived(2)
    os.killpg(process.pid, signal.SIGINT)
    launches.until(
        lambda: all((launches.directory / f"interrupted-{rank}").exists() for rank in range(2))
    )
    os.killpg(process.pid, signal.SIGINT)
    done = finish(process)
    assert done.stderr == (
        "collective run: interrupted; killed after ignoring the interrupt: ranks 0, 1\n"
    )
    assert done.returncode == 130
    launches.assert_nothing_left()


# -- the line after an interrupt -----------------------------------------------------------------

HOME = os.path.dirname(collective.__file__)
HEAD = "Traceback (most recent call last):\n"
OWN = '  File "/x/train.py", line 12, in step\n    comm.all_reduce(x)\n    ^^^^^^^^^^\n'
CALL = f'  File "{HOME}/communicator/communicator.py", line 135, in _run_plan\n    wait()\n'
INTERRUPT = HEAD + OWN + CALL + "KeyboardInterrupt\n"
DUMP = """object address  : 0x7f2a
object refcount : 3
object type     : 0x8f3b
object type name: KeyboardInterrupt
object repr     : KeyboardInterrupt('')
lost sys.stderr
"""
LOST = HEAD + OWN + CALL + "collective.errors.PeerLostError: rank 2 is gone;\n  so it is\n"
ERROR = HEAD + OWN + "ValueError: boom\n"
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"
SITE = Location("/x/train.py", 12, "step", "comm.all_reduce(x)", True)


@pytest.mark.parametrize(
    ("output", "left"),
    [
        (INTERRUPT, ""),
        ("cleaning\n" + INTERRUPT + "bye\n", "cleaning\nbye\n"),
        (ERROR + DURING + INTERRUPT, ""),
        (INTERRUPT.replace("File", "\x1b[35mFile\x1b[0m").replace("Keyb", "\x1b[1mKeyb"), ""),
        (INTERRUPT + "Exception ignored in: <function f>\n" + INTERRUPT, ""),
        (HEAD + OWN + CALL + DUMP + "bye\n", "bye\n"),
        (LOST, ""),
        (INTERRUPT + ERROR, ERROR),
        (ERROR + "and\n" + INTERRUPT, ERROR + "and\n"),
    ],
    ids=[
        "bare",
        "with-output",
        "chained",
        "coloured",
        "ignored",
        "twice",
        "lost",
        "then-error",
        "error-before",
    ],
)
def test_sift_turns_tracebacks_of_interrupt_into_site(output: str, left: str) -> None:
    assert sift(output.encode()) == (left.encode(), SITE)


@pytest.mark.parametrize("output", ["", "bye\n", ERROR, INTERRUPT + DURING + ERROR])
def test_sift_keeps_output_without_interrupt(output: str) -> None:
    assert sift(output.encode()) == (output.encode(), None)


def _frames(*paths: str) -> list[traceback.FrameSummary]:
    return [traceback.FrameSummary(path, 7, "f", line="g()") for path in paths]


@pytest.mark.parametrize(
    ("paths", "path", "in_call"),
    [
        (["/x/a.py", "/x/b.py"], "/x/b.py", False),
        (["/x/a.py", f"{HOME}/ops.py"], "/x/a.py", True),
        ([f"{HOME}/launch/threads.py", "/x/a.py"], "/x/a.py", False),
        (["/x/a.py", traceback.__file__], "/x/a.py", False),
        (["<frozen runpy>", pytest.__file__, f"{HOME}/ops.py"], pytest.__file__, True),
    ],
    ids=["innermost", "in-a-call", "called-by-launcher", "in-standard-library", "third-party"],
)
def test_site_of_returns_line_of_program(paths: list[str], path: str, in_call: bool) -> None:
    site = site_of(_frames(*paths))
    assert site == Location(path, 7, "f", "g()", in_call)


def test_summary_names_rank_outside_collective_calls() -> None:
    elsewhere = Location("/x/data.py", 3, "load", "read()", False)
    text = summary({0: SITE, 2: elsewhere, 3: elsewhere}, [1, 2])
    assert text == (
        "collective run: interrupted; rank 2 was at /x/data.py:3, in load: read(); killed after "
        "ignoring the interrupt: rank 1\n"
    )
