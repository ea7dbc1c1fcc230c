"""Whatever is signalled or killed, and however: the ranks end, and nothing is left.

After Ctrl-C one line says where the ranks were, whatever each of them says.
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
from collective.launch.interrupt import Site, sift, site_of, summary
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
    ignored = "collective run: interrupted; killed after ignoring the interrupt: rank 0, 1\n"
    assert done.stderr == (ignored if number == signal.SIGINT else "")
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


@pytest.mark.parametrize("backend", ["shm", "threads"])
def test_ctrl_c_is_one_line_with_one_rank_s_place(launches: Launches, backend: str) -> None:
    (launches.directory / "train.py").write_text(
        "import time\n"
        "import collective\n"
        "def load():\n"
        "    open('loading', 'w')\n"
        "    time.sleep(600)\n"
        "comm = collective.init()\n"
        "load() if comm.rank == 0 else comm.barrier()\n"
    )
    process = launches.start("-n", "3", "--backend", backend, "train.py", leads=True)
    launches.until(Path(launches.directory, "loading").exists)
    os.killpg(process.pid, signal.SIGINT)
    done = finish(process)
    # The file is there a moment before the next line is reached.
    assert re.fullmatch(
        r"collective run: interrupted; rank 0 was at train.py:[45], in load: .*\n", done.stderr
    )
    assert (done.returncode, done.stdout) == (130, "")
    launches.assert_nothing_left()


def test_a_second_ctrl_c_kills_at_once(launches: Launches) -> None:
    # SIGTERM, which comes after the grace, would leave a file.
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
        "collective run: interrupted; killed after ignoring the interrupt: rank 0, 1\n"
    )
    assert done.returncode == 130
    launches.assert_nothing_left()


# -- the line about it ---------------------------------------------------------------------------

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
SITE = Site("/x/train.py", 12, "step", "comm.all_reduce(x)", True)


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
        "words",
        "chained",
        "coloured",
        "ignored",
        "twice",
        "lost",
        "then-error",
        "error-before",
    ],
)
def test_tracebacks_of_an_interrupt_become_a_place(output: str, left: str) -> None:
    assert sift(output.encode()) == (left.encode(), SITE)


@pytest.mark.parametrize("output", ["", "bye\n", ERROR, INTERRUPT + DURING + ERROR])
def test_what_is_no_interrupt_is_kept(output: str) -> None:
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
    ids=["innermost", "in-a-call", "below-us", "in-a-library", "of-a-library"],
)
def test_the_place_is_the_program_s_own_line(paths: list[str], path: str, in_call: bool) -> None:
    found = site_of(_frames(*paths))
    assert found == Site(path, 7, "f", "g()", in_call)


def test_the_rank_that_is_named_is_one_that_waits_for_nobody() -> None:
    elsewhere = Site("/x/data.py", 3, "load", "read()", False)
    text = summary({0: SITE, 2: elsewhere, 3: elsewhere}, [1, 2])
    assert text == (
        "collective run: interrupted; rank 2 was at /x/data.py:3, in load: read(); killed after "
        "ignoring the interrupt: rank 1\n"
    )
