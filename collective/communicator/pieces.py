"""What the calls that split and join arrays share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from collective.errors import DeviceError, DtypeError, InvalidArgumentError, ShapeError
from collective.memory import dtypes, nested
from collective.memory.buffer import Buffer
from collective.memory.dtypes import DType
from collective.request import Request

from .calls import Array
from .deadline import Deadline
from .gpu_calls import View
from .heads import HEAD_BYTES, Head
from .output import Output
from .plan import Planned
from .rows import Rows
from .straight import StraightCalls

__all__ = ["UINT8", "Header", "Leaf", "PieceCalls", "bytes_of", "pack",
           "unpack"]  # fmt: skip

Header = dict[str, Any]
UINT8 = dtypes.BY_NAME["uint8"]


class Leaf:
    """One array of a call, as it is sent: its rows, and what its results are made with."""

    __slots__ = ("adapter", "array", "dtype", "rows", "shape")

    def __init__(self, what: str, view: View, axis: int) -> None:
        self.adapter, array, self.dtype = view
        self.shape = array.shape
        self.rows = Rows(what, array, axis)
        self.array = self.rows.array


class PieceCalls(StraightCalls):
    """The shared part of the calls that split and join."""

    def _move_one(
        self,
        what: str,
        planned: Planned,
        leaf: Leaf,
        total: int,
        at: int | None,
        receives: bool,
        out: Any,
        seconds: float,
    ) -> Any:
        """Move one array, straight from where it is and to where it goes.

        Args:
            total: rows of the result.
            at: where this rank's own piece is in the result, if the call may be in place.
            seconds: that it may take.
        """
        rows, dtype = leaf.rows, leaf.dtype
        fits: Exception | None = None
        output = None
        if receives:
            shape = rows.shape_with(total)
            try:
                output = Output(what, out, leaf.adapter, shape, dtype, rows.array)
            except (DeviceError, DtypeError, InvalidArgumentError, ShapeError) as error:
                # The peers are already on their way: go with them, and raise afterwards.
                fits = error
                output = self._allocate(Output, what, None, leaf.adapter, shape, dtype, rows.array)
            except BaseException as error:
                # There is no memory for the result, and the peers are on their way here, too.
                self._half_done(error)
                raise
        src = rows.array.ravel()
        source = Buffer(src, dtype)
        dst = None
        if output is not None:
            target = rows.target(output.flat)
            if np.may_share_memory(src, target) and (
                at is None or source.address != Buffer(target[at : at + src.size], dtype).address
            ):
                source = Buffer(src.copy(), dtype)
            dst = Buffer(target, dtype)
        self._carry(planned, source, dst, seconds, alike=False)
        if fits is not None:
            raise fits
        if output is None:
            return None
        rows.restore(target, output.flat, total)
        return output.finish()

    def _move_packed(
        self, planned: Planned, packed: Array, lengths: Sequence[int] | None, seconds: float
    ) -> list[Array]:
        """Move the pieces of a structure, as bytes; return what has come from each rank.

        Args:
            packed: what this rank sends.
            lengths: how many bytes come from each rank; None if this one gets nothing.
        """
        src = Buffer(packed, UINT8)
        dst = None
        if lengths is not None:
            dst = self._allocate(Buffer.empty, sum(lengths), UINT8, src.array)
        self._carry(planned, src, dst, seconds, alike=False)
        if lengths is None or dst is None:
            return []
        return np.split(dst.array, list(accumulate(lengths))[:-1])

    def _compared(
        self,
        planned: Planned,
        packed: Callable[[], Array],
        joined: Callable[..., None],
        deadline: Deadline,
    ) -> Planned:
        """Compare the ranks' calls where the transport does not; return the plan to go by.

        Args:
            packed: returns this rank's pieces as bytes. If they are few they travel with the
                comparison.
            joined: what is left of the plan then: it takes the bytes of all ranks, and what a plan
                takes.

        Raises:
            Disagreement: the calls differ.
        """
        request = planned.request
        if self._agree_first:
            self._agree(request, deadline.left())
        elif self._agree_sizes or request.options.get("device"):
            found = self._exchange_heads(request, packed(), deadline)
            if found is not None:
                return Planned(request, functools.partial(joined, found))
        return planned

    def _exchange_heads(
        self, request: Request, payload: Array, deadline: Deadline
    ) -> list[Array] | None:
        """Compare ``request`` on all ranks, and give all of them every rank's few bytes.

        For transports that compare nothing: there it takes the place of :meth:`_agree`.

        Args:
            payload: contiguous bytes, equally many on ranks that make the same call. What is
                on a GPU stays there.

        Returns:
            The ranks' payloads, in rank order; None if they are too long.

        Raises:
            Disagreement: the calls differ.
        """
        if not isinstance(payload, np.ndarray):
            self._agree(request, deadline.left())
            return None
        head = Head(1)
        head.words[0] = request.digest
        head.put(payload)
        every = Buffer.empty(HEAD_BYTES * self.size, UINT8)
        lengths = [HEAD_BYTES] * self.size
        about = self._about(request, request.operation, request.root, "all_gather", lengths)
        self._carry(about, head.buffer, every, deadline.left(), alike=False)
        heads = [Head(1, received) for received in every.array.reshape(self.size, HEAD_BYTES)]
        if any(each.words[0] != request.digest for each in heads):
            # All ranks have these words, so that all come here or none; it raises with the
            # requests.
            self._agree(request, deadline.left())
        # Of equal calls the payloads are equally long: either all of them are in the heads, or
        # none.
        found = [each.inline(payload.size) for each in heads]
        return [each for each in found if each is not None] or None

    def _piece_plan(
        self,
        what: str,
        leaves: list[Leaf],
        nesting: Any,
        root: int | None,
        axis: int,
        counts: Sequence[int] | None,
        sizes: list[list[int]] | None = None,
    ) -> Planned:
        """Return the plan of pieces whose lengths along ``axis`` may differ.

        It is for the case that all ranks have as much as this one, or ``counts`` of it.

        Args:
            counts: the ranks' lengths along ``axis``, if they are known.
            sizes: of ``all_to_all``, how many rows of each leaf this rank sends to each.
        """
        fixed = counts is not None
        shapes = tuple((leaf.dtype, leaf.rows.shape_with(-1 if fixed else leaf.rows.length))
                       for leaf in leaves)  # fmt: skip
        where = self._where(leaves[0].array) if leaves else None
        key = (what, shapes, str(nesting), root, axis, str(counts), str(sizes), where)
        planned = self._plans.get(key)
        if planned is not None:
            return planned
        incoming = None
        if sizes is not None:
            elements = self._lengths(sizes, leaves, nesting)
            even = [[s[self.rank]] * self.size for s in sizes]
            incoming = self._lengths(even, leaves, nesting)
        else:
            rows = [counts or [leaf.rows.length] * self.size for leaf in leaves]
            elements = self._lengths(rows, leaves, nesting)
        options: dict[str, Any] = {
            "axis": axis or None, "sizes": sizes, "elements": elements, "incoming": incoming,
            "counts": None if counts is None else list(map(int, counts)), "device": where,
            "alike": sizes is not None,
        }  # fmt: skip
        if nesting == 0:
            (dtype, shape), *_ = shapes
            request = Request(what, dtype, shape, root=root, **options)
        else:
            names = [[dtype.name, *shape] for dtype, shape in shapes]
            request = Request(what, root=root, leaves=names, nesting=nesting, **options)
        return self._remember(key, self._planned(request))

    def _lengths(
        self, rows: Sequence[Sequence[int]], leaves: Sequence[Leaf], nesting: Any
    ) -> list[int]:
        """Return how many elements of one array each rank has, or bytes of a structure.

        Args:
            rows: of each leaf, each rank's.
        """
        if nesting == 0:
            return [length * leaves[0].rows.inner for length in rows[0]]
        return [
            sum(r[k] * leaf.rows.inner * leaf.dtype.itemsize for r, leaf in zip(rows, leaves))
            for k in range(self.size)
        ]

    def _rows_of(self, headers: Sequence[Header], count: int) -> list[list[int]]:
        """Return how many rows of each leaf each rank has; anything else must be equal."""
        rows: list[list[int]] = [[] for _ in range(count)]
        reference: Any = None
        for header in headers:
            options = dict(header["options"])
            options.pop("sizes", None)
            leaves = options.pop("leaves", None) or [[header["dtype"], *(header["shape"] or ())]]
            axis = options.get("axis") or 0
            rest = []
            for k, (name, *shape) in enumerate(leaves):
                at = axis % len(shape) if shape else 0
                rest.append((name, shape[:at], shape[at + 1 :]))
                if k < count and shape:
                    rows[k].append(shape[at])
            found = (header["operation"], options, rest)
            if reference is None:
                reference = found
            if found != reference or len(leaves) != count:
                self._mismatch(headers)
        return rows

    def _assemble(
        self,
        what: str,
        parts: Sequence[Array],
        results: Sequence[tuple[Rows, DType, Sequence[int]]],
        likes: Sequence[Any],
        out: Any,
        nesting: Any,
        template: Any,
    ) -> Any:
        """Turn bytes, a part a sender with its rows of each leaf in turn, into arrays."""
        positions = [0] * len(parts)
        outs = self._outs(what, out, nesting, len(results), "result")
        finished = []
        for (rows, dtype, lengths), like, given in zip(results, likes, outs):
            pieces = []
            for k, (part, length) in enumerate(zip(parts, lengths)):
                nbytes = length * rows.inner * dtype.itemsize
                pieces.append(part[positions[k] : positions[k] + nbytes])
                positions[k] += nbytes
            raw = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            # Cut out of bytes, and an array of a wider type from here on: one of 16 bytes, at most.
            if Buffer(raw, UINT8).address % 16:
                raw = raw.copy()
            total = sum(lengths)
            model = given if like is None and given is not None else like
            adapter = self._adapter(model, on_gpu=not isinstance(raw, np.ndarray))
            # The bytes are on the stream in force; the result is to be on that of the array given.
            near = raw if isinstance(rows.array, np.ndarray) else rows.array
            output = Output(what, given, adapter, rows.shape_with(total), dtype, near)
            rows.restore(raw.view(dtype.storage), output.flat, total)
            finished.append(output.finish())
        if nesting == 0:
            return finished[0]
        fits = template is not None and nested.skeleton(template) == nesting
        return nested.rebuild(template if fits else nesting, iter(finished))


def bytes_of(arrays: Sequence[Array]) -> Array:
    """Return the bytes of the arrays, one after the other, in memory like that of the first."""
    nbytes = sum(array.nbytes for array in arrays)
    packed = Buffer.empty(nbytes, UINT8, arrays[0] if arrays else None).array
    pack(arrays, packed)
    return packed


def pack(arrays: Sequence[Array], packed: Array) -> None:
    """Write the bytes of flat arrays to ``packed``, one after the other."""
    start = 0
    for array in arrays:
        packed[start : start + array.nbytes] = array.view(np.uint8)
        start += array.nbytes


def unpack(packed: Array, arrays: Sequence[Array]) -> None:
    """Read the bytes of flat arrays from ``packed``, one after the other."""
    start = 0
    for array in arrays:
        array.view(np.uint8)[:] = packed[start : start + array.nbytes]
        start += array.nbytes
