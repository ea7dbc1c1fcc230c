"""``collective run``: start a program as several ranks, on this host or on several."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from collective import ConfigError
from collective.adapters import mpi4py
from collective.inner import HostSlots, detect, settings
from collective.launch import Run, cores_for_each, launch, restart_with
from collective.start import config, host_list, keys, launchers
from collective.tools.show import check_directory, count

_FEWEST = 2  # the smallest number of ranks that is worth a launch


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "run",
        help="start a program as several ranks, on this machine or on several hosts",
        usage="collective run [-n N] [--hosts A:4,B:4 | --hosts auto | --hostfile FILE]\n"
        "           [--spares C:4] [--ssh COMMAND] [--backend NAME] [--timeout S]\n"
        "           [--min-ranks M] [--max-restarts R] [--replace] [--jax] [--mpi4py]\n"
        "           [--bind] [--verbose]\n"
        "           (SCRIPT | -m MODULE | -c TEXT) [ARG ...]",
        description="Start a Python program as N ranks, on this machine or over ssh on the hosts "
        "of --hosts. Each line of output "
        "begins with the rank that wrote it. If a rank fails, the others are stopped within two "
        "seconds, its traceback is shown last, and the command ends with its exit code. Equal "
        "tracebacks of several ranks are shown once; --verbose shows all of them. With "
        "--min-ranks M, the others go on as long as M ranks are left. With --replace, new ranks "
        "join in place of lost ranks. With --max-restarts, all ranks are started again. With "
        "--jax, XLA's collective calls between the CPUs of a JAX program use the transport. With "
        "--mpi4py, a program of mpi4py runs over the transport, without MPI. With --bind, each "
        "rank runs on cores of its own.",
    )
    add_ranks(parser)
    add_hosts(parser)
    parser.add_argument(
        "--spares",
        metavar="HOSTS",
        help="hosts on which new ranks start in place of those of a lost host, such as c:4",
    )
    parser.add_argument(
        "--min-ranks",
        metavar="M",
        help="let the other ranks go on after a loss, as long as M are left",
    )
    parser.add_argument(
        "--max-restarts",
        type=partial(count, least=0),
        default=0,
        metavar="R",
        help="start all ranks again if too few are left, up to R times (default: 0)",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="start a process in place of each lost rank; it joins the others",
    )
    parser.add_argument(
        "--jax",
        action="store_true",
        help="have XLA carry the calls of an unmodified JAX program over the transport",
    )
    parser.add_argument(
        "--mpi4py",
        action="store_true",
        help="have an unmodified program of mpi4py import this package's module in its place",
    )
    parser.add_argument(
        "--bind",
        action="store_true",
        help="run each rank on cores of its own, spread over the NUMA nodes of its host",
    )
    add_program(parser)
    parser.set_defaults(execute=execute)


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the options for ranks; without ``-n``, :func:`say_size` returns the number of ranks."""
    # -np is mpiexec's name for the option.
    parser.add_argument("-n", "-np", type=count, dest="n", metavar="N",
        help="number of ranks (default: the number in Slurm's or torchrun's environment, or "
        f"{_FEWEST})")  # fmt: skip
    # Names that other launchers have for it.
    parser.add_argument("--np", "--nproc-per-node", "--nproc_per_node", type=count, dest="n",
        help=argparse.SUPPRESS)  # fmt: skip
    parser.add_argument("--backend", metavar="NAME", help="transport (default: auto)")
    parser.add_argument("--timeout", metavar="S", help="deadline of every call, in seconds")
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="show every rank's traceback whole, also the frames inside collective",
    )


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add the options for hosts; :func:`hosts_of` reads them."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--hosts",
        metavar="HOSTS",
        help="hosts with their numbers of ranks, such as a:4,b:4; or 'auto' for those of the job "
        "of Slurm, PBS or LSF",
    )
    where.add_argument(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help="file with a host on each line: a:4, a slots=4",
    )
    parser.add_argument(
        "--ssh", metavar="COMMAND", default="ssh", help="command of ssh with options (default: ssh)"
    )


def hosts_of(options: argparse.Namespace) -> list[HostSlots]:
    """Return the hosts that the options name; empty if they name none.

    Raises:
        ConfigError: an option is not a list of hosts, or the file cannot be read.
    """
    if options.hostfile is not None:
        hosts = host_list.from_file(options.hostfile, "--hostfile")
        if not hosts:
            raise ConfigError(f"--hostfile {options.hostfile}: it names no host.")
        return hosts
    if options.hosts is None:
        return []
    if options.hosts == "auto":
        return host_list.from_batch_system(os.environ)
    return host_list.from_text(options.hosts, "--hosts")


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add the program and its arguments as the last positional arguments."""
    what = parser.add_mutually_exclusive_group()
    add = partial(what.add_argument, action="store_const", dest="form", default="")
    add("-m", const="-m", help="run a module, not a script")
    add("-c", const="-c", help="run a text, not a script")
    # All further words belong to the program, even if they look like options.
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="SCRIPT [ARG ...]", help="program to run"
    )


def execute(options: argparse.Namespace) -> int:
    """Run the program; return the exit code."""
    program = program_of(options)
    if not program:
        return _refuse("no program given; name a script, -m and a module, or -c and a text")
    if absent := absent_script(options, program):
        return _refuse(absent)
    hosts = hosts_of(options)
    spares = host_list.from_text(options.spares, "--spares") if options.spares else []
    if options.n is None:
        options.n = sum(host.slots for host in hosts) or say_size("run")
    if wrong := _misuse_of_hosts(options, hosts, spares):
        return _refuse(wrong)
    options.replace = options.replace or bool(spares)
    chosen = _chosen(options)
    if wrong := _misuse(options, chosen) or (_misuse_on_hosts(chosen) if hosts else ""):
        return _refuse(wrong)
    if "trace" in chosen.settings:
        check_directory("trace", Path(str(chosen.settings["trace"].value)))
    arguments = [options.form] * bool(options.form) + program
    variables = dict(chosen.variables)
    if options.jax:
        arguments, of_jax = _under_jax(arguments)
        variables.update(of_jax)
    if options.mpi4py:
        # Here and not in ``variables``: the launcher adds this package's own folder for the ranks.
        os.environ.update(mpi4py.variables())
    run = Run(
        arguments, options.n, variables, chosen.min_ranks, options.max_restarts, options.replace,
        options.verbose, options.bind,
    )  # fmt: skip
    if hosts:
        # Imported here: one host does not need it.
        from collective.launch.hosts.launching import launch_on_hosts

        script = "" if options.form else program[0]
        return launch_on_hosts(run, hosts, script=script, spares=spares, ssh=options.ssh)
    if chosen.on_host == "threads":
        return _run_threads(run, options.is_program)
    return launch(run, mpi=chosen.mpi)


class _RunChoices(NamedTuple):
    """Choices of the options and the settings.

    Attributes:
        settings: settings of the ranks.
        variables: environment variables for those that the options give.
        min_ranks: smallest number of ranks with which the program goes on.
        on_host: name of the transport between ranks of one host, or "".
        mpi: whether MPI is used, on a host or between hosts.
    """

    settings: Mapping[str, config.Setting]
    variables: Mapping[str, str]
    min_ranks: int
    on_host: str
    mpi: bool


def _chosen(options: argparse.Namespace) -> _RunChoices:
    """Check the settings, once here and not once in every rank.

    Raises:
        ConfigError, BackendNotFoundError, BackendUnavailableError: a setting is wrong.
    """
    # For a launch within a rank: min_ranks of the outer launch does not apply to this launch.
    if "COLLECTIVE_RANK" in os.environ:
        os.environ.pop("COLLECTIVE_MIN_RANKS", None)
    given = {
        "backend": options.backend,
        "timeout": options.timeout,
        "min_ranks": options.min_ranks,
    }
    found = settings(given)
    refuse_transports(found)
    variables = {
        f"COLLECTIVE_{key.upper()}": str(found[key].value)
        for key, value in given.items()
        if value is not None
    }
    min_ranks = int(found["min_ranks"].value) if "min_ranks" in found else options.n
    named = str(found["backend"].value) if "backend" in found else ""
    on_host = keys.by_device(named).get("cpu", named)
    mpi = "mpi" in (on_host, found["across"].value if "across" in found else "")
    return _RunChoices(found, variables, min_ranks, on_host, mpi)


def _run_threads(run: Run, is_program: bool) -> int:
    """Run the program in ranks that are threads of this process; return the exit code."""
    os.environ.update(run.settings)
    if is_program:
        restart_with(OMP_NUM_THREADS=str(cores_for_each(run.size)))
    # Imported here: the module imports NumPy and the transports.
    from collective.launch import threads

    return threads.main(run)


def program_of(options: argparse.Namespace) -> list[str]:
    """Return the program and its arguments, without a ``python`` in front, as after mpiexec."""
    # A first -- ends the options of collective, as usual; a later -- belongs to the program.
    program: list[str] = options.program
    program = program[1:] if program[:1] == ["--"] else program
    named = "" if options.form or not program or os.path.exists(program[0]) else program[0]
    if re.fullmatch(r"python[\d.]*", named):
        program = program[1:]
        if program[:1] in (["-m"], ["-c"]):
            options.form, program = program[0], program[1:]
    return program


def absent_script(options: argparse.Namespace, program: Sequence[str]) -> str:
    """Return an error text if the script does not exist; "" if it does, or if none is given."""
    if program and not options.form and not os.path.exists(program[0]):
        near = difflib.get_close_matches(program[0], os.listdir(), 1)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        return f"script {program[0]!r}: no such file{hint}"
    return ""


def _misuse(options: argparse.Namespace, chosen: _RunChoices) -> str:
    """Return which options contradict each other, with the remedy; "" if none do."""
    found, _, min_ranks, on_host, mpi = chosen
    if min_ranks > options.n:
        return (
            f"min_ranks: {min_ranks} ({found['min_ranks'].origin}) with {options.n} ranks; it can "
            f"be {options.n} at most"
        )
    if options.replace and min_ranks == options.n:
        return (
            f"--replace without --min-ranks below {options.n}: when a rank is lost, the others "
            "are stopped, so a new rank has no rank to join. Give, for example, --min-ranks "
            f"{max(1, options.n - 1)}"
        )
    if options.replace and (mpi or on_host == "threads"):
        named = str(found["backend"].value) if "backend" in found else ""
        return (
            f"--replace with backend {named!r}: a process can join neither an MPI "
            "world nor ranks that are threads. Use --backend shm or tcp"
        )
    if options.max_restarts and on_host == "threads":
        return (
            "--max-restarts with backend threads: ranks that are threads cannot be stopped. "
            "Use --backend shm, whose ranks are processes"
        )
    if options.bind and on_host == "threads":
        return (
            "--bind with backend threads: the ranks are one process. Use --backend shm, whose "
            "ranks are processes"
        )
    if options.jax and on_host == "threads":
        return (
            "--jax with backend threads: JAX needs a process for each rank. Use --backend shm, "
            "whose ranks are processes"
        )
    if options.mpi4py and on_host == "threads":
        return (
            "--mpi4py with backend threads: mpi4py has one COMM_WORLD in a process. Use --backend "
            "shm, whose ranks are processes"
        )
    if options.mpi4py and mpi:
        return (
            "--mpi4py with mpi: this option replaces mpi4py, through which the transport mpi makes "
            "its calls. Use --backend shm, tcp or hierarchical, or omit --mpi4py"
        )
    if options.mpi4py and min_ranks < options.n:
        return (
            f"--mpi4py with min_ranks {min_ranks} of {options.n}: a program of mpi4py cannot go on "
            "without one of its processes. Omit --min-ranks, and use --max-restarts to start all "
            "again"
        )
    if options.jax and min_ranks < options.n:
        return (
            f"--jax with min_ranks {min_ranks} of {options.n}: a JAX program cannot go on without "
            "one of its processes. Omit --min-ranks, and use --max-restarts to start all again"
        )
    return ""


def _misuse_of_hosts(
    options: argparse.Namespace, hosts: Sequence[HostSlots], spares: Sequence[HostSlots]
) -> str:
    """Return which options about hosts contradict each other, with the remedy; "" if none do."""
    slots = sum(host.slots for host in hosts)
    if hosts and options.n > slots:
        return (
            f"-n {options.n} with {slots} ranks on the hosts: give more hosts, or more ranks for "
            "each, such as --hosts a:4,b:4"
        )
    if spares and not hosts:
        return "--spares without --hosts: name the hosts of the ranks, too"
    both = {host.name for host in hosts} & {host.name for host in spares}
    if both:
        return f"--spares {', '.join(sorted(both))}: a spare host is not one of --hosts"
    return ""


def _misuse_on_hosts(chosen: _RunChoices) -> str:
    """Return why a transport cannot be used with --hosts, with the remedy; "" if it can."""
    if chosen.mpi:
        return (
            "--hosts with mpi: only mpiexec makes an MPI world. Start the program with mpiexec, "
            "or omit --backend mpi"
        )
    if chosen.on_host in ("threads", "shm"):
        return (
            f"--hosts with backend {chosen.on_host}: it connects ranks of one host only. Omit "
            "--backend, or use --backend hierarchical"
        )
    return ""


def _under_jax(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return arguments of Python that run a JAX program with the plug-in for XLA, and variables.

    Raises:
        BackendUnavailableError: JAX is not installed, or the plug-in is not built or does not fit.
    """
    # Imported here: the modules import NumPy.
    from collective.adapters.jax.xla.library import PROGRAM, variables

    found = variables()
    if "JAX_PLATFORMS" not in os.environ:
        found["JAX_PLATFORMS"] = "cpu"
    return [str(PROGRAM), *arguments], found


def refuse_transports(found: Mapping[str, config.Setting]) -> None:
    """Refuse transports that cannot be used, once here and not once in every rank.

    Raises:
        BackendNotFoundError: there is no transport of that name.
        BackendUnavailableError: a library that the transport needs is not installed.
    """
    # Imported here: the module imports NumPy.
    from collective.inner import registry

    for value in (str(found[key].value) for key in ("backend", "across") if key in found):
        for name in keys.by_device(value).values() or [value]:
            if name not in ("auto", "mpi"):  # the launcher looks for mpiexec itself
                registry.require(name)


def default_size(environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the number of ranks to start on this host, and a line that says why.

    Args:
        environ: environment variables, such as ``os.environ``.

    Raises:
        ConfigError: a launcher has started several of these processes, and each would start that
            many ranks; or a launcher's variables contradict each other.
    """
    launched = detect(environ)
    if launched is not None and launched.size > 1:
        raise ConfigError(
            f"run: -n is not given, and this is process {launched.rank} of {launched.size} that "
            f"{launched.launcher} has started. Each of these would start its own ranks. Start "
            f"the program itself under {launched.launcher}, or give -n."
        )
    found = launchers.allocation(environ)
    if found is not None:
        what = "1 rank" if found.ranks == 1 else f"{found.ranks} ranks"
        more = f"; on this host of {found.hosts} only" if found.hosts > 1 else ""
        return found.ranks, f"{what}, as {found.variable} says{more}; -n N for another number"
    return _FEWEST, f"{_FEWEST} ranks; -n N for another number"


def say_size(command: str) -> int:
    """Return the number of ranks to start on this host; print it and its reason on stderr.

    Raises:
        ConfigError: as for :func:`default_size`.
    """
    size, reason = default_size(os.environ)
    print(f"collective {command}: {reason}", file=sys.stderr)
    return size


def _refuse(reason: str) -> int:
    print(f"collective run: {reason}", file=sys.stderr)
    return 2
