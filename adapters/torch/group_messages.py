"""Messages of a process group, in order for each direction, peer and tag."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from collective import ANY_SOURCE, CollectiveTimeoutError, Communicator, Status

from . import group_calls
from .futures import GroupWork, Queue

Tensor = torch.Tensor
# Number of queues that are kept. Each of them may have a thread for some seconds.
_QUEUES = 64


class GroupMessages:
    """Sends and receives of a group in the background.

    A rank may send to itself, as programs do that treat all ranks alike. No transport sends such a
    message, so this object keeps a copy until the rank receives it.

    Args:
        comm: communicator of the group.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._queues: dict[tuple[str, int, int], Queue] = {}
        self._guard = threading.Lock()
        self._own: dict[int, queue.SimpleQueue[Tensor]] = {}

    def send(self, tensor: Tensor, dst: int, tag: int) -> GroupWork:
        """Start to send a tensor to rank ``dst``."""
        comm = self._comm
        if tensor.is_cuda:
            return GroupWork([tensor], comm.send(tensor, dst, tag=tag, async_op=True))
        if dst == comm.rank:
            self._own_of(tag).put(tensor.detach().clone())
            return GroupWork([tensor])
        run = partial(group_calls.send, comm, tensor, dst, tag)
        return self._start("send", dst, tag, tensor, run)

    def recv(self, tensor: Tensor, src: int, tag: int) -> GroupWork:
        """Start to receive a tensor from rank ``src``."""
        comm = self._comm
        if tensor.is_cuda:
            return GroupWork([tensor], comm.recv(tensor, src, tag=tag, async_op=True), source=src)
        run = partial(group_calls.recv, comm, tensor, src, tag)
        if src == comm.rank:
            run = partial(self._recv_own, tensor, tag)
        return self._start("recv", src, tag, tensor, run, source=src)

    def recv_any(self, tensor: Tensor, tag: int) -> GroupWork:
        """Start to receive a tensor from the rank that sends first."""
        status = Status()
        run = partial(group_calls.recv, self._comm, tensor, ANY_SOURCE, tag, status)
        return self._start("recv", ANY_SOURCE, tag, tensor, run, source=lambda: status.source)

    def close(self) -> None:
        """Wait for the messages in flight to other ranks; perhaps nobody sends the others."""
        for messages in self._queues.values():
            messages.close()

    def _start(
        self,
        direction: str,
        peer: int,
        tag: int,
        tensor: Tensor,
        run: Callable[[], Any],
        **source: Any,
    ) -> GroupWork:
        with self._guard:
            key = direction, peer, tag
            turns = self._queues.get(key)
            if turns is None:
                # A program may use each tag only once, so idle queues are dropped.
                if len(self._queues) >= _QUEUES:
                    for idle in [k for k, other in self._queues.items() if other.idle]:
                        del self._queues[idle]
                name = f"collective-torch-{direction}-{peer}-{tag}"
                sends = direction == "send"
                fail = self._comm.inner.fail
                turns = self._queues[key] = Queue(name, self._comm.timeout, fail, sends)
            work = turns.start(f"{direction}(tag={tag})", run, [tensor])
        return GroupWork([tensor], work, **source)

    def _own_of(self, tag: int) -> queue.SimpleQueue[Tensor]:
        return self._own.setdefault(tag, queue.SimpleQueue())

    def _recv_own(self, tensor: Tensor, tag: int) -> None:
        comm = self._comm
        try:
            sent = self._own_of(tag).get(timeout=comm.timeout)
        except queue.Empty:
            raise CollectiveTimeoutError(
                f"recv(tag={tag}): timed out: waited {comm.timeout:g} s for a message of this rank "
                f"to itself [rank {comm.rank} of {comm.size}]. Start isend to rank {comm.rank} "
                "with this tag before you wait for recv.",
                (comm.rank,),
            ) from None
        group_calls.recv_own(comm, sent, tensor)
