"""``collective run``: start a program as several ranks on this host."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from collective import install
from collective.errors import ConfigError
from collective.launch import cores_for_each, launch, restart_with
from collective.start.config import Setting, settings
from collective.start.keys import by_device
from collective.start.launchers import allocation, detect
from collective.tools.show import count

from .outputs import check_directory

__all__ = [
    "absent_script",
    "add_parser",
    "add_program",
    "add_ranks",
    "default_size",
    "program_of",
    "refuse_transports",
    "say_size",
]

_FEWEST = 2  # ranks that are worth a launch


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "run",
        help="start a program as several ranks on this machine",
        usage="collective run [-n N] [--backend NAME] [--timeout S] [--min-ranks M]\n"
        "           [--max-restarts R] [--replace] (SCRIPT | -m MODULE) [ARG ...]",
        description="Start a Python program as N ranks on this machine. Each line of output "
        "gets its rank in front. If a rank fails, the others are stopped within two seconds, "
        "its traceback is shown last, and its exit code is ours. With --min-ranks they go on "
        "as long as so many are left, with --replace others join in place of the lost, and with "
        "--max-restarts all are started again.",
    )
    add_ranks(parser)
    parser.add_argument(
        "--min-ranks", metavar="M", help="let the others go on when ranks are lost, down to M"
    )
    parser.add_argument(
        "--max-restarts",
        type=_restarts,
        default=0,
        metavar="R",
        help="start all ranks again when fewer are left, up to R times (default: 0)",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="start a process in place of each lost rank, which joins the others",
    )
    parser.add_argument("-m", action="store_true", dest="module", help="run a module, not a script")
    add_program(parser)
    parser.set_defaults(execute=execute)


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the options of ranks; where ``-n`` is not given, :func:`say_size` has the number."""
    # -np is what mpiexec calls it.
    parser.add_argument("-n", "-np", type=count, dest="n", metavar="N",
        help="how many ranks (default: what Slurm or torchrun's environment says, or "
        f"{_FEWEST})")  # fmt: skip
    parser.add_argument("--backend", metavar="NAME", help="the transport (default: auto)")
    parser.add_argument("--timeout", metavar="S", help="deadline of every call, in seconds")


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add the program and its arguments, as the last of all."""
    # Everything from here on is the program's own, whatever it looks like.
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="SCRIPT [ARG ...]", help="what to run"
    )


def execute(options: argparse.Namespace) -> int:
    """Run the program; return the exit code."""
    program = program_of(options)
    if not program:
        return _refuse("no program given; name a script, or -m and a module")
    if absent := absent_script(options, program):
        return _refuse(absent)
    if "COLLECTIVE_RANK" in os.environ:  # a launch within a rank, whose floor is not this one's
        os.environ.pop("COLLECTIVE_MIN_RANKS", None)
    given = {
        "backend": options.backend,
        "timeout": options.timeout,
        "min_ranks": options.min_ranks,
    }
    if options.n is None:
        options.n = say_size("run")
    # A misspelt setting is one error here instead of one a rank.
    found = settings(given)
    refuse_transports(found)
    min_ranks = int(found["min_ranks"].value) if "min_ranks" in found else options.n
    named = str(found["backend"].value) if "backend" in found else ""
    on_host = by_device(named).get("cpu", named)
    mpi = "mpi" in (on_host, found["across"].value if "across" in found else "")
    if wrong := _misuse(options, found, min_ranks, on_host, mpi):
        return _refuse(wrong)
    if "trace" in found:
        check_directory("trace", Path(str(found["trace"].value)))
    if on_host != "threads":
        _say_sources(program[0], options.module)
    variables = {
        f"COLLECTIVE_{key.upper()}": str(found[key].value)
        for key, value in given.items()
        if value is not None
    }
    arguments = ["-m"] * options.module + program
    if on_host == "threads":
        os.environ.update(variables)
        if options.is_program:
            restart_with(OMP_NUM_THREADS=str(cores_for_each(options.n)))
        # Here and not above: it brings NumPy and the transports along.
        from collective.launch import threads

        return threads.main([str(options.n), *arguments], spare=options.n - min_ranks)
    return launch(
        arguments,
        options.n,
        variables,
        mpi=mpi,
        min_ranks=min_ranks,
        max_restarts=options.max_restarts,
        replace=options.replace,
    )


def program_of(options: argparse.Namespace) -> list[str]:
    """Return the program and its arguments."""
    # A first -- ends our own options, as everywhere; later ones are the program's.
    program: list[str] = options.program
    return program[1:] if program[:1] == ["--"] else program


def absent_script(options: argparse.Namespace, program: Sequence[str]) -> str:
    """Return that there is no such script; nothing where there is, or none is given."""
    if program and not options.module and not os.path.exists(program[0]):
        return f"script {program[0]!r}: no such file"
    return ""


def _say_sources(program: str, is_module: bool) -> None:
    """Say so where ranks import a clone's sources although the package is installed, too.

    Python looks first beside the script, or for a module in the working directory; then where
    PYTHONPATH says, to which the launcher adds where it is itself.
    """
    first = Path.cwd() if is_module else Path(program).resolve().parent
    safe = getattr(sys.flags, "safe_path", False)  # from Python 3.11 on
    places = [] if safe else [first]
    places += [Path(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    found = (each for each in places if (each / "collective" / "__init__.py").is_file())
    imported = next(found, Path(__file__).resolve().parents[3])
    if install.is_clone(imported) and (installed := install.installed_beside(imported)):
        built = any((imported / "collective" / "native").glob("_core.*.so"))
        print(
            f"collective run: the ranks import the sources in {imported}, "
            f"{'with' if built else 'without'} the native core, not what is installed in "
            f"{installed}; pip install -e {shlex.quote(str(imported))} makes them one",
            file=sys.stderr,
        )


def _misuse(
    options: argparse.Namespace,
    found: Mapping[str, Setting],
    min_ranks: int,
    on_host: str,
    mpi: bool,
) -> str:
    """Return which options do not go together, with the remedy; empty if all do.

    Args:
        min_ranks: how many ranks are to be left at least.
        on_host: the transport between ranks of one host, if it is named.
        mpi: whether MPI is used, on a host or between hosts.
    """
    if min_ranks > options.n:
        return (
            f"min_ranks: {min_ranks} ({found['min_ranks'].origin}) with {options.n} ranks; as many "
            "at most"
        )
    if options.replace and min_ranks == options.n:
        return (
            f"--replace without --min-ranks below {options.n}; the others are stopped when a rank "
            f"is lost, and nobody is left to join. Give --min-ranks {max(1, options.n - 1)}, say"
        )
    if options.replace and (mpi or on_host == "threads"):
        named = str(found["backend"].value) if "backend" in found else ""
        return (
            f"--replace with backend {named!r}; a process can join neither an MPI "
            "world nor ranks that are threads. Use --backend shm or gloo"
        )
    if options.max_restarts and on_host == "threads":
        return (
            "--max-restarts with backend threads; ranks that are threads cannot be stopped. "
            "Use --backend shm, whose ranks are processes"
        )
    return ""


def refuse_transports(found: Mapping[str, Setting]) -> None:
    """Refuse transports that cannot be had, once here instead of once a rank.

    Raises:
        BackendNotFoundError, BackendUnavailableError: there is none of that name, or what
            it stands on is not installed.
    """
    # Here and not above: it brings NumPy along.
    from collective.contract.registry import require

    for value in (str(found[key].value) for key in ("backend", "across") if key in found):
        for name in by_device(value).values() or [value]:
            if name not in ("auto", "mpi"):  # the launcher looks for mpiexec itself
                require(name)


def default_size(environ: Mapping[str, str]) -> tuple[int, str]:
    """Return how many ranks to start on this host, and in a line why.

    Args:
        environ: environment variables, such as ``os.environ``.

    Raises:
        ConfigError: this process is one of several that a launcher has started, each of which
            would start as many; or a launcher's variables contradict each other.
    """
    launched = detect(environ)
    if launched is not None and launched.size > 1:
        raise ConfigError(
            f"run: -n is not given, and this is process {launched.rank} of {launched.size} that "
            f"{launched.launcher} has started, each of which would start ranks of its own; start "
            f"the program itself under {launched.launcher}, or give -n."
        )
    found = allocation(environ)
    if found is not None:
        what = "1 rank" if found.ranks == 1 else f"{found.ranks} ranks"
        more = f"; on this host of {found.hosts} only" if found.hosts > 1 else ""
        return found.ranks, f"{what}, as {found.variable} says{more}; -n N for another number"
    return _FEWEST, f"{_FEWEST} ranks; -n N for another number"


def say_size(command: str) -> int:
    """Return how many ranks to start on this host, and tell the user that on standard error.

    Raises:
        ConfigError: as :func:`default_size`.
    """
    size, reason = default_size(os.environ)
    print(f"collective {command}: {reason}", file=sys.stderr)
    return size


def _restarts(text: str) -> int:
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}; it must be an integer >= 0")
    return int(text)


def _refuse(reason: str) -> int:
    print(f"collective run: {reason}", file=sys.stderr)
    return 2
