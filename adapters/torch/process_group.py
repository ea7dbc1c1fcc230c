"""Calls of torch.distributed over a communicator, and a process group that has them.

torch's own interface, from ``dist.all_reduce`` to DDP's reducer in C++, calls the methods of
:class:`GroupCalls`. From torch 2.14 on these are the methods of a
:class:`~collective.adapters.torch.backend.Backend`, before of a :class:`ProcessGroup`. The calls
themselves are in :mod:`collective.adapters.torch.group_calls`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from collective import Communicator, UnsupportedError

from . import group_calls
from .futures import (
    LOSES_WORKS,
    GroupWork,
    JoinedCalls,
    Queue,
    as_cpp_work,
    called_by_torch,
    in_backward,
)
from .group_messages import GroupMessages
from .staged import Staging
from .untraced import untraced

Tensor = torch.Tensor
# Untyped, because the type annotations of this class differ between versions of torch, and some
# annotations are wrong.
_Base: Any = dist.ProcessGroup
_AT_ONCE_S = 1e-3
_UNSET = timedelta(0)
_SHUTS_DOWN = hasattr(_Base, "shutdown")


@untraced
class GroupCalls:
    """Calls of torch.distributed among the ranks of a communicator.

    Synchronous calls run at once, asynchronous calls run in a thread, all in the order in which the
    program makes them. Messages have separate queues for each direction, peer and tag.

    Args:
        comm: communicator, which :meth:`shutdown` closes.

    Attributes:
        comm: the communicator, for calls that torch.distributed does not have.
    """

    comm: Communicator = None  # type: ignore[assignment]  # before a property of torch's class
    # Capabilities that torch reads. In a class in Python, torch's own properties of a backend call
    # themselves without end.
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._collectives = 0
        self._queue = Queue(f"collective-torch-{comm.rank}", comm.timeout, comm.inner.fail)
        self._messages = GroupMessages(comm)
        self._staging = Staging(comm)
        self._together: list[GroupWork] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.comm!r}>"

    # -- running ------------------------------------------------------------------------

    def _start(
        self,
        what: str,
        function: Callable[..., Any],
        *args: Any,
        tensors: Sequence[Tensor],
        opts: Any,
        value: Any = None,
        now: bool = False,
    ) -> GroupWork:
        """Make a call: at once, or in the background.

        Args:
            what: name of the operation, for errors.
            function: function of the communicator, ``args`` and a timeout in seconds.
            args: further arguments of ``function``.
            tensors: tensors that the call writes to.
            opts: torch's options of the call.
            value: value of the call's future; by default the tensors.
            now: if true, the call has completed on return.
        """
        self._collectives += 1
        run = functools.partial(function, self.comm, *args, seconds_of(opts))
        asynchronous = getattr(opts, "asyncOp", True) and not now
        if tensors and tensors[0].is_cuda:
            answer = self._enqueue(what, run, tensors, asynchronous)
        elif asynchronous:
            held = list(tensors) if value is None else value
            answer = GroupWork(tensors, self._queue.start(what, run, held))
        else:
            self._queue.run(what, run)
            answer = GroupWork(tensors)
        return self._noted(answer)

    def _noted(self, answer: GroupWork) -> GroupWork:
        if self._together is not None:
            self._together.append(answer)
        if LOSES_WORKS and not called_by_torch():
            lasting: GroupWork = as_cpp_work(answer)
            return lasting
        return answer

    def _enqueue(
        self, what: str, run: Callable[[], None], tensors: Sequence[Tensor], asynchronous: bool
    ) -> GroupWork:
        """Make a call on a GPU's tensors, on a side stream or on the caller's stream."""
        device, events = tensors[0].device, []
        current = torch.cuda.current_stream(device)
        stream = self._staging.side_stream(device) if asynchronous else current

        def run_on_stream() -> None:
            # This function may run in the queue's thread, which has another current stream.
            with torch.cuda.stream(stream):
                if asynchronous:
                    stream.wait_stream(current)
                run()
                # torch's allocator only knows the stream on which it allocated the memory. Without
                # this call, it could reuse the memory as soon as the caller drops the tensor.
                for tensor in tensors:
                    tensor.record_stream(stream)
                events.append(stream.record_event())

        self._queue.run(what, run_on_stream)
        return GroupWork(tensors, event=events[0] if asynchronous else None)

    # -- reductions -----------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> GroupWork:
        (tensor,), op, opts = listed(tensors), op_of(opts), options_of(opts, timeout)
        # Calls within a backward pass come from DDP's reducer and its hooks. In symmetric memory a
        # reduction completes before a thread would wake up, so it runs at once, and backward()
        # raises its error unchanged. DDP's C++ hook for float16 cannot take a Python future, so its
        # calls also run at once.
        now = in_backward() != -1 and (
            self._staging.symmetric or (tensor.dtype is torch.float16 and not called_by_torch())
        )
        return self._start(
            "all_reduce", self._staging.all_reduce, tensor, op, tensors=[tensor], opts=opts, now=now
        )

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> GroupWork:
        run = group_calls.all_reduce_together
        return self._start("all_reduce", run, tensors, op_of(opts), tensors=tensors, opts=opts)

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> GroupWork:
        (tensor,), root = listed(tensors), root_of(opts)
        op, opts = op_of(opts if op is None else op), options_of(opts, timeout)
        run = group_calls.reduce
        return self._start("reduce", run, tensor, root, op, tensors=[tensor], opts=opts)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> GroupWork:
        (output,), op, opts = listed(outputs), op_of(opts), options_of(opts, timeout)
        pieces = inputs if isinstance(inputs[0], Tensor) else inputs[0]
        run = group_calls.reduce_scatter
        return self._start("reduce_scatter", run, output, pieces, op, tensors=[output], opts=opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> GroupWork:
        run = group_calls.reduce_scatter_single
        return self._start(
            "reduce_scatter", run, output, tensor, op_of(opts), tensors=[output], opts=opts
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        op = op_of(opts)
        entries = [(output, tensor, op) for output, tensor in zip(outputs, tensors)]
        run, each = group_calls.one_by_one, group_calls.reduce_scatter_single
        return self._start("reduce_scatter", run, each, entries, tensors=outputs, opts=opts)

    # -- moves ------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> GroupWork:
        (tensor,), root, opts = listed(tensors), root_of(opts), options_of(opts, timeout)
        run = group_calls.broadcast
        return self._start("broadcast", run, tensor, root, tensors=[tensor], opts=opts)

    def allgather(
        self, outputs: Any, tensors: Any, opts: Any = None, timeout: Any = None
    ) -> GroupWork:
        (tensor,), opts = listed(tensors), options_of(opts, timeout)
        pieces = outputs if isinstance(outputs[0], Tensor) else outputs[0]
        run = group_calls.all_gather
        return self._start(
            "all_gather", run, pieces, tensor, tensors=pieces, opts=opts, value=[list(pieces)]
        )

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        # torch passes one list for each rank, with all tensors of that rank.
        entries = list(zip(zip(*outputs), tensors))
        flat = [tensor for pieces in outputs for tensor in pieces]
        run, each = group_calls.one_by_one, group_calls.all_gather
        return self._start("all_gather", run, each, entries, tensors=flat, opts=opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> GroupWork:
        run = group_calls.all_gather_single
        return self._start("all_gather", run, output, tensor, tensors=[output], opts=opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        entries, run = list(zip(outputs, tensors)), group_calls.one_by_one
        each = group_calls.all_gather_single
        return self._start("all_gather", run, each, entries, tensors=outputs, opts=opts)

    def gather(
        self, outputs: Any, tensors: Any, opts: Any = None, timeout: Any = None
    ) -> GroupWork:
        (tensor,), root, opts = listed(tensors), root_of(opts), options_of(opts, timeout)
        pieces = outputs if not outputs or isinstance(outputs[0], Tensor) else outputs[0]
        run = group_calls.gather
        return self._start(
            "gather", run, pieces, tensor, root, tensors=[*pieces] or [tensor], opts=opts
        )

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> GroupWork:
        (output,), root, opts = listed(outputs), root_of(opts), options_of(opts, timeout)
        pieces = inputs if not inputs or isinstance(inputs[0], Tensor) else inputs[0]
        run = group_calls.scatter
        return self._start("scatter", run, output, pieces, root, tensors=[output], opts=opts)

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        run = group_calls.all_to_all
        return self._start("all_to_all", run, outputs, inputs, tensors=outputs, opts=opts)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
        timeout: Any = None,
    ) -> GroupWork:
        splits = list(output_split_sizes or ()), list(input_split_sizes or ())
        opts, run = options_of(opts, timeout), group_calls.all_to_all_single
        return self._start("all_to_all", run, output, tensor, *splits, tensors=[output], opts=opts)

    # Names of these methods before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- waiting ------------------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: Any = None) -> GroupWork:
        def run(comm: Communicator, seconds: float | None) -> None:
            comm.barrier(timeout=seconds)

        return self._start("barrier", run, tensors=(), opts=options_of(opts, timeout))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the attributes of the error list all missing ranks.

        Args:
            timeout: time to wait, or options that have it; by default the group's timeout.
            wait_all_ranks: if true, the error's text begins with all missing ranks; if false, with
                the first of them.
        """
        # torch allows a timeout of 0: every rank that is not here yet is too late.
        timeout = getattr(timeout, "timeout", timeout)
        unset = timeout is None or timeout < _UNSET
        seconds = None if unset else max(timeout.total_seconds(), _AT_ONCE_S)
        run = group_calls.monitored_barrier
        self._queue.run("barrier", lambda: run(self.comm, wait_all_ranks, seconds))

    # -- messages -----------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> GroupWork:
        (tensor,) = listed(tensors)
        return self._noted(self._messages.send(tensor, dst, tag))

    def recv(self, tensors: Any, src: int, tag: int = 0) -> GroupWork:
        (tensor,) = listed(tensors)
        return self._noted(self._messages.recv(tensor, src, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> GroupWork:
        (tensor,) = listed(tensors)
        return self._noted(self._messages.recv_any(tensor, tag))

    def start_coalescing(self, device: torch.device | None = None) -> None:
        self._together = []

    def end_coalescing(self, device: torch.device | None = None) -> GroupWork:
        answers, self._together = self._together or [], None
        return JoinedCalls(answers)

    # -- the group ------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "collective"

    name = getBackendName

    def _get_sequence_number_for_group(self) -> int:
        return self._collectives

    def set_timeout(self, timeout: timedelta) -> None:
        self.comm.timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Wait for this rank's own calls, and close the communicator."""
        self._queue.close()
        self._messages.close()
        self._staging.drop()
        self.comm.close()

    def abort(self) -> None:
        """Abort the group on every rank, at once."""
        self.comm.abort("the process group was aborted")

    def refuse_merge(self, *args: Any, **named: Any) -> Any:
        """Refuse to make a group of this one and others."""
        raise UnsupportedError(
            f"merge_remote_group: a group over {self.comm.backend!r} cannot get more ranks [rank "
            f"{self.comm.rank} of {self.comm.size}]. Destroy the group and make a larger one."
        )


@untraced
class ProcessGroup(GroupCalls, _Base):  # type: ignore[misc]
    """Process group for a torch that takes no backend written in Python.

    Args:
        comm: communicator, which the group closes when it is destroyed.
        store: torch's store for the group.
    """

    def __init__(self, comm: Communicator, store: Any = None) -> None:
        _Base.__init__(self, comm.rank, comm.size)  # the overload with a store forbids subclasses
        super().__init__(comm)
        self._names = {"name": "", "description": "undefined"}
        self._store = store
        self._refusing = _register_refusing(self)

    def getGroupName(self) -> str:
        return self._names["name"]

    def setGroupName(self, name: str) -> None:
        self._names["name"] = name

    def getGroupDesc(self) -> str:
        return self._names["description"]

    def setGroupDesc(self, description: str) -> None:
        self._names["description"] = description

    # Names of these methods before torch 2.8, whose C++ code does not read names of Python groups.
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        # Before torch 2.6, this call is the only sign that torch destroys the group.
        if not _SHUTS_DOWN and sys._getframe(1).f_code.co_name == "_shutdown_backend":
            self.shutdown()
        return self

    def get_group_store(self) -> Any:
        return self._store

    _start_coalescing = GroupCalls.start_coalescing
    _end_coalescing = GroupCalls.end_coalescing

    def split_group(
        self, ranks: Sequence[int], timeout: timedelta | None = None, *args: Any, **named: Any
    ) -> ProcessGroup | None:
        """Return a group of some of the ranks; None on other ranks, which need not call this."""
        if self.comm.rank not in ranks:
            return None
        group = ProcessGroup(self.comm.group(sorted(ranks)))
        if timeout is not None:
            group.set_timeout(timeout)
        if named.get("group_name"):
            group._set_group_name(named["group_name"])
        return group

    merge_remote_group = GroupCalls.refuse_merge


def _register_refusing(group: ProcessGroup) -> Any:
    """Register a backend beneath a group that refuses each collective which bypasses the group.

    For a group of torch's own, C++ keeps a backend for each kind of device. ``batch_p2p_ops`` of
    the functional collectives asks for it, to learn whether it coalesces messages. The backend must
    not work: a collective within it would return wrong numbers without an error.

    Returns:
        The backend, which the group has to keep. None if this torch has no suitable backend: none
        is needed before torch 2.6.
    """
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    options: Any = getattr(getattr(c10d, "FakeProcessGroup", None), "Options", None)
    if not hasattr(options, "error_on_collective"):
        return None
    settings = options()
    settings.error_on_collective = True
    comm, kind = group.comm, dist.ProcessGroup.BackendType.CUSTOM
    backend = c10d.FakeProcessGroup._create_internal(comm.rank, comm.size, settings)
    for device in group._device_types:
        group._register_backend(device, kind, backend)
    group._set_default_backend(kind)
    return backend


# -- arguments ----------------------------------------------------------------------------------


def listed(tensors: Any) -> Sequence[Tensor]:
    """Return the tensors of a call as a list, also if the call got a single tensor."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def options_of(opts: Any, timeout: timedelta | None) -> Any:
    """Return the options of a call, or options with ``timeout`` if it is passed beside them."""
    return opts if timeout is None else SimpleNamespace(timeout=timeout)


def seconds_of(opts: Any) -> float | None:
    """Return the timeout of a call in seconds; None for the group's own timeout."""
    timeout = getattr(opts, "timeout", None)
    if timeout is None or timeout <= _UNSET:  # in torch a negative timeout means "not set"
        return None
    return float(timeout.total_seconds())


def op_of(opts: Any) -> Any:
    """Return the operator in the options, or passed in place of the options."""
    return dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def root_of(opts: Any) -> int:
    """Return the root in the options, or passed in place of the options."""
    if opts is None or isinstance(opts, int):
        return opts or 0
    return int(opts.rootRank)
