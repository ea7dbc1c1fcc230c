"""The calls barrier and broadcast."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.contract.failure import Failure
from collective.errors import InvalidArgumentError
from collective.memory import dtypes, nested
from collective.memory.arrays import adapter_of
from collective.memory.buffer import Buffer, Spot
from collective.request import Disagreement, Request, call_site

from .calls import Array
from .deadline import Deadline
from .gpu_calls import nearest
from .heads import Head
from .output import Output
from .pieces import UINT8, Header, Leaf, PieceCalls, pack, unpack
from .plan import Planned

__all__ = ["Broadcasting"]


# A head has the root's digest, dtype code, bytes, the length of what describes a structure,
# dimensions and shape; NumPy's arrays have 64 dimensions at most.
_WORDS = 5 + 64


class Broadcasting(PieceCalls):
    """The part of a communicator that waits and broadcasts."""

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Wait until every rank has called it.

        Collective: every rank calls it.

        Raises:
            CollectiveTimeoutError, PeerLostError, PeerFailedError: somebody did not.

        See Also:
            MPI_Barrier.
        """
        planned = self._plan_of_barrier()
        seconds = self._seconds(timeout)

        def run() -> None:
            self._carry(planned, None, None, seconds)

        return self._go("barrier", run, async_op)

    def _plan_of_barrier(self) -> Planned:
        return self._plans.get("barrier") or self._remember(
            "barrier", self._planned(Request("barrier"))
        )

    def broadcast(
        self,
        x: Any,
        *,
        root: int = 0,
        out: Any = None,
        like: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Give every rank the array of ``root``.

        Collective: every rank calls it, with one root.

        Args:
            x: at the root, an array, a number, or a nested list, tuple or dict of these. Elsewhere
                None, or the same, whose values do not matter and are not changed.
            root: the rank whose array it is.
            out: where it goes; ``broadcast(w, out=w)`` works in place.
            like: where ``x`` is None, the framework of the result: its name, or an array.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            ``out`` if given; else, at the root ``x`` itself, elsewhere a new array. Of an array
            whose framework is unknown here and takes none of ours, all ranks get NumPy's, the root
            over the memory of ``x`` if that is writable. Where ``x`` is None structures come as
            they were nested at the root, tuples as lists, dicts with string keys; and numbers as
            arrays of no dimensions.

        Raises:
            MismatchError: shapes, dtypes or roots differ; nothing was written.

        See Also:
            MPI_Bcast, ncclBroadcast.
        """
        root = self._rank("broadcast", "root", root)
        if self._enqueues and (out is x or (out is None and self.rank == root)):
            done = self._straight_broadcast(x, root, timeout, async_op)
            if done is not NotImplemented:
                return done
        seconds = self._seconds(timeout)
        template = out if x is None and out is not None else x
        if template is None and self.rank == root:
            raise InvalidArgumentError(f"broadcast: the root passed None {self._who}.")
        if nested.is_tree(template):
            return self._broadcast_tree(x, template, root, out, seconds, async_op)
        if template is None:
            return self._go(
                "broadcast",
                lambda: self._broadcast_unknown(root, like, Deadline(seconds)),
                async_op,
            )
        return self._broadcast_one(x, template, root, out, seconds, async_op)

    def _broadcast_one(
        self,
        x: Any,
        template: Any,
        root: int,
        out: Any,
        seconds: float,
        async_op: bool,
        difference: Disagreement | None = None,
    ) -> Any:
        """Broadcast one array.

        Args:
            template: what is known of it here.
            difference: what the ranks have found already.
        """
        adapter, array, dtype = self._view("broadcast", template)
        planned = self._plan_of_broadcast(array, dtype, root)
        output: Output | None = None
        if self.rank != root or out is not None:
            output = Output("broadcast", out, adapter, array.shape, dtype, array, template)
        if self.rank == root:
            buffer = self._input(array, dtype, output, out, x)
        else:
            assert output is not None
            buffer = Buffer(output.flat, dtype)

        def run() -> Any:
            self._broadcast_known(buffer, planned, Deadline(seconds), difference=difference)
            if output is None:
                return adapter.unchanged(x)
            if self.rank == root and buffer.array is not output.flat:
                output.flat[:] = buffer.array
            return output.finish()

        return self._go("broadcast", run, async_op, array, adapter)

    def _straight_broadcast(self, x: Any, root: int, timeout: float | None, async_op: bool) -> Any:
        """Broadcast an array where it is, if that has been planned; else return NotImplemented."""
        spot = self._spot(x)
        if spot is None:
            return NotImplemented
        planned = self._plans.get(("broadcast", spot.dtype, spot.shape, root, False))
        if planned is None:
            return NotImplemented
        seconds = self.timeout if timeout is None else self._seconds(timeout)
        if async_op or self._lane.queue or self._broken is not None:
            go = functools.partial(self._broadcast_spot, spot, x, planned, seconds)
            return self._go("broadcast", go, async_op, spot, adapter_of(x))
        return self._broadcast_spot(spot, x, planned, seconds)

    def _broadcast_spot(self, spot: Spot, x: Any, planned: Planned, seconds: float) -> Any:
        """Do as :meth:`_broadcast_known`, of what is enqueued."""
        deadline = Deadline(seconds)
        buffer: Any = spot  # it has what is used of a buffer where calls are enqueued
        try:
            planned.comparison = planned.comparison or self._comparing(planned.request)
            self._carry(planned.comparison, None, None, deadline.left(), alike=False)
            self._carry(planned, buffer, buffer, deadline.left(), alike=False)
        except Disagreement as found:
            self._broadcast_to_all(buffer, planned.request, found, deadline)
        return x

    def _plan_of_broadcast(self, array: Array, dtype: dtypes.DType, root: int) -> Planned:
        key = ("broadcast", dtype, array.shape, root, type(array) is np.ndarray)
        planned = self._plans.get(key)
        if planned is None:
            device = self._where(array)
            request = Request("broadcast", dtype, array.shape, root=root, device=device)
            planned = self._remember(key, self._planned(request))
        return planned

    def _broadcast_unknown(self, root: int, like: Any, deadline: Deadline) -> Any:
        """Take part in a broadcast of which nothing is known here."""
        self._adapter(like)
        inline, options, text = None, {}, 0
        if self._heads:
            head = self._head(None, None, root, deadline.left())
            dtype, shape = _described(head)
            inline = head.inline(int(head.words[2]))
            text = int(head.words[3])
        else:
            headers = self._sizes(Request("broadcast", root=root), deadline.left()) or []
            header = self._root_header(headers, root)
            dtype, shape = dtypes.named(header["dtype"]), tuple(header["shape"])
            options = header["options"]
        on_gpu = "device" in options
        adapter = self._adapter(like, on_gpu)
        room = self._room(adapter, 0) if on_gpu else None
        single = not text and "nesting" not in options
        output = None
        if single:
            output = self._allocate(Output, "broadcast", None, adapter, shape, dtype, room)
            buffer = Buffer(output.flat, dtype)
        else:
            buffer = self._allocate(Buffer.empty, shape[0], UINT8, room)
        if inline is not None:
            buffer.array.view(np.uint8)[:] = inline
        else:
            device = "cuda" if on_gpu else None
            request = Request("broadcast", dtype, shape, root=root, device=device)
            self._carry_agreed(self._planned(request), buffer, deadline.left())
        if output is not None:
            found = output.finish()
        else:
            structure = json.loads(buffer.array[:text].tobytes()) if text else options
            outputs = [
                Output("broadcast", None, adapter, tuple(shape), dtypes.named(name), room)
                for name, *shape in structure["leaves"]
            ]
            unpack(buffer.array[text:], [each.flat for each in outputs])
            found = nested.rebuild(structure["nesting"], iter([each.finish() for each in outputs]))
        self._settle("broadcast", buffer.array, deadline.left())
        return found

    def _broadcast_known(
        self,
        buffer: Buffer,
        planned: Planned,
        deadline: Deadline,
        text: int = 0,
        difference: Disagreement | None = None,
    ) -> None:
        """Broadcast among ranks that may differ from the root only in having passed None."""
        request = planned.request
        root = request.root
        if self._heads:
            head = self._head(request, buffer, root, deadline.left(), text)
            inline = head.inline(buffer.nbytes)
            if inline is None:
                known = self._planned(_to_all(request)) if text else planned
                self._carry(known, buffer, buffer, deadline.left(), alike=False)
            elif self.rank != root:
                buffer.array.view(np.uint8)[:] = inline
            return
        try:
            if difference is not None:
                raise difference
            if self._agree_sizes or self._enqueues:
                self._agree(request, deadline.left())
            self._carry(planned, buffer, buffer, deadline.left(), alike=False)
        except Disagreement as found:
            self._broadcast_to_all(buffer, request, found, deadline)

    def _broadcast_to_all(
        self, buffer: Buffer, request: Request, found: Disagreement, deadline: Deadline
    ) -> None:
        """Broadcast where ranks differ, if that is only in having passed None."""
        found.__traceback__ = None  # whose frame knows it by name, and would never go
        self._root_header(found.headers, request.root)
        self._carry_agreed(self._planned(_to_all(request)), buffer, deadline.left())

    def _carry_agreed(self, planned: Planned, buffer: Buffer, seconds: float) -> None:
        """Broadcast what all ranks have agreed on in a round before.

        Raises:
            MismatchError: a rank has gone on to another call since.
        """
        try:
            self._carry(planned, buffer, buffer, seconds, alike=False)
        except Disagreement as found:
            self._mismatch(found.headers)

    def _head(
        self,
        request: Request | None,
        buffer: Buffer | None,
        root: int,
        seconds: float,
        text: int = 0,
    ) -> Head:
        """Broadcast what the root's array is, with all its bytes if they are few.

        It takes the place of a comparison on transports that compare nothing: the root does
        not know whether somebody passed None.

        Args:
            request, buffer: this rank's; None where it passed None.
            text: how many bytes at the buffer's start describe a structure.

        Raises:
            MismatchError: this rank's array is not like the root's.
        """
        head = Head(_WORDS)
        if self.rank == root:
            assert request is not None
            assert request.shape is not None
            assert buffer is not None
            ndim = len(request.shape)
            head.words[:5] = request.digest, buffer.dtype.code, buffer.nbytes, text, ndim
            head.words[5 : 5 + ndim] = request.shape
            head.put(buffer.array)
        about = self._about(request, "broadcast", root, "broadcast")
        self._carry(about, head.buffer, head.buffer, seconds, alike=False)
        if request is not None and head.words[0] != request.digest:
            theirs = Request("broadcast", *_described(head), root=root)
            message = (
                f"the ranks made different calls:\n  rank {root}: {theirs}\n  rank {self.rank}: "
                f"{request} at {call_site()}\nEvery rank must make the same collective calls in "
                "the same order; COLLECTIVE_CHECK=always compares each call before it is sent"
            )
            # Not a call that may be made again: the root has heard from nobody, and goes on to
            # send.
            failure = Failure("mismatch", self.rank, message)
            self._backend.abort(failure)
            raise failure.error("broadcast", self.rank)
        return head

    def _root_header(self, headers: Sequence[Header], root: int) -> Header:
        """Return the root's header if the others know nothing, or the same."""
        found = headers[root] if headers else {"shape": None}
        for header in headers:
            if {**header, "site": ""} != {**found, "site": ""}:
                unknown = header["shape"] is None and not header["options"].get("nesting")
                alike = (
                    header["operation"] == found["operation"]
                    and header["options"].get("root") == root
                )
                if not (unknown and alike):
                    self._mismatch(headers)
        if found["shape"] is None:
            self._mismatch(headers)
        return found

    def _broadcast_tree(
        self, x: Any, template: Any, root: int, out: Any, seconds: float, async_op: bool
    ) -> Any:
        leaves = [Leaf("broadcast", view, 0) for view in self._views("broadcast", template)]
        nesting = nested.skeleton(template)
        shapes = [[leaf.dtype.name, *leaf.shape] for leaf in leaves]
        outputs: list[Output] | None = None
        if self.rank != root or out is not None:
            outs = self._outs("broadcast", out, nesting, len(leaves), "input")
            outputs = [
                Output("broadcast", given, leaf.adapter, leaf.shape, leaf.dtype, leaf.array)
                for given, leaf in zip(outs, leaves)
            ]
        arrays = [leaf.array for leaf in leaves]
        # Where no headers are compared, what None stands for has to travel with it.
        structure = {"leaves": shapes, "nesting": nesting}
        text = np.frombuffer(json.dumps(structure).encode() if self._heads else b"", np.uint8)
        nbytes = text.size + sum(array.nbytes for array in arrays)
        request = Request(
            "broadcast", UINT8, (nbytes,), root=root, leaves=shapes, nesting=nesting,
            device=self._where(leaves[0].array) if leaves else None,
        )  # fmt: skip
        planned = self._planned(request)

        def run() -> Any:
            packed = Buffer.empty(nbytes, UINT8, arrays[0] if arrays else None)
            if self.rank == root:
                if text.size:
                    packed.array[: text.size] = text
                pack([array.ravel() for array in arrays], packed.array[text.size :])
            self._broadcast_known(packed, planned, Deadline(seconds), text.size)
            if outputs is None:
                return _unchanged(x, leaves)
            unpack(packed.array[text.size :], [output.flat for output in outputs])
            return nested.rebuild(template, iter([output.finish() for output in outputs]))

        return self._go("broadcast", run, async_op, *nearest(leaves))


def _unchanged(x: Any, leaves: Sequence[Leaf]) -> Any:
    """Return the result at the root: the structure ``x``, if the other ranks get one like it."""
    given = nested.flatten(x)
    results = [leaf.adapter.unchanged(each) for leaf, each in zip(leaves, given)]
    alike = all(result is each for result, each in zip(results, given))
    return x if alike else nested.rebuild(x, iter(results))


def _to_all(request: Request) -> Request:
    """Return the call as ranks can make it that have passed None."""
    device = request.options.get("device")
    return Request("broadcast", request.dtype, request.shape, root=request.root, device=device)


def _described(head: Head) -> tuple[dtypes.DType, tuple[int, ...]]:
    """Return the dtype and shape that a head tells."""
    ndim = int(head.words[4])
    return dtypes.BY_CODE[int(head.words[1])], tuple(map(int, head.words[5 : 5 + ndim]))
