"""The functions that stand for each other on Linux and on other systems."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from multiprocessing.connection import wait
from types import ModuleType

import pytest

from collective.platform import linux, portable

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="calls of Linux")
both = pytest.mark.parametrize(
    "system", [pytest.param(linux, marks=needs_linux), portable], ids=["linux", "portable"]
)


@both
def test_end_of_process_is_noticed_and_caused(system: ModuleType) -> None:
    with subprocess.Popen([sys.executable, "-IS", "-c", "input()"], stdin=subprocess.PIPE) as child:
        watched = system.EndOfProcess(child.pid)
        assert wait([watched.descriptor], 0.2) == []
        watched.kill()
        child.wait(60)
        assert wait([watched.descriptor], 60) == [watched.descriptor]
        watched.kill()  # it has ended already
        watched.close()


@both
def test_end_of_process_without_process_raises(system: ModuleType) -> None:
    with subprocess.Popen([sys.executable, "-IS", "-c", ""]) as child:
        pass
    with pytest.raises(ProcessLookupError):
        system.EndOfProcess(child.pid)


@both
def test_status_of_missing_process_is_none(system: ModuleType) -> None:
    with subprocess.Popen([sys.executable, "-IS", "-c", ""]) as child:
        pass
    assert system.process_status(child.pid) is None


@needs_linux
def test_status_of_process_with_strange_name() -> None:
    """Check a name that has the characters which delimit it in the kernel's file."""
    program = "open('/proc/self/comm', 'w').write('a) R (b'); print(); input()"
    with subprocess.Popen(
        [sys.executable, "-IS", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        status = linux.process_status(child.pid)
        assert status is not None
        assert (status.name, status.parent) == ("a) R (b", os.getpid())
        child.kill()


def test_portable_status_of_running_process_is_unknown() -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENOTSUP)):
        portable.process_status(os.getpid())


@both
def test_shared_file_is_opened_by_another_process(system: ModuleType) -> None:
    descriptor, path = system.shared_file("test")
    try:
        os.write(descriptor, b"shared")
        program = "import sys; print(open(sys.argv[1]).read())"
        command = [sys.executable, "-IS", "-c", program, path]
        assert subprocess.check_output(command, timeout=60) == b"shared\n"
        assert system.still_leads_to(path, "test")
    finally:
        os.close(descriptor)
        if system.is_file(path):
            os.unlink(path)


@both
def test_local_socket_is_reached_at_its_address(system: ModuleType) -> None:
    sock, address = system.bound_locally()
    with sock:
        sock.listen(1)
        sock.settimeout(60)
        host, _, port = address.partition(" ")
        if port:
            caller = socket.create_connection((host, int(port)), timeout=60)
        else:
            caller = system.connected_locally(address, 60.0)
        with caller, sock.accept()[0] as answered:
            caller.sendall(b"x")
            assert answered.recv(1) == b"x"


@both
def test_silent_connection_has_keep_alive(system: ModuleType) -> None:
    with socket.socket() as sock:
        system.notice_silence(sock, 5)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 4
