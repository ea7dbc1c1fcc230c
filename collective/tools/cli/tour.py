"""``collective tour``: a two-minute demonstration on the user's machine."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from collective.platform import die_with_parent
from collective.tools.tour import READ_ON, Lesson, lessons

__all__ = ["add_parser", "lead", "perform"]


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
        chosen: lessons to show; by default those of :func:`~collective.tools.tour.lessons`.
    """
    shown = lessons() if chosen is None else chosen
    failed = 0
    with tempfile.TemporaryDirectory(prefix="collective-tour-") as directory:
        for number, lesson in enumerate(shown, 1):
            print(f"{number} of {len(shown)}: {lesson.title}\n\n{lesson.text}\n")
            print("".join(f"    {line}".rstrip() + "\n" for line in lesson.program.splitlines()))
            if not wait("Enter runs it, q ends the tour: "):
                return failed
            try:
                print(f"{perform(lesson, Path(directory))}\n", flush=True)
            except ValueError as error:
                failed = 1
                print(f"collective tour: {lesson.title}: {error}.\n", file=sys.stderr, flush=True)
    print(READ_ON, end="")
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
        preexec_fn=die_with_parent(),
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
