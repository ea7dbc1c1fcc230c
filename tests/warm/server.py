"""The process that forks the programs of a warm Python: ``python server.py SOCKET``."""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import io
import marshal
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import traceback
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

# PyTorch, modules that its optimizers and launcher import later, and modules of the examples.
_MODULES = """
    torch torch._dynamo torch.distributed torch.distributed.run torch.utils.checkpoint
    numpy mlxtend.data matplotlib.pyplot
""".split()
_NAMESPACES = ("net", "uts", "mnt")
_MOST_BYTES, _MOST_FILES = 1 << 20, 64
# Received file descriptors get numbers from here on before they get their final numbers.
_ASIDE = 1000

Job = dict[str, Any]


class Hidden:
    """Finder and loader of a PyTorch that is loaded but not in ``sys.modules``.

    The program's ``import torch`` puts it there. Code that searches ``sys.modules`` before does
    not find it. The import also loads the entry points of ``torch.backends``, so these are the
    program's.
    """

    def __init__(self) -> None:
        names = [name for name in sys.modules if name.partition(".")[0] == "torch"]
        self._modules = {name: sys.modules.pop(name) for name in names}
        self._spec = self._modules["torch"].__spec__
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        try:
            found = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        assert self._spec is not None
        if found is None or found.origin != self._spec.origin:
            return found  # another PyTorch, in a folder of the program
        return ModuleSpec(name, self, origin=found.origin)

    def create_module(self, _: ModuleSpec) -> Any:
        return self._modules["torch"]

    def exec_module(self, module: Any) -> None:
        module.__spec__ = self._spec
        sys.meta_path.remove(self)
        sys.modules.update(self._modules)
        if module._is_device_backend_autoload_enabled():
            module._import_device_backends()


class Server:
    """Server that forks a process for each client, and sends the client the exit status."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        # Standard input is a pipe from the process that started this server.
        self._selector.register(0, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        # pidfd of a program -> its pid and its client's socket
        self._running: dict[int, tuple[int, socket.socket]] = {}

    def serve(self) -> Job:
        """Serve clients without end; return only in each forked process, with its job."""
        while True:
            for key, _ in self._selector.select():
                if key.fd == 0:
                    self._leave()
                elif key.fileobj is self._listener:
                    job = self._start(self._listener.accept()[0])
                    if job is not None:
                        return job
                elif isinstance(key.fileobj, int):
                    self._tell(key.fd)
                else:  # The client was killed, so its program must end.
                    # The program may have ended at the same time, and _tell() has unregistered it.
                    with contextlib.suppress(KeyError, ValueError):
                        self._selector.unregister(key.fileobj)
                        _kill(key.data)

    def _leave(self) -> None:
        for pid, _ in self._running.values():
            _kill(pid)
        shutil.rmtree(Path(self._path).parent, ignore_errors=True)
        os._exit(0)

    def _start(self, line: socket.socket) -> Job | None:
        received = array.array("i")
        message = b""
        rights: list[Any] = []
        with contextlib.suppress(ConnectionResetError):
            message, rights, _, _ = line.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(4 * _MOST_FILES))
        for _, _, data in rights:
            received.frombytes(data)
        if not message:  # The client was killed before it sent its request.
            line.close()
            return None
        pid = os.fork()
        if pid == 0:
            for fd in [*self._running, *(line.fileno() for _, line in self._running.values())]:
                os.close(fd)
            for each in (line, self._listener, self._selector):
                each.close()
            job: Job = marshal.loads(message)
            return {**job, "received": list(received)}
        for fd in received:
            os.close(fd)
        # If the client was killed meanwhile, its socket becomes readable next.
        with contextlib.suppress(OSError):
            line.send(str(pid).encode())
        death = os.pidfd_open(pid)
        self._running[death] = (pid, line)
        self._selector.register(death, selectors.EVENT_READ)
        self._selector.register(line, selectors.EVENT_READ, data=pid)
        return None

    def _tell(self, death: int) -> None:
        pid, line = self._running.pop(death)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            line.send(str(status).encode())
        with contextlib.suppress(KeyError):
            self._selector.unregister(line)
        self._selector.unregister(death)
        os.close(death)
        line.close()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def keep_for_good(what: object) -> None:
    """Leak a reference to an object, so that not even the end of the interpreter frees it.

    To free the imported modules a program would write to all of their memory, which it shares with
    the server until then.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def become(job: Job) -> None:
    """Give this process the state of a Python that the client had started."""
    os.setsid()
    _end_without_destructors()
    _enter(job["pid"])
    aside = [os.dup2(fd, _ASIDE + nth) for nth, fd in enumerate(job["received"])]
    os.closerange(3, _ASIDE)
    for fd, number in zip(aside, job["files"]):
        os.dup2(fd, number)
    os.closerange(_ASIDE, _ASIDE + len(aside))
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["directory"])
    for number in job["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    sys.executable = job["python"]
    sys.orig_argv = [job["python"], *job["program"]]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = _stream(1, job["unbuffered"], "strict")
    sys.stderr = _stream(2, True, "backslashreplace")


def _end_without_destructors() -> None:
    """Make this process skip the destructors of C++ libraries when it exits.

    PyTorch's destructors unregister each of its operators. The destructors take 0.1 s and copy most
    of the memory that was shared with the server until then. The buffers of C's streams are still
    flushed.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    # The handler that is registered last runs first, so the flush comes before _exit.
    libc.__cxa_atexit(libc.fflush, None, None)


def _enter(pid: int) -> None:
    """Enter the namespaces of another process that differ, as for a process on another host."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name in _NAMESPACES:
        theirs = f"/proc/{pid}/ns/{name}"
        if os.readlink(theirs) != os.readlink(f"/proc/self/ns/{name}"):
            fd = os.open(theirs, os.O_RDONLY)
            if libc.setns(fd, 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns({theirs})")
            os.close(fd)


def _stream(fd: int, unbuffered: bool, errors: str) -> io.TextIOWrapper:
    file: Any = open(fd, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    lines = not unbuffered and os.isatty(fd)
    return io.TextIOWrapper(file, "utf-8", errors, line_buffering=lines, write_through=unbuffered)


def run(program: list[str], base: list[str]) -> None:
    """Run a program like ``python PROGRAM``."""
    first, *rest = program
    more = os.environ.get("PYTHONPATH", "")
    path = [*filter(None, more.split(os.pathsep)), *base]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if first == "-m":
        sys.argv, sys.path[:] = rest, [os.getcwd(), *path]
        runpy._run_module_as_main(rest[0])  # Python itself calls this function.
        return
    if first == "-c":
        sys.argv, sys.path[:] = ["-c", *rest[1:]], ["", *path]
        source, name = rest[0].encode(), "<string>"
    else:
        sys.argv, sys.path[:] = program, [os.path.dirname(os.path.realpath(first)), *path]
        main.__file__ = name = os.path.abspath(first)
        source = Path(first).read_bytes()
    try:
        exec(compile(source, name, "exec"), main.__dict__)
    except Exception as error:
        frame = error.__traceback__
        error.__traceback__ = frame and frame.tb_next  # The traceback starts in the program.
        # Python sets these, and handlers at exit read them to find the program's error.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


if __name__ == "__main__":
    for each in _MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(each)
    # This setting was for the import of PyTorch here and must not reach the program.
    os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD")
    keep_for_good([dict(vars(module)) for module in sys.modules.values()])
    gc.collect()
    gc.freeze()
    found = sys.path[1:]  # all but the folder of this script
    server = Server(sys.argv[1])
    print("ready", flush=True)
    mine = server.serve()
    del server
    try:
        become(mine)
        Hidden()
    except BaseException:
        traceback.print_exc()
        os._exit(70)
    run(mine["program"], found)
