"""``nccl`` over the ABI fake, for arrays that are NumPy's (see on_gpu.py).

The fake does its work later, as a GPU would; so calls end, here, with a wait on the host for
the stream that the result is on, as a program waits before it reads. What of its own work the
library forgets to order is seen all the same: outputs are poisoned until they are written.
"""

from __future__ import annotations

import functools
import os
from typing import Any, ClassVar

import numpy as np
from fakes import environment
from on_gpu import pretend

from collective import cuda
from collective.backends.nccl import NcclBackend
from collective.communicator import calls
from collective.communicator.calls import Calls
from collective.communicator.point_to_point import PointToPoint
from collective.communicator.streams import StreamWork
from collective.contract.world import World
from collective.memory.buffer import Buffer

__all__ = ["FakeNccl", "OldNccl"]


def _waiting(name: str) -> Any:
    method = getattr(NcclBackend, name)

    @functools.wraps(method)
    def call(self: NcclBackend, *args: Any) -> Any:
        result = method(self, *args)
        for argument in args:
            if isinstance(argument, Buffer) and not isinstance(argument.array, np.ndarray):
                self.synchronize_event(argument.stream.record(), name, None)
        return result

    return call


def _go_and_wait(go: Any, stream: Any) -> Any:
    @functools.wraps(go)
    def call(self: Calls, what: Any, run: Any, async_op: bool, *near: Any, **more: Any) -> Any:
        result = go(self, what, run, async_op, *near, **more)
        if not async_op:
            self._backend.synchronize_event(stream.record(), str(what), None)
        return result

    # In reports of where a call was made this frame passes for the library's own.
    call.__code__ = call.__code__.replace(co_filename=calls.__file__)
    return call


class FakeNccl(NcclBackend):
    """``nccl`` over the ABI fake, for arrays that are NumPy's."""

    name = "nccl-fake"
    version: ClassVar[int] = 22907

    @classmethod
    def connect(cls, world: World, timeout: float) -> FakeNccl:
        os.environ.update(environment(cls.version, host_pointers=1, log=0))
        pretend(world.local_rank)
        if not hasattr(Calls._go, "__wrapped__"):
            stream = cuda.device(world.local_rank).stream(0)
            Calls._go = _go_and_wait(Calls._go, stream)  # type: ignore[method-assign]
            PointToPoint._post = _go_and_wait(PointToPoint._post, stream)  # type: ignore[method-assign]
            StreamWork.wait = StreamWork.synchronize  # type: ignore[method-assign]
        return super().connect(world, timeout)


for _name in ("send", "recv", "sendrecv"):
    setattr(FakeNccl, _name, _waiting(_name))


class OldNccl(FakeNccl):
    """A library without native all_to_all, gather, scatter, split or windows."""

    name = "nccl-fake-2.14"
    version = 21403
