"""Frames between the supervisor and the agents of other hosts."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from collections.abc import Iterator

import pytest

from collective.launch.agent_line import GREETING, AgentLine, StreamBytes
from collective.launch.hosts import cluster
from collective.launch.hosts.reachability import Pulse


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Yield the read end and the write end of a pipe."""
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):  # the test has closed it
            os.close(end)


FRAMES = [
    {"kind": "start", "environment": {"A": "\udcff", "B": "ü"}},
    StreamBytes(7, 1, bytes(range(256))),
    StreamBytes(1 << 31, 0, b""),
]


def written(*frames: object) -> bytes:
    """Return the bytes that a line writes for ``frames``."""
    ends = os.pipe()
    sender = AgentLine(ends[0], ends[1], greeted=False)
    for frame in frames:
        sender.post(frame)
    data = os.read(ends[0], 1 << 16)
    for end in ends:
        os.close(end)
    return data


def test_frames_arrive_as_they_were_posted(pipe: tuple[int, int]) -> None:
    receiver = AgentLine(*pipe, greeted=False)
    os.write(pipe[1], written(*FRAMES))
    assert receiver.receive() == FRAMES
    assert receiver.receive() == []


def test_frames_in_pieces_arrive_once_they_are_whole(pipe: tuple[int, int]) -> None:
    receiver, found = AgentLine(*pipe, greeted=False), []
    for byte in written(*FRAMES):
        os.write(pipe[1], bytes([byte]))
        found += receiver.receive()
    assert found == FRAMES


def test_text_of_login_shell_before_greeting_is_skipped(pipe: tuple[int, int]) -> None:
    receiver, found = AgentLine(*pipe, greeted=True), []
    for byte in b"Welcome!\n\0coll" + GREETING + written(*FRAMES):
        os.write(pipe[1], bytes([byte]))
        found += receiver.receive()
    assert found == FRAMES
    assert receiver.noise == b"Welcome!\n\0coll"


def test_end_is_reported_after_the_last_frame(pipe: tuple[int, int]) -> None:
    receiver = AgentLine(pipe[0], os.open(os.devnull, os.O_WRONLY), greeted=False)
    os.write(pipe[1], written(FRAMES[0]))
    os.close(pipe[1])
    assert receiver.receive() == FRAMES[:1]
    with pytest.raises(EOFError):
        receiver.receive()
    os.close(receiver.descriptor)


@pytest.mark.parametrize(
    "data", [b"\x09\0\0\0\1x", b"\0\xff\xff\xff\xff", b"\0\0\0\0\2[]", b"\0\0\0\0\1{"]
)
def test_bytes_of_no_agent_are_refused(pipe: tuple[int, int], data: bytes) -> None:
    receiver = AgentLine(*pipe, greeted=False)
    os.write(pipe[1], data)
    with pytest.raises(ValueError):  # noqa: PT011  # the texts are of json, too
        receiver.receive()


def test_line_is_full_until_other_side_reads(pipe: tuple[int, int]) -> None:
    sender = AgentLine(*pipe, greeted=False)
    while not sender.full:
        sender.post(StreamBytes(0, 1, bytes(1 << 16)))
    assert sender.waiting
    while sender.waiting:
        assert os.read(pipe[0], 1 << 16)
        sender.flush()
    assert not sender.full


def test_line_whose_reader_is_gone_is_broken(pipe: tuple[int, int]) -> None:
    sender = AgentLine(os.open(os.devnull, os.O_RDONLY), pipe[1], greeted=False)
    os.close(pipe[0])
    sender.post({"kind": "beat"})
    assert sender.broken
    assert not sender.waiting
    os.close(sender.incoming)


# -- hosts that are lost ---------------------------------------------------------------------


class Immortal:
    """Process that even SIGKILL does not end, since it waits for a disk."""

    stdin = stdout = stderr = io.BytesIO()

    def kill(self) -> None:
        self.killed = True

    def wait(self, timeout: float) -> None:
        raise subprocess.TimeoutExpired("ssh", timeout)


@pytest.fixture
def host(pipe: tuple[int, int]) -> cluster.Machine:
    """Return a host whose messages come from a pipe, and whose process does not end."""
    machine = cluster.Machine.__new__(cluster.Machine)
    machine.process = Immortal()  # type: ignore[assignment]
    machine.pulse, machine.lost, machine.hello = Pulse(), "", {"kind": "hello"}
    machine.line = AgentLine(*pipe, greeted=False)
    return machine


def test_cluster_closes_though_a_process_survives_its_kill(
    host: cluster.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_CLOSE_S", 0.0)
    monkeypatch.setattr(cluster, "_EXIT_S", 0.0)
    cluster.Cluster([host], -1).close()
    assert host.process.killed  # type: ignore[attr-defined]


def test_lost_host_reads_nothing_from_a_descriptor_that_may_be_another_by_now(
    host: cluster.Machine, pipe: tuple[int, int]
) -> None:
    host.lose("it is silent")
    os.write(pipe[1], b"of another connection")
    assert host.receive() == []
    assert os.read(pipe[0], 100) == b"of another connection"
