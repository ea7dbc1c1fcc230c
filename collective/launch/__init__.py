"""Start ranks on this host, and stop them: what ``collective run`` does.

Three generations of processes: the launcher, which the user started and whose exit code
counts; the supervisor (:mod:`collective.launch.supervisor`), forked from it; and the ranks,
with mpiexec between (:mod:`collective.launch.mpi`) where they are to be MPI's. Launcher and
supervisor watch each other, so that one of them is left to clean up when the other is killed,
and the kernel kills the ranks with the supervisor.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from collective.contract.secret import parse
from collective.elastic.arrivals import Arrivals
from collective.start.resolver import in_directory
from collective.start.rundir import join, leave

from .attempts import run_attempts
from .mpi import MpiSupervisor
from .mpiexec import Mpiexec
from .processes import adopt_orphans, end_children
from .supervisor import Replacing, Supervisor

__all__ = ["cores_for_each", "launch", "restart_with"]

# Passed on to the ranks. One that is ignored, as by nohup, stays ignored.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PAUSING = (signal.SIGTSTP, signal.SIGCONT)


def launch(
    program: Sequence[str],
    size: int,
    settings: Mapping[str, str],
    *,
    mpi: bool = False,
    min_ranks: int | None = None,
    max_restarts: int = 0,
    replace: bool = False,
) -> int:
    """Run a program as ``size`` ranks and wait until all have ended.

    Must be called from the main thread of a process that does nothing else: it forks,
    handles signals, and ends every child of the process.

    Args:
        program: arguments of the Python interpreter: a script or ``-m`` and a module,
            then its own arguments.
        size: how many ranks, at least 1.
        settings: environment variables for all ranks, such as ``COLLECTIVE_BACKEND``.
        mpi: whether they are to be an MPI world: then mpiexec starts them, with a command
            that is printed.
        min_ranks: how many ranks have to be left for the others to go on when some are lost;
            by default all.
        max_restarts: how often all ranks are started again, each time from nothing, once more
            have failed than that.
        replace: whether a process is started in place of each rank that is lost, while enough are
            left, which joins them. Not with ``mpi``.

    Returns:
        0, also if some were lost that may be; or the exit code of the rank that failed first,
        where 128 + n stands for a death by signal n; or 128 + n if signal n ended the launcher
        itself.

    Raises:
        RendezvousError: there is no private place where the ranks could meet.
        BackendUnavailableError: with ``mpi``, there is no mpiexec.
        UnsupportedError: with ``mpi`` and fewer ``min_ranks`` than ``size``, it is one that ends
            the ranks when one dies.
    """
    command = [sys.executable, "-u", *program]
    spare = size - (min_ranks or size)
    if mpi and spare:
        Mpiexec().require_shrinking()
    start = Mpiexec().command(size, lasting=spare > 0) if mpi else []
    if start:
        print(f"collective run: {shlex.join([*start, *command])}", file=sys.stderr)
    store, hold = join(f"run-{secrets.token_hex(8)}")

    def attempt(number: int, control: int) -> Supervisor:
        # Nothing that an attempt before has left there is found by this one.
        directory = store / f"start-{number}"
        directory.mkdir(mode=0o700)
        shared = {**os.environ, **_shared_variables(size, directory), **settings}
        if replace:
            shared["COLLECTIVE_GROW"] = "on"
        count = {"COLLECTIVE_RESTART": str(number), "TORCHELASTIC_RESTART_COUNT": str(number)}
        environments = [{**shared, **count, **_rank_variables(rank)} for rank in range(size)]
        if start:
            return MpiSupervisor(control, start, command, environments, directory, spare)
        replacing = _replacing(environments, directory) if replace else None
        return Supervisor(control, command, environments, spare, replacing)

    try:
        return _watch_over(
            partial(run_attempts, attempt, size, max_restarts), partial(leave, store, hold)
        )
    finally:
        leave(store, hold)


def _replacing(environments: Sequence[Mapping[str, str]], directory: Path) -> Replacing:
    """Return how lost ranks of an attempt are replaced."""
    secret = parse(environments[0]["COLLECTIVE_SECRET"])

    def admitted() -> set[int]:
        return Arrivals(in_directory(directory, secret), "").admitted()

    return Replacing(lambda rank: {**environments[rank], "COLLECTIVE_JOIN": "late"}, admitted)


def _watch_over(supervise: Callable[[int], int], clean_up: Callable[[], None]) -> int:
    """Run ``supervise`` in a child of this process and return its exit code."""
    adopt_orphans()
    control, handle = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    signals = [s for s in _ENDING if signal.getsignal(s) is not signal.SIG_IGN]
    signals += _PAUSING
    # Held back until both processes know what to do with them.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    with warnings.catch_warnings():
        # NumPy's threads are idle, and the child calls nothing of NumPy.
        warnings.simplefilter("ignore", DeprecationWarning)
        supervisor = os.fork()
    if supervisor == 0:
        os.close(handle)
        _be_supervisor(partial(supervise, control), clean_up, signals)
    os.close(control)

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(OSError):  # it has ended, and so does our wait
            os.write(handle, bytes([number]))
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    before = {number: signal.signal(number, pass_on) for number in signals}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    _, status = os.waitpid(supervisor, 0)
    end_children(0.0)
    for number, handler in before.items():
        signal.signal(number, handler)
    os.close(handle)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        print(f"collective run: the supervisor was killed by signal {-code}", file=sys.stderr)
        return 128 - code
    return code


def _be_supervisor(
    supervise: Callable[[], int], clean_up: Callable[[], None], signals: Sequence[int]
) -> None:
    """Do the forked child's work and exit; never return into the launcher's program."""
    code = 1
    try:
        os.setsid()  # out of reach of what is sent to the launcher's group or terminal
        for number in signals:
            signal.signal(number, signal.SIG_DFL)  # the command's handlers are the launcher's
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        code = supervise()
        clean_up()  # the launcher does so too, if it is still there
    except OSError as error:
        print(f"collective run: the ranks could not be started: {error}", file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def _shared_variables(size: int, store: Path) -> dict[str, str]:
    variables = {
        "COLLECTIVE_SIZE": str(size),
        "COLLECTIVE_LOCAL_SIZE": str(size),
        "COLLECTIVE_STORE": str(store),
        # Of this launch alone, so it comes before one that the launcher was given. Others of
        # this user can read it in /proc; it is never on a command line.
        "COLLECTIVE_SECRET": secrets.token_hex(32),
        # What programs written for torch.distributed look for.
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "PYTHONPATH": _python_path(),
    }
    variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(cores_for_each(size)))
    return {**variables, **_terminal_variables(size)}


def _rank_variables(rank: int) -> dict[str, str]:
    variables = {
        "COLLECTIVE_RANK": str(rank),
        "COLLECTIVE_LOCAL_RANK": str(rank),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    if os.isatty(1):
        # Bars that move are for one rank: several would fight for the last line.
        variables["TTY_INTERACTIVE"] = "1" if rank == 0 else "0"
    return variables


def _terminal_variables(size: int) -> dict[str, str]:
    """Tell the ranks, who write into pipes, of the terminal behind them.

    TTY_COMPATIBLE and TTY_INTERACTIVE are rich's; COLUMNS is what everybody reads.
    """
    if not os.isatty(1):
        return {}
    width = os.get_terminal_size(1).columns or 80  # some pseudo-terminals say 0
    prefix = len(f"[{size - 1}] ")
    return {
        "COLUMNS": str(max(20, width - prefix)),
        "TTY_COMPATIBLE": os.environ.get("TTY_COMPATIBLE", "1"),
    }


def _python_path() -> str:
    """Return PYTHONPATH such that the ranks import the package that is running now."""
    before = os.environ.get("PYTHONPATH", "")
    home = str(Path(__file__).resolve().parent.parent.parent)
    # Last, so that a source tree's other folders (tests, docs) hide nobody's modules.
    paths = [path for path in before.split(os.pathsep) if path]
    installed = Path(home).name in ("site-packages", "dist-packages")
    return before if installed or home in paths else os.pathsep.join([*paths, home])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def restart_with(**variables: str) -> None:
    """Run this program anew with environment variables that libraries read once, if any is new.

    For what has imported such a library already; it does not return then.
    """
    new = {name: value for name, value in variables.items() if name not in os.environ}
    if new:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **new})


def cores_for_each(size: int) -> int:
    """Return how many threads each of ``size`` ranks is to compute with.

    Ranks that each start a thread a core slow each other down by far. torchrun says 1, which
    leaves cores idle where there are fewer ranks than cores.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    usable = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, usable // size)
