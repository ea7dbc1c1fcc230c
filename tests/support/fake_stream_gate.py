"""Holds streams of the ABI fake up, so that what comes too early is seen to."""

from __future__ import annotations

import ctypes

from collective.cuda import Stream
from tests import fakes


class Gate:
    """Work that streams wait for until the gate is opened."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self._post, self._fake = libc.sem_post, fakes.Fake()
        self._semaphore = ctypes.create_string_buffer(64)  # a sem_t
        libc.sem_init(self._semaphore, 0, 0)
        self._wait = ctypes.cast(libc.sem_wait, ctypes.c_void_p)
        self._held: list[Stream] = []

    def hold(self, stream: Stream) -> None:
        """Let nothing that is enqueued on the stream from now on begin."""
        with stream.device.active():
            handle = ctypes.c_void_p(stream.handle)
            self._fake.cuda("cuLaunchHostFunc", handle, self._wait, self._semaphore)
        self._held.append(stream)

    def open(self) -> None:
        """Let it begin."""
        for _ in self._held:
            self._post(self._semaphore)
        for stream in self._held:
            stream.synchronize()
        self._held.clear()
