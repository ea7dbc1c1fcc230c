"""Start and stop of ranks on this host, for ``collective run``.

There are three generations of processes. The user starts the launcher, whose exit code counts.
The launcher forks the supervisor (:mod:`collective.launch.supervisor`). The supervisor starts the
ranks, for MPI through mpiexec (:mod:`collective.launch.mpi`). Launcher and supervisor watch each
other, so if one of them is killed, the other cleans up. If the supervisor dies, the kernel kills
the ranks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from collective.contract.secret import parse
from collective.elastic.arrivals import Arrivals
from collective.platform import adopt_orphans, held_port, usable_cores
from collective.start.resolver import in_directory
from collective.start.rundir import join, leave

from .attempts import run_attempts
from .mpi import MpiSupervisor
from .mpiexec import Mpiexec
from .processes import end_children
from .supervisor import Replacing, Supervisor

__all__ = ["cores_for_each", "launch", "restart_with"]

# Signals that the launcher passes on to the ranks. A signal that is ignored, such as SIGHUP under
# nohup, stays ignored.
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
    verbose: bool = False,
) -> int:
    """Run a program as ``size`` ranks and wait until all have ended.

    This function forks, handles signals, and ends every child of the process. So call it from the
    main thread of a process that has no other work.

    Args:
        program: arguments of the Python interpreter: a script, or ``-m`` and a module, followed
            by the arguments of the program.
        size: number of ranks, at least 1.
        settings: environment variables for all ranks, such as ``COLLECTIVE_BACKEND``.
        mpi: if true, the ranks are an MPI world. Then mpiexec starts them, and its command is
            printed.
        min_ranks: number of ranks that must survive for the run to continue after a loss; by
            default all.
        max_restarts: how often all ranks are started again, each time from scratch, after fewer
            than ``min_ranks`` have survived.
        replace: if true, a new process is started for each lost rank and joins the others, while
            at least ``min_ranks`` survive. Not with ``mpi``.
        verbose: if true, all tracebacks are shown whole, as the ranks write them. By default,
            equal tracebacks are shown once, and without the frames of this package.

    Returns:
        0 if the run succeeded, also if it lost ranks but ``min_ranks`` survived. Otherwise the
        exit code of the rank that failed first, where 128 + n stands for a death by signal n. If
        signal n ended the launcher itself, 128 + n.

    Raises:
        RendezvousError: there is no private directory where the ranks could meet.
        BackendUnavailableError: with ``mpi``, there is no mpiexec.
        UnsupportedError: with ``mpi`` and ``min_ranks`` below ``size``, mpiexec ends all ranks
            when one dies.
    """
    command = [sys.executable, "-u", *program]
    spare = size - (min_ranks or size)
    if mpi and spare:
        Mpiexec().require_shrinking()
    start = Mpiexec().command(size, lasting=spare > 0) if mpi else []
    if start:
        print(f"collective run: {shlex.join([*start, *command])}", file=sys.stderr)
    store, hold = join(f"run-{secrets.token_hex(8)}")

    @contextlib.contextmanager
    def attempt(number: int, control: int) -> Iterator[Supervisor]:
        # Each attempt has a directory of its own, so that it finds no keys of an earlier attempt.
        directory = store / f"start-{number}"
        directory.mkdir(mode=0o700)
        # The port is held to the end of the attempt. A process that replaces rank 0 serves there
        # again.
        with held_port() as port:
            shared = {**os.environ, **_shared_variables(size, directory, port), **settings}
            if replace:
                shared["COLLECTIVE_GROW"] = "on"
            count = {"COLLECTIVE_RESTART": str(number), "TORCHELASTIC_RESTART_COUNT": str(number)}
            environments = [{**shared, **count, **_rank_variables(rank)} for rank in range(size)]
            if start:
                yield MpiSupervisor(
                    control, start, command, environments, directory, spare, verbose
                )
                return
            replacing = _replacing(environments, directory) if replace else None
            yield Supervisor(control, command, environments, spare, replacing, verbose)

    try:
        return _watch_over(
            partial(run_attempts, attempt, size, max_restarts), partial(leave, store, hold)
        )
    finally:
        leave(store, hold)


def _replacing(environments: Sequence[Mapping[str, str]], directory: Path) -> Replacing:
    """Return the rule by which lost ranks of an attempt are replaced."""
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
    # Block the signals until both processes have installed their handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    with warnings.catch_warnings():
        # Python warns about a fork with threads. NumPy's threads are idle, and the child does not
        # call NumPy, so the fork is safe.
        warnings.simplefilter("ignore", DeprecationWarning)
        supervisor = os.fork()
    if supervisor == 0:
        os.close(handle)
        _be_supervisor(partial(supervise, control), clean_up, signals)
    os.close(control)

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(OSError):  # the supervisor has ended, so waitpid() returns soon
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
    """Run the supervisor in the forked child and exit; never return into the launcher's code."""
    code = 1
    try:
        os.setsid()  # signals to the launcher's process group or terminal do not arrive here
        for number in signals:
            signal.signal(number, signal.SIG_DFL)  # drop the handlers inherited from the launcher
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        code = supervise()
        clean_up()  # the launcher also cleans up, unless it was killed
    except OSError as error:
        print(f"collective run: the ranks could not be started: {error}", file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def _shared_variables(size: int, store: Path, port: int) -> dict[str, str]:
    variables = {
        "COLLECTIVE_SIZE": str(size),
        "COLLECTIVE_LOCAL_SIZE": str(size),
        "COLLECTIVE_STORE": str(store),
        # A new secret for each launch. It replaces a secret in the launcher's environment. Other
        # processes of this user can read it in /proc, but it is never on a command line.
        "COLLECTIVE_SECRET": secrets.token_hex(32),
        # Variables for programs written for torch.distributed.
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
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
        # Only rank 0 may draw moving progress bars: several ranks would fight for the last line.
        variables["TTY_INTERACTIVE"] = "1" if rank == 0 else "0"
    return variables


def _terminal_variables(size: int) -> dict[str, str]:
    """Return variables that describe the launcher's terminal to the ranks, which write to pipes.

    TTY_COMPATIBLE and TTY_INTERACTIVE are for rich; many programs read COLUMNS.
    """
    if not os.isatty(1):
        return {}
    width = os.get_terminal_size(1).columns or 80  # some pseudo-terminals report 0
    prefix = len(f"[{size - 1}] ")
    return {
        "COLUMNS": str(max(20, width - prefix)),
        "TTY_COMPATIBLE": os.environ.get("TTY_COMPATIBLE", "1"),
    }


def _python_path() -> str:
    """Return a PYTHONPATH with which the ranks import the package that is running now."""
    before = os.environ.get("PYTHONPATH", "")
    home = str(Path(__file__).resolve().parent.parent.parent)
    # Last, so that other folders of a source tree (tests, docs) do not hide the user's modules.
    paths = [path for path in before.split(os.pathsep) if path]
    installed = Path(home).name in ("site-packages", "dist-packages")
    return before if installed or home in paths else os.pathsep.join([*paths, home])


def restart_with(**variables: str) -> None:
    """Run this program again with environment variables that libraries read once, if any is new.

    This is for programs that have already imported such a library. If the program runs again, the
    function does not return.
    """
    new = {name: value for name, value in variables.items() if name not in os.environ}
    if new:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **new})


def cores_for_each(size: int) -> int:
    """Return how many threads each of ``size`` ranks should compute with.

    Ranks that each start one thread for every core slow each other down by far. torchrun sets 1,
    which leaves cores idle if there are fewer ranks than cores.
    """
    return max(1, usable_cores() // size)
