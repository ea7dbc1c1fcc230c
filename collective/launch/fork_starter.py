"""Ranks as copies of this process, forked at a moment when it is safe to copy.

A program calls :class:`ForkServer` once, before it starts threads and opens what a copy must not
have. The server is the only copy of this process, and forks the ranks from itself. So a rank has
every module and object of that moment, whatever this process has done since, and starts within
milliseconds.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import socket
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle

from collective import BackendUnavailableError
from collective.inner import Deadline

from . import rank_line
from .command_starter import CalledProcess
from .process_starter import ProcessStarter
from .ranks import LEAVE_S, RankHandle


class ForkServer:
    """Process that forks ranks: a copy of this one, made by the constructor.

    The server and its ranks end when this process ends, however it does.

    Args:
        begin: function that a rank calls first.
        end: function that a rank calls when it has no more jobs. A rank that does not return from
            it within seconds is killed.
    """

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        ours, theirs = socket.socketpair()
        self._line = Connection(ours.detach())
        with warnings.catch_warnings():
            # Python warns if other threads run. They do not exist in the copy, and the caller
            # vouches that none of them holds a lock.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            try:
                self._line.close()
                _serve(Connection(theirs.detach()), begin, end)
            finally:
                os._exit(0)
        theirs.close()

    def fork(self, rank: int) -> RankHandle:
        """Fork a rank, which has this process's environment variables of now.

        Raises:
            BackendUnavailableError: the server has ended.
        """
        line, child = socket.socketpair()
        with child:
            try:
                self._line.send((rank, dict(os.environ)))
                send_handle(self._line, child.fileno(), self._pid)
                pid = self._line.recv()
            except (EOFError, OSError) as error:
                line.close()
                raise BackendUnavailableError(
                    f"start: the process that forks the ranks has ended ({error!r}), so rank "
                    f"{rank} cannot start. Look for what killed it, such as a lack of memory."
                ) from error
        return _Forked(rank, Connection(line.detach()), pid, self)

    def reap(self, pid: int) -> int | None:
        """Return the exit code of a rank that has ended, None if the server has ended, too."""
        try:
            self._line.send(pid)
            code = self._line.recv()
        except (EOFError, OSError):
            return None
        assert isinstance(code, int)
        return code

    def close(self) -> None:
        """End the server, after its ranks."""
        self._line.close()
        with contextlib.suppress(ChildProcessError):  # the program has waited for any child
            os.waitpid(self._pid, 0)


def _serve(line: Connection, begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Fork and reap ranks until the other end of ``line`` is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # a collection in a rank would copy the memory that the ranks share
    while True:
        try:
            request = line.recv()
        except (EOFError, OSError):
            return
        if isinstance(request, int):
            line.send(os.waitstatus_to_exitcode(os.waitpid(request, 0)[1]))
            continue
        rank, environ = request
        own = recv_handle(line)
        pid = os.fork()
        if pid == 0:
            line.close()
            _be_rank(rank, environ, Connection(own), begin, end)
        os.close(own)
        line.send(pid)


def _be_rank(
    rank: int,
    environ: Mapping[str, str],
    line: Connection,
    begin: Callable[[], None],
    end: Callable[[], None],
) -> None:
    """Run a rank's jobs. The handlers at exit are those of the copied process, so skip them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 1
    try:
        begin()
        rank_line.serve_as(environ, rank, line)
        end()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class _Forked(CalledProcess):
    """Process that the server has forked, and reaps."""

    def __init__(self, rank: int, line: Connection, pid: int, server: ForkServer) -> None:
        super().__init__(rank, line, pid)
        self._reaped = functools.cache(lambda: server.reap(pid))

    def _exit_code(self) -> int | None:
        # A rank may have closed its line and live on.
        return self._reaped() if wait([self.death], LEAVE_S) else None

    def end(self, deadline: Deadline) -> None:
        if not wait([self.death], deadline.left()):
            self.kill()
        self._exit_code()
        super().end(deadline)


class ForkStarter(ProcessStarter):
    """Starter of ranks that ``server`` forks. Starters may share a server."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server

    def start(self, ranks: Sequence[int]) -> dict[int, RankHandle]:
        return {rank: self._server.fork(rank) for rank in ranks}
