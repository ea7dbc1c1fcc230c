"""``collective tour``: a two-minute demonstration on the user's machine.

The programs are texts and not modules of the package, so that the errors that they show name a
place in a user's program.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from collective.inner import platform
from collective.tools.show import painted

_HELLO = """\
# hello.py
import os

import numpy as np

import collective

with collective.init() as comm:
    print(f"rank {comm.rank} of {comm.size}, process {os.getpid()}")
    x = np.full(3, comm.rank + 1.0)
    print(x, "all add up to", comm.all_reduce(x))
"""

_MISMATCH = """\
# mismatch.py
import numpy as np

import collective

with collective.init() as comm:
    op = "max" if comm.rank == 2 else "sum"  # a mistake
    try:
        comm.all_reduce(np.ones(4), op=op)
    except collective.MismatchError as error:
        print(error)
    print("still usable:", comm.all_reduce(np.ones(2)))
"""

_LOST = """\
# lost.py
import os
import signal
import time

import numpy as np

import collective

comm = collective.init()
for step in range(5):
    if step == 3 and comm.membership.origin[comm.rank] == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # out of memory, say
    began = time.monotonic()
    try:
        total = comm.all_reduce(np.ones(2))
    except collective.PeerLostError as error:
        ms = 1000 * (time.monotonic() - began)
        print(f"{error}\\nknown after {ms:.1f} ms")
        comm = comm.shrink()
        print(f"goes on as rank {comm.rank} of {comm.size}")
        total = comm.all_reduce(np.ones(2))
    print(f"step {step}: {total}")
comm.close()
"""

_PARITY = """\
# parity.py
import hashlib
import importlib.util

import numpy as np

import collective

with collective.init() as comm:
    numbers = np.random.default_rng(comm.rank).standard_normal(1000)
    arrays = {"NumPy": numbers}
    if importlib.util.find_spec("torch"):
        import torch

        arrays["PyTorch"] = torch.from_numpy(numbers)
    for name, x in arrays.items():
        total = comm.all_reduce(x, order="rank")
        bits = hashlib.sha256(np.asarray(total).tobytes()).hexdigest()[:16]
        if comm.rank == 0:
            print(f"{comm.backend}, {name}: {bits}")
"""

_READ_ON = """\
Read on (docs/ in the repository, and the site that `make docs` builds):
  docs/tutorials/numpy.md         the first program, with NumPy
  docs/tutorials/pytorch.md       training with PyTorch
  docs/calls.md                   all calls
  docs/how-to/handle-failures.md  errors, and how to continue after a loss
  docs/parity.md                  the same numbers everywhere
`collective doctor` shows what works on this machine; `collective bench` measures its speed.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "tour",
        help="run a two-minute demonstration on this machine",
        description="Show four programs and run them here: ranks and a sum, a mistake and its "
        "error, a rank that dies while the others go on, and the same bits from several "
        "frameworks over two transports.",
        epilog="exit code: 1 if a program did not behave as described; else 0",
    )
    parser.add_argument(
        "--no-wait", action="store_true",
        help="do not wait for Enter; the tour never waits if input or output is not a terminal",
    )  # fmt: skip
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Show the tour; return the exit code."""
    if options.no_wait or not (sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()):
        return lead(lambda prompt: True)
    return lead(_ask)


def _ask(prompt: str) -> bool:
    try:
        return input(prompt).strip().lower() not in ("q", "quit")
    except EOFError:
        print()
        return False


def lead(wait: Callable[[str], bool], chosen: Sequence[Lesson] | None = None) -> int:
    """Show all lessons; return the exit code: 1 if a program did not behave as described.

    Args:
        wait: function that shows a prompt and returns whether to go on.
        chosen: lessons to show; by default those of :func:`lessons`.
    """
    shown = lessons() if chosen is None else chosen
    failed = 0
    with tempfile.TemporaryDirectory(prefix="collective-tour-") as directory:
        for number, lesson in enumerate(shown, 1):
            title = painted(f"{number} of {len(shown)}: {lesson.title}")
            print(f"{title}\n\n{lesson.text}\n")
            print("".join(f"    {line}".rstrip() + "\n" for line in lesson.program.splitlines()))
            if not wait("Enter runs it, q ends the tour: "):
                return failed
            try:
                print(f"{perform(lesson, Path(directory))}\n", flush=True)
            except ValueError as error:
                failed = 1
                print(f"collective tour: {lesson.title}: {error}.\n", file=sys.stderr, flush=True)
    print(_READ_ON, end="")
    return failed


def perform(lesson: Lesson, directory: Path) -> str:
    """Run a lesson's program with its options, and return the conclusion from its output.

    The output is shown while the program runs.

    Args:
        directory: directory for the program's file.

    Raises:
        ValueError: the program did not behave as described.
    """
    (directory / lesson.file).write_text(lesson.program, encoding="utf-8")
    printed = []
    for options in lesson.runs:
        arguments = ["run", *options, lesson.file]
        print(f"$ {shlex.join(['collective', *arguments])}", flush=True)
        code, text = _run([sys.executable, "-m", "collective", *arguments], directory)
        printed.append(text)
        print(flush=True)
        if code:
            raise ValueError(f"exit code {code}")
    return lesson.conclude("".join(printed))


def _run(command: Sequence[str], directory: Path) -> tuple[int, str]:
    """Run a command and show its output; return the exit code and the output."""
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=_environment(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=platform.die_with_parent(),
    )
    assert process.stdout is not None
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            print(line, end="", flush=True)
    except KeyboardInterrupt:  # or Ended, if the launcher did not get the signal
        process.terminate()
        raise
    finally:
        process.wait()
        process.stdout.close()
    return process.returncode, "".join(lines)


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without settings, so that the tour is the same for every user."""
    variables = {name: text for name, text in environ.items() if not name.startswith("COLLECTIVE_")}
    home = str(Path(__file__).resolve().parents[3])
    # Add the package that is running, which may be a clone that is not installed.
    path = [entry for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {**variables, "PYTHONPATH": os.pathsep.join([*path, home])}


# -- the lessons ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lesson:
    """Lesson of the tour.

    Attributes:
        title, text: title and introduction, shown before the program.
        file, program: name and text of the program.
        runs: options of ``collective run``, for each run of the program.
        conclude: function of the runs' output that returns the conclusion; raises ValueError if
            the program did not behave as described.
    """

    title: str
    text: str
    file: str
    program: str
    runs: Sequence[Sequence[str]]
    conclude: Callable[[str], str]


def lessons() -> list[Lesson]:
    """Return the lessons."""
    return [
        Lesson(
            "Ranks",
            "A program is started several times, and each process is a rank. All ranks make\n"
            "the same calls, and each rank gets the result.",
            "hello.py",
            _HELLO,
            [["-n", "3"]],
            _conclude_hello,
        ),
        Lesson(
            "A mistake",
            "Rank 2 calls with another operation than the other ranks. No rank hangs or gets\n"
            "a wrong number: each gets an error that shows which rank made which call, where.",
            "mismatch.py",
            _MISMATCH,
            [["-n", "3"]],
            _conclude_mismatch,
        ),
        Lesson(
            "A lost rank",
            "Rank 1 is killed in the middle of the work. The other ranks get an error in\n"
            "their call, and go on as two ranks.",
            "lost.py",
            _LOST,
            [["-n", "3", "--min-ranks", "2"]],
            _conclude_lost,
        ),
        Lesson(
            "The same bits",
            "The same sum over two transports, shm and tcp, of arrays of every framework\n"
            "that is installed. The program prints a digest of all bits of the result.",
            "parity.py",
            _PARITY,
            [["-n", "3", "--backend", "shm"], ["-n", "3", "--backend", "tcp"]],
            _conclude_parity,
        ),
    ]


def _conclude_hello(printed: str) -> str:
    processes = set(re.findall(r"process (\d+)", printed))
    if len(processes) != 3 or printed.count("all add up to [6. 6. 6.]") != 3:
        raise ValueError("expected the sum 1 + 2 + 3 from three processes")
    return "Three processes, and each has the sum. The number in front of a line is its rank."


def _conclude_mismatch(printed: str) -> str:
    reports = printed.count("all_reduce: the ranks made different calls")
    if reports != 3 or printed.count("still usable: [3. 3.]") != 3:
        raise ValueError("expected the error on three ranks, and a call that works afterwards")
    return "Each rank got the error, and the communicator can still be used."


def _conclude_lost(printed: str) -> str:
    times = [float(text) for text in re.findall(r"known after ([0-9.]+) ms", printed)]
    if len(times) != 2 or printed.count("step 4: [2. 2.]") != 2:
        raise ValueError("expected an error for the loss on two ranks, which finish the work")
    return f"The survivors knew after {max(times):.1f} ms, and finished the work as two ranks."


def _conclude_parity(printed: str) -> str:
    found = re.findall(r"(\w+), (\w+): ([0-9a-f]{16})$", printed, re.MULTILINE)
    transports, frameworks, digests = (sorted({line[n] for line in found}) for n in range(3))
    if len(found) != len(transports) * len(frameworks) or len(transports) != 2:
        raise ValueError("expected a line for each framework on each transport")
    if len(digests) != 1:
        raise ValueError("expected the same bits in all results")
    return f"{' and '.join(frameworks)} over {' and '.join(transports)}: the same bits."
