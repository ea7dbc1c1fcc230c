"""Slow switch between network namespaces: ``relay.py DELAY_S NAMESPACE...``.

The relay creates an interface eth0 in each namespace. It passes every frame from one interface to
all other interfaces, DELAY_S later. It prints ``ready`` when the interfaces exist. The line ``PORT
down`` on standard input cuts a namespace off, ``PORT up`` connects it again. The relay needs no
delaying queueing discipline in the kernel. network_hosts.py starts it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAME = 1 << 16
_STDIN = 0


def open_tap(namespace: str) -> int:
    """Return a descriptor of a new interface eth0 in ``namespace``."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TAP | _IFF_NO_PI))
    return tap


def relay(delay: float, taps: list[int]) -> None:
    """Pass frames on until standard input ends."""
    joined = [True] * len(taps)
    waiting: deque[tuple[float, int, bytes]] = (
        deque()
    )  # (due time, source port, frame), by due time
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for ready in select.select([_STDIN, *taps], [], [], pause)[0]:
            if ready == _STDIN:
                words = os.read(_STDIN, _FRAME).split()
                if not words:
                    return
                for number, state in zip(words[::2], words[1::2]):
                    joined[int(number)] = state == b"up"
                continue
            port = taps.index(ready)
            frame = read(ready)
            if frame and joined[port]:
                waiting.append((time.monotonic() + delay, port, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, port, frame = waiting.popleft()
            for other, tap in enumerate(taps):
                if other != port and joined[other]:
                    write(tap, frame)


def read(tap: int) -> bytes:
    """Return a frame, or nothing while the interface is down."""
    try:
        return os.read(tap, _FRAME)
    except OSError:
        return b""


def write(tap: int, frame: bytes) -> None:
    """Write a frame; a full queue or an interface that is down drops it, as on a real network."""
    with contextlib.suppress(OSError):
        os.write(tap, frame)


if __name__ == "__main__":
    descriptors = [open_tap(name) for name in sys.argv[2:]]
    print("ready", flush=True)
    relay(float(sys.argv[1]), descriptors)
