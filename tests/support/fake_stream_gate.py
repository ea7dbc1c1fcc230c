"""A gate that holds streams of the ABI fake, to show work that starts too early."""

from __future__ import annotations

import ctypes

from collective.cuda import Stream
from tests import fakes


class Gate:
    """A host function that held streams wait in until the gate is opened."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self._post, self._fake = libc.sem_post, fakes.Fake()
        self._semaphore = ctypes.create_string_buffer(64)  # a sem_t
        libc.sem_init(self._semaphore, 0, 0)
        self._wait = ctypes.cast(libc.sem_wait, ctypes.c_void_p)
        self._held: list[Stream] = []

    def hold(self, stream: Stream) -> None:
        """Prevent work that is enqueued on the stream from now on from starting."""
        with stream.device.active():
            handle = ctypes.c_void_p(stream.handle)
            self._fake.cuda("cuLaunchHostFunc", handle, self._wait, self._semaphore)
        self._held.append(stream)

    def open(self) -> None:
        """Let the work of all held streams start, and wait for its end."""
        for _ in self._held:
            self._post(self._semaphore)
        for stream in self._held:
            stream.synchronize()
        self._held.clear()
