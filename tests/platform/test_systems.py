"""Calls to Linux, their fallbacks, and the refusal of other systems."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import wait

import pytest

from collective import platform
from tests.support.interpreter import printed


def test_other_system_is_refused() -> None:
    program = """if True:
        import sys
        sys.platform = "darwin"
        try:
            import collective
        except ImportError as error:
            print(error)
        """
    assert "needs Linux, and this system is 'darwin'. Use" in printed("-c", program)


def test_end_of_process_is_noticed_and_caused() -> None:
    with subprocess.Popen([sys.executable, "-IS", "-c", "input()"], stdin=subprocess.PIPE) as child:
        watched = platform.EndOfProcess(child.pid)
        assert wait([watched.descriptor], 0.2) == []
        watched.kill()
        child.wait(60)
        assert wait([watched.descriptor], 60) == [watched.descriptor]
        watched.kill()  # it has ended already
        watched.close()


def test_end_of_process_without_process_raises() -> None:
    with subprocess.Popen([sys.executable, "-IS", "-c", ""]) as child:
        pass
    with pytest.raises(ProcessLookupError):
        platform.EndOfProcess(child.pid)


def test_status_of_missing_process_is_none() -> None:
    with subprocess.Popen([sys.executable, "-IS", "-c", ""]) as child:
        pass
    assert platform.process_status(child.pid) is None


def test_status_of_process_with_strange_name() -> None:
    """Check a name that has the characters which delimit it in the kernel's file."""
    program = "open('/proc/self/comm', 'w').write('a) R (b'); print(); input()"
    with subprocess.Popen(
        [sys.executable, "-IS", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        status = platform.process_status(child.pid)
        assert status is not None
        assert (status.name, status.parent) == ("a) R (b", os.getpid())
        child.kill()


@pytest.mark.parametrize("anonymous", [True, False])
def test_shared_file_is_opened_by_another_process(
    anonymous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not anonymous:
        monkeypatch.delattr(os, "memfd_create")
    descriptor, path = platform.shared_file("test")
    assert platform.is_file(path) != anonymous
    try:
        os.write(descriptor, b"shared")
        program = "import sys; print(open(sys.argv[1]).read())"
        command = [sys.executable, "-IS", "-c", program, path]
        assert subprocess.check_output(command, timeout=60) == b"shared\n"
        assert platform.still_leads_to(path, "test")
        platform.fix_length(descriptor)
    finally:
        os.close(descriptor)
        if platform.is_file(path):
            os.unlink(path)


def test_local_socket_is_reached_at_its_address() -> None:
    sock, address = platform.bound_locally()
    with sock:
        sock.listen(1)
        sock.settimeout(60)
        with platform.connected_locally(address, 60.0) as caller, sock.accept()[0] as answered:
            caller.sendall(b"x")
            assert answered.recv(1) == b"x"


def test_silent_connection_has_keep_alive() -> None:
    with socket.socket() as sock:
        platform.notice_silence(sock, 5)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 4


@pytest.mark.parametrize(
    ("retransmitted", "probed", "silent"),
    [(0, 0, False), (2, 1, False), (3, 0, True), (0, 2, True)],
)
def test_host_is_silent_after_several_unanswered_packets(
    retransmitted: int, probed: int, silent: bool
) -> None:
    assert platform.is_silent(bytes([1, 0, retransmitted, probed])) is silent


def test_connection_to_living_host_is_not_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as sock, server.accept()[0]:
            sock.sendall(b"x")
            info = platform.tcp_info(sock)
        assert len(info) == platform.TCP_INFO_BYTES
        assert not platform.is_silent(info)
        # The socket is closed now.
        assert not platform.is_silent(platform.tcp_info(sock))
