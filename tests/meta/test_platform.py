"""Only ``collective/platform`` calls what Linux alone offers, and asks which system this is."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from collective.platform import linux, portable
from tests.meta.test_rooms import MODULES

#: Attributes of Python's modules that only Linux has, and functions of its C library.
LINUX = set(
    """
    eventfd memfd_create pidfd_open pidfd_send_signal sched_getaffinity sched_setaffinity
    sched_getscheduler sched_setscheduler waitid epoll signalfd copy_file_range splice setns
    unshare posix_fallocate sendfile sigtimedwait sigwaitinfo SO_PEERCRED SO_MARK SOCK_CLOEXEC
    SOCK_NONBLOCK TCP_KEEPIDLE TCP_USER_TIMEOUT TCP_QUICKACK MSG_NOSIGNAL accept4 F_ADD_SEALS
    F_SETPIPE_SZ F_OFD_SETLK MADV_HUGEPAGE O_TMPFILE O_PATH SCHED_BATCH P_PIDFD WNOWAIT
    prctl process_vm_readv process_vm_writev madvise futex
    """.split()
)
FILES = ("/proc", "/sys/", "/dev/shm")

#: Modules that are no users of ``collective.platform``, and why.
EXEMPT = {
    "launch.mpi_rank": "mpiexec starts it as a file of its own, which imports nothing of ours",
}


def linux_only(source: str) -> Iterator[str]:
    """Yield the uses of Linux in a module: line, and the name or path."""
    tree = ast.parse(source)
    texts = {
        statement.value
        for statement in ast.walk(tree)
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            named = ast.unparse(node)
            if node.attr in LINUX or named == "sys.platform":
                yield f"{node.lineno}: {named}"
        elif isinstance(node, ast.Constant) and node not in texts:
            value = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
            if not isinstance(value, str):
                continue
            # The second is an abstract name of a socket, such as f"\0{name}".
            if value in LINUX or value.lstrip(" (").startswith(FILES):
                yield f"{node.lineno}: {value!r}"
        elif isinstance(node, ast.JoinedStr) and node.values:
            first = node.values[0]
            if isinstance(first, ast.Constant) and first.value == "\0":
                yield f"{node.lineno}: an abstract name of a socket"


def test_only_platform_uses_what_linux_alone_offers() -> None:
    uses = [
        f"{name}, line {use}"
        for name, path in MODULES.items()
        if not name.startswith("platform") and name not in EXEMPT
        for use in linux_only(path.read_text())
    ]
    assert uses == []


@pytest.mark.parametrize(
    ("statement", "use"),
    [
        ("os.pidfd_open(1)", "1: os.pidfd_open"),
        ("hasattr(os, 'memfd_create')", "1: 'memfd_create'"),
        ("open(f'/proc/{pid}/stat')", "1: '/proc/'"),
        ("Path('/dev/shm')", "1: '/dev/shm'"),
        ("re.compile(rb' (/dev/shm/x)')", "1: ' (/dev/shm/x)'"),
        ("ctypes.CDLL(None).prctl(1)", "1: ctypes.CDLL(None).prctl"),
        ("sock.bind(f'\\0{name}')", "1: an abstract name of a socket"),
        ("sys.platform == 'linux'", "1: sys.platform"),
    ],
)
def test_use_of_linux_is_found(statement: str, use: str) -> None:
    assert list(linux_only(statement)) == [use]


def test_description_of_linux_is_no_use_of_it() -> None:
    assert list(linux_only('def f():\n    "/proc/PID/stat is a file."')) == []


def test_module_with_exemption_exists() -> None:
    assert EXEMPT.keys() <= MODULES.keys()


def _interface(module: ModuleType) -> dict[str, object]:
    """Return the signature of each function, the methods of each class, the type of the rest."""
    names = module.__all__
    interface: dict[str, object] = {}
    for name in names:
        value = getattr(module, name)
        if inspect.isclass(value):
            interface[name] = {
                method: str(inspect.signature(function))
                for method, function in vars(value).items()
                if inspect.isfunction(function) and (method[0] != "_" or method == "__init__")
            }
        elif callable(value):
            interface[name] = str(inspect.signature(value))
        else:
            interface[name] = type(value)
    return interface


def test_both_systems_have_the_same_functions() -> None:
    assert _interface(portable) == _interface(linux)


def test_platform_exports_every_function() -> None:
    import collective.platform as platform

    assert set(platform.__all__) - {"ProcessStatus"} == set(linux.__all__)
    assert all(getattr(platform, name) is getattr(linux, name) for name in linux.__all__)


def test_linux_folder_is_the_only_user_of_its_modules() -> None:
    """Check that nobody chooses between the two modules but the package itself."""
    wrong = [
        name
        for name, path in MODULES.items()
        if not name.startswith("platform")
        and any(text in Path(path).read_text() for text in ("platform.linux", "platform.portable"))
    ]
    assert wrong == []
