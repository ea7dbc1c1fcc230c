"""``collective run --backend threads``: the ranks are threads of one process.

Each thread runs the program as ``__main__``, in its own namespace. The output of the ranks gets
the same prefixes as that of processes. The ranks share modules, ``sys.argv`` and the environment,
like any threads.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import secrets
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterable, Sequence
from importlib.abc import InspectLoader
from types import CodeType, ModuleType
from typing import Any, TextIO

from collective.inner import Failure, World, session
from collective.start.connecting import tell_ended
from collective.start.stores import MemoryStore

from .tracebacks import sites_of_threads, summary
from .variables import Run
from .verdict import FailedRank, first_in_cause, loss, losses, report

# Seconds that the other ranks have to end after one has failed.
_GRACE_S = 1.5


class _Prefixed:
    """Text stream that puts the writing thread's rank before each line.

    Attributes:
        broken: the error of the last write, if the stream accepts no more output; else None. The
            program does not see this error: later output is dropped.
    """

    def __init__(self, stream: TextIO) -> None:
        self.broken: OSError | None = None
        self._stream = stream
        self._lock = threading.Lock()
        self._rests: dict[int, str] = {}
        self._rank = threading.local()

    def begin(self, rank: int) -> None:
        """Treat all output of this thread from now on as the output of ``rank``."""
        self._rank.value = rank

    def write(self, text: str) -> int:
        """Write complete lines, and keep the rest until its line ends."""
        rank = getattr(self._rank, "value", None)
        with self._lock:
            if rank is None:
                self._put(text)
                return len(text)
            complete, newline, rest = (self._rests.get(rank, "") + text).rpartition("\n")
            self._rests[rank] = rest
            if newline:
                lines = [
                    f"[{rank}] {line.rpartition(chr(13))[2]}\n" for line in complete.split("\n")
                ]
                self._put("".join(lines))
        return len(text)

    def _put(self, text: str) -> None:
        try:
            if self.broken is None:
                self._stream.write(text)
                self._stream.flush()
        except OSError as error:
            self.broken = error

    def flush(self) -> None:
        """Do nothing: :meth:`write` writes complete lines at once."""

    def writelines(self, lines: Iterable[str]) -> None:
        """Write the lines one after the other."""
        for line in lines:
            self.write(line)

    def finish(self) -> None:
        """Write the unfinished line of this thread, if there is one."""
        if self._rests.get(getattr(self._rank, "value", -1)):
            self.write("\n")

    def isatty(self) -> bool:
        """Return False, since several ranks share the terminal."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Main(ModuleType):
    """Module ``__main__`` of all ranks: in the thread of a rank, its attributes are that rank's.

    Pickle finds the classes of a program by the name of their module. So a rank's class becomes the
    receiver's class of the same name, as between processes.
    """

    def __init__(self, path: str) -> None:
        super().__init__("__main__")
        self.__file__ = path
        self._of_thread = threading.local()

    def begin(self, namespace: dict[str, Any]) -> None:
        """Make ``namespace`` the attributes of this module in this thread."""
        self._of_thread.namespace = namespace

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return getattr(self._of_thread, "namespace", {})

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(f"module '__main__' has no attribute {name!r}") from None


class _Program:
    """Program that runs on every rank, with the results of the ranks."""

    def __init__(self, run: Run, code: CodeType, path: str, package: str | None) -> None:
        self.codes: dict[int, int] = {}
        self.failures: list[tuple[int, str]] = []  # ranks and their tracebacks
        self.failed = threading.Event()
        self._run = run
        self._code = code
        self._path = path
        self._package = package
        self._main = sys.modules["__main__"] = _Main(path)
        self._job = f"threads-{secrets.token_hex(8)}"
        self._store = MemoryStore()
        self._ended: dict[int, str] = {}
        self._telling = threading.Lock()

    def run(self, rank: int, streams: Sequence[_Prefixed]) -> None:
        """Run the program as ``rank``."""
        size, least = self._run.size, self._run.least
        for stream in streams:
            stream.begin(rank)
        world = World(
            rank, size, rank, size, socket.gethostname(), "collective", self._job, self._store
        )
        session.thread_world(world)
        namespace = {
            "__name__": "__main__",
            "__file__": self._path,
            "__package__": self._package,
            "__builtins__": __builtins__,
        }
        self._main.begin(namespace)
        code, text = 0, ""
        try:
            exec(self._code, namespace)
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
            if leave.code is not None and not isinstance(leave.code, int):
                print(leave.code, file=sys.stderr)
        except BaseException as error:
            code = 1
            # Skip the first frame, which is the launcher's.
            trace = error.__traceback__.tb_next if error.__traceback__ else None
            text = "".join(traceback.format_exception(type(error), error, trace))
        if code:
            self.failures.append((rank, text))
        with contextlib.suppress(Exception):
            why = text or f"the rank exited with code {code}"
            session.leave_thread(Failure("failed", rank, why) if code else None)
        self.codes[rank] = code
        failure = FailedRank(rank, code, None)
        with self._telling:
            self._ended[rank] = failure.how
            tell_ended(self._store, self._ended, [0] * size, least)
        for stream in streams:
            stream.finish()
        left = size - len(self.failures)
        if code and left < least:
            self.failed.set()
        elif code:
            print(loss(self._run, failure, left), end="", file=sys.__stderr__, flush=True)


def main(run: Run) -> int:
    """Run a program as threads of this process, and return the exit code."""
    code, path, package = load_program(list(run.program))
    streams = [_Prefixed(sys.stdout), _Prefixed(sys.stderr)]
    sys.stdout, sys.stderr = streams
    ranks = _Program(run, code, path, package)
    # Daemon threads, so that a rank that hangs does not keep the process alive after _GRACE_S.
    threads = [
        threading.Thread(target=ranks.run, args=(rank, streams), name=f"rank-{rank}", daemon=True)
        for rank in range(run.size)
    ]
    result = 0
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not (ranks.failed.is_set() or streams[0].broken):
                thread.join(0.1)
        if ranks.failed.is_set():
            for thread in threads:
                thread.join(_GRACE_S / run.size)
    except KeyboardInterrupt as end:
        result = 128 + getattr(end, "number", signal.SIGINT)
        if result == 128 + signal.SIGINT:
            sites = sites_of_threads({n: thread.ident for n, thread in enumerate(threads)})
            print(summary(sites), end="", file=sys.stderr)
    lost = [
        FailedRank(rank, ranks.codes.get(rank, 1), text.encode() or None)
        for rank, text in ranks.failures
    ]
    if ranks.failed.is_set() and not result:
        first = first_in_cause(lost)
        others = sorted((rank for rank in lost if rank is not first), key=lambda rank: rank.rank)
        others = [rank for rank in others if rank.stderr]
        result = first.exit_code
        print(report(run, lost, first, others), end="", file=sys.stderr)
    elif lost and not result:
        print(losses(run, lost), end="", file=sys.stderr)
    broken = streams[0].broken
    if broken is not None and not result:
        result = 128 + signal.SIGPIPE
        if broken.errno != errno.EPIPE:
            print(f"collective run: standard output: {broken.strerror}", file=sys.stderr)
    if broken is not None:  # redirect it, or flushing it at exit would fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if any(thread.is_alive() for thread in threads):
        os._exit(result)
    return result


def load_program(program: list[str]) -> tuple[CodeType, str, str | None]:
    """Return the program's code, its path and its package, and set ``sys.argv``."""
    if program[0] == "-c":
        sys.argv = ["-c", *program[2:]]
        return compile(program[1], "<string>", "exec", dont_inherit=True), "<string>", None
    if program[0] == "-m":
        sys.path.insert(0, os.getcwd())
        try:
            spec = importlib.util.find_spec(program[1])
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{program[1]}.__main__")
        except ModuleNotFoundError:  # the package of the module does not exist
            spec = None
        code = (
            spec.loader.get_code(spec.name)
            if spec and isinstance(spec.loader, InspectLoader)
            else None
        )
        if spec is None or code is None or spec.origin is None:
            sys.exit(f"collective run: no module named {program[1]!r}")
        sys.argv = [spec.origin, *program[2:]]
        return code, spec.origin, spec.parent
    path = program[0]
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        sys.exit(f"collective run: script {path!r}: {error.strerror}")
    sys.argv = program
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        # dont_inherit: the program must not get the __future__ imports of this file.
        return compile(source, path, "exec", dont_inherit=True), path, None
    except SyntaxError as error:
        sys.exit("".join(traceback.format_exception_only(error)).rstrip())
