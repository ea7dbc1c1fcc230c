"""The command of a warm Python. It runs without site-packages, because every millisecond counts."""

import _socket
import array
import contextlib
import marshal
import os
import signal
import sys

_UNSEEN = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGWINCH}
_SIGNALS = signal.valid_signals() - _UNSEEN
# Python itself ignores these signals from its start.
_OF_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}


def main(socket: str, python: str) -> None:
    """Let the server run the program of the command line, and end with its status."""
    arguments = sys.argv[1:]
    unbuffered = arguments[:1] == ["-u"]
    program = arguments[unbuffered:]
    if not program or (program[0].startswith("-") and program[0] not in {"-m", "-c"}):
        os.execv(python, [python, *arguments])  # Other options need a new interpreter.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    files = _open_files()
    line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    line.connect(socket)
    ignored = [n for n in _SIGNALS - _OF_PYTHON if signal.getsignal(n) == signal.SIG_IGN]
    job = {
        "pid": os.getpid(),
        "python": sys.argv[0],
        "program": program,
        "unbuffered": unbuffered,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "files": files,
        "ignored": [int(number) for number in ignored],
    }
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", files))
    line.sendmsg([marshal.dumps(job)], [rights])
    child = int(line.recv(64))

    def pass_on(number: int, _: object) -> None:
        # If the program has ended, its status is on the way.
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in _SIGNALS:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    _end(os.waitstatus_to_exitcode(int(line.recv(64))))


def _open_files() -> list[int]:
    """Return the files that a program inherits from this one."""
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # The listing's own descriptor is closed already.
            if os.get_inheritable(int(name)):
                descriptors.append(int(name))
    return descriptors


def _end(code: int) -> None:
    if code >= 0:
        os._exit(code)
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
