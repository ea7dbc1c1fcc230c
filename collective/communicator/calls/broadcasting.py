"""Calls ``barrier`` and ``broadcast``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.deadline import Deadline
from collective.errors import InvalidArgumentError
from collective.memory import dtypes, nested
from collective.memory.arrays import adapter_of
from collective.memory.buffer import Buffer, Spot
from collective.request import Request

from ..output import Output, input_buffer, outputs_of
from ..streams import Near, nearest, settle
from .call import Call, Header, Planned, spot_of
from .heads import Head
from .views import UINT8, View, adapter_for, pack, room_on_gpu, unpack, view, views, where


class Barrier(Call):
    """See :meth:`Communicator.barrier`."""

    operation = "barrier"

    def plan_for_c(self) -> Planned:
        path = self.path
        return path.plans.get("barrier") or path.remember(
            "barrier", path.planned(Request("barrier"), fixed=True)
        )

    def prepare(self) -> Call:
        self._planned = self.plan_for_c()
        return self

    def run(self, deadline: Deadline) -> None:
        self.path.carry(self._planned, None, None, deadline)


class _Broadcasting(Call):
    """Base of the broadcasts. Ranks that do not know the root's array pass None instead of it."""

    operation = "broadcast"
    rooted = True
    root: int

    def move(self, buffer: Buffer, planned: Planned, deadline: Deadline) -> None:
        """Broadcast a buffer whose dtype and shape this rank knows.

        Raises:
            Disagreement: the ranks' calls differ, perhaps only because a rank has passed None.
        """
        if self.path.agree_sizes:
            self.path.compare_calls(planned.request, deadline)
        self.path.carry(planned, buffer, buffer, deadline)

    def move_to_all(
        self, buffer: Buffer, request: Request, headers: Sequence[Header], deadline: Deadline
    ) -> None:
        """Broadcast after the ranks' calls differed, if they differ only in passing None."""
        self.root_header(headers)
        self.path.carry(self.path.planned(_to_all(request)), buffer, buffer, deadline)

    def exchange_head(self, deadline: Deadline, buffer: Buffer | None = None) -> Head:
        """Broadcast the length of the root's object, with all its bytes if there is room.

        Args:
            buffer: the object; only at the root.
        """
        head = Head(1)
        if buffer is not None:
            head.words[0] = buffer.nbytes
            head.put(buffer.array)
        plan = self.path.object_head_plan(self.root)
        self.path.carry(plan, head.buffer, head.buffer, deadline)
        return head

    def root_header(self, headers: Sequence[Header]) -> Header:
        """Return the root's header, if each other rank passed None or made the same call.

        Raises:
            MismatchError: the calls differ in more than that.
        """
        root = headers[self.root] if headers else {"shape": None, "options": {}}
        for header in headers:
            if {**header, "site": ""} != {**root, "site": ""}:
                unknown = header["shape"] is None and not header["options"].get("nesting")
                alike = (
                    header["operation"] == root["operation"]
                    and header["options"].get("root") == self.root
                    and header["options"].get("object") == root["options"].get("object")
                )
                if not (unknown and alike):
                    self.path.raise_mismatch(headers)
        if root["shape"] is None:
            self.path.raise_mismatch(headers)
        return root


class Broadcast(_Broadcasting):
    """Broadcast in which this rank passes an array, as ``x`` or as ``out``.

    For a structure and for None, :meth:`prepare` returns a call of another class.

    See :meth:`Communicator.broadcast`.
    """

    def plan_for_c(self) -> Planned | None:
        template = self.out if self.x is None else self.x
        return self._plan_of(view(self.path, self.operation, template))

    def _plan_of(self, seen: View) -> Planned:
        path, (_, array, dtype) = self.path, seen
        on_host = type(array) is np.ndarray
        key = self.operation, dtype, array.shape, self.root, on_host, self.hosted
        planned = path.plans.get(key)
        if planned is None:
            request = Request(
                self.operation, dtype, array.shape, root=self.root, device=where(path, array),
                object=self.hosted == "object" or None,
            )  # fmt: skip
            planned = path.remember(key, path.planned(request))
        return planned

    def prepare(self) -> Call:
        path, x, out = self.path, self.x, self.out
        if path.enqueues and (out is x or (out is None and path.rank == self.root)):
            spot = spot_of(path, x)
            if spot is not None:
                key = self.operation, spot.dtype, spot.shape, self.root, False, ""
                planned = path.plans.get(key)
                if planned is not None:
                    return _StraightBroadcast(self, spot, planned)
        # An array like the root's, if this rank knows one; else None.
        self.template = out if x is None else x
        if self.template is None and path.rank == self.root:
            raise InvalidArgumentError(
                f"broadcast: the root passed None {path.who}. Pass an array or a number there."
            )
        if nested.is_tree(self.template):
            return _StructureBroadcast(self)
        if self.template is None:
            return _UnknownBroadcast(self)
        self._view = adapter, array, dtype = view(path, self.operation, self.template, self.hosted)
        if type(array) is not np.ndarray:
            self.near = Near(array, adapter)
        self._planned = self._plan_of(self._view)
        self._output: Output | None = None
        if path.rank != self.root or out is not None:
            self._output = Output(
                self.operation, out, adapter, array.shape, dtype, array, self.template
            )
        if path.rank == self.root:
            self._buffer = input_buffer(array, dtype, self._output, out, x)
        else:
            assert self._output is not None
            self._buffer = Buffer(self._output.flat, dtype)
        return self

    def run(self, deadline: Deadline) -> Any:
        path, buffer, planned = self.path, self._buffer, self._planned
        if self.hosted != "object" or not path.object_heads:
            self.move(buffer, planned, deadline)
        elif self.exchange_head(deadline, buffer).inline(buffer.nbytes) is None:
            path.carry(path.planned(_to_all(planned.request)), buffer, buffer, deadline)
        return self._result()

    def recover(self, headers: Sequence[Header], deadline: Deadline) -> Any:
        self.move_to_all(self._buffer, self._planned.request, headers, deadline)
        return self._result()

    def _result(self) -> Any:
        output = self._output
        if output is None:
            return self.x if self.hosted else self._view.adapter.unchanged(self.x)
        if self.path.rank == self.root and self._buffer.array is not output.flat:
            output.flat[:] = self._buffer.array
        return output.finish()


class _StraightBroadcast(_Broadcasting):
    """Broadcast in place of an array on a GPU, with a plan of an earlier call.

    Args:
        call: the call.
        spot: address, dtype and shape of its array.
        planned: plan of the call.
    """

    def __init__(self, call: Broadcast, spot: Spot, planned: Planned) -> None:
        self.path = call.path
        self.root = call.root
        self._x = call.x
        self._out = call.out
        # A spot has the attributes of a buffer that enqueued calls use.
        self._buffer: Any = spot
        self._planned = planned

    @property
    def near(self) -> Near:  # type: ignore[override]
        """The call's array; needed only if the call is not run at once."""
        return Near(self._buffer, adapter_of(self._x))

    def run(self, deadline: Deadline) -> Any:
        planned = self._planned
        planned.comparison = planned.comparison or self.path.comparison_of(planned.request)
        self.path.carry(planned.comparison, None, None, deadline)
        self.path.carry(planned, self._buffer, self._buffer, deadline)
        return self._result()

    def recover(self, headers: Sequence[Header], deadline: Deadline) -> Any:
        self.move_to_all(self._buffer, self._planned.request, headers, deadline)
        return self._result()

    def _result(self) -> Any:
        return self._x if self._out is not None else adapter_of(self._x).unchanged(self._x)


class _UnknownBroadcast(_Broadcasting):
    """Broadcast on a rank that passed None, and must learn dtype and shape from the root.

    Args:
        call: the call.
    """

    def __init__(self, call: Broadcast) -> None:
        self.path = call.path
        self.root = call.root
        self._like = call.like
        self._object = call.hosted == "object"
        adapter_for(self._like)

    def run(self, deadline: Deadline) -> Any:
        path, root, like = self.path, self.root, self._like
        inline, options = None, {}
        if self._object and path.object_heads:
            head = self.exchange_head(deadline)
            dtype, shape = UINT8, (int(head.words[0]),)
            inline = head.inline(shape[0])
        else:
            request = Request(self.operation, root=root, object=self._object or None)
            header = self.root_header(path.headers_if_different(request, deadline) or [])
            dtype, shape = dtypes.named(header["dtype"]), tuple(header["shape"])
            options = header["options"]
        on_gpu = "device" in options
        adapter = adapter_for(like, on_gpu)
        room = room_on_gpu(path, adapter, 0) if on_gpu else None
        output = None
        if "nesting" not in options:
            output = path.allocate(Output, self.operation, None, adapter, shape, dtype, room)
            buffer = Buffer(output.flat, dtype)
        else:
            buffer = path.allocate(Buffer.empty, shape[0], UINT8, room)
        if inline is not None:
            buffer.array.view(np.uint8)[:] = inline
        else:
            device = "cuda" if on_gpu else None
            request = Request(self.operation, dtype, shape, root=root, device=device)
            path.carry(path.planned(request), buffer, buffer, deadline)
        if output is not None:
            result = output.finish()
        else:
            outputs = [
                Output(self.operation, None, adapter, tuple(shape), dtypes.named(name), room)
                for name, *shape in options["leaves"]
            ]
            unpack(buffer.array, [leaf.flat for leaf in outputs])
            leaves = iter([leaf.finish() for leaf in outputs])
            result = nested.rebuild(options["nesting"], leaves)
        settle(path, self.operation, buffer.array, deadline)
        return result


class _StructureBroadcast(_Broadcasting):
    """Broadcast of nested arrays, as one message of bytes.

    Args:
        call: the call.
    """

    def __init__(self, call: Broadcast) -> None:
        path = self.path = call.path
        self.root = call.root
        self._call = call
        self._leaves = leaves = views(path, self.operation, call.template, call.hosted)
        nesting = nested.skeleton(call.template)
        shapes = [[leaf.dtype.name, *leaf.array.shape] for leaf in leaves]
        self._outputs: list[Output] | None = None
        if path.rank != self.root or call.out is not None:
            outs = outputs_of(self.operation, call.out, nesting, len(leaves), "input", path.who)
            self._outputs = [
                Output(self.operation, out, leaf.adapter, leaf.array.shape, leaf.dtype, leaf.array)
                for out, leaf in zip(outs, leaves)
            ]
        self._nbytes = sum(leaf.array.nbytes for leaf in leaves)
        self._planned = path.planned(
            Request(
                self.operation, UINT8, (self._nbytes,), root=self.root, leaves=shapes,
                nesting=nesting, device=where(path, leaves[0].array) if leaves else None,
            )
        )  # fmt: skip
        self.run_by(nearest(leaves))

    def run(self, deadline: Deadline) -> Any:
        self._packed = packed = self._pack()
        self.move(packed, self._planned, deadline)
        return self._result(packed)

    def recover(self, headers: Sequence[Header], deadline: Deadline) -> Any:
        self.move_to_all(self._packed, self._planned.request, headers, deadline)
        return self._result(self._packed)

    def _pack(self) -> Buffer:
        """Return a buffer for all leaves; at the root, filled with the bytes of the leaves."""
        arrays = [leaf.array for leaf in self._leaves]
        packed = Buffer.empty(self._nbytes, UINT8, arrays[0] if arrays else None)
        if self.path.rank == self.root:
            pack([array.ravel() for array in arrays], packed.array)
        return packed

    def _result(self, packed: Buffer) -> Any:
        outputs = self._outputs
        if outputs is None:
            return _unchanged(self._call.x, self._leaves)
        unpack(packed.array, [output.flat for output in outputs])
        leaves = iter([output.finish() for output in outputs])
        return nested.rebuild(self._call.template, leaves)


def _unchanged(x: Any, leaves: Sequence[View]) -> Any:
    """Return the root's result: ``x`` itself if the other ranks get the same kinds of objects."""
    inputs = nested.flatten(x)
    results = [leaf.adapter.unchanged(array) for leaf, array in zip(leaves, inputs)]
    alike = all(result is array for result, array in zip(results, inputs))
    return x if alike and nested.is_plain(x) else nested.rebuild(x, iter(results))


def _to_all(request: Request) -> Request:
    """Return the request in a form that ranks that passed None can make, too."""
    device = request.options.get("device")
    return Request("broadcast", request.dtype, request.shape, root=request.root, device=device)
