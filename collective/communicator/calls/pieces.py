"""Base class of the calls that split and join arrays."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from collective.deadline import Deadline
from collective.errors import DeviceError, DtypeError, InvalidArgumentError, ShapeError
from collective.memory import nested
from collective.memory.buffer import Buffer
from collective.request import Request

from ..heads import HEAD_BYTES, Head
from ..output import Output
from ..path import Path
from ..planned import Planned
from ..rows import Rows
from .call import Call, Header
from .structure import UINT8, ArrivedLeaf, assemble
from .views import Array, View, where

__all__ = ["Leaf", "Pieces"]


class Leaf:
    """One array of a call in the form in which it is sent: its rows, dtype, shape and adapter."""

    __slots__ = ("adapter", "array", "dtype", "rows", "shape")

    def __init__(self, what: str, seen: View, axis: int) -> None:
        self.adapter, array, self.dtype = seen
        self.shape = array.shape
        self.rows = Rows(what, array, axis)
        self.array = self.rows.array


class Pieces(Call):
    """Call that moves pieces. The ranks' pieces may have different numbers of rows.

    The call is planned as if every rank had as many rows as this rank. The ranks compare their
    calls. If the calls differ only in lengths, all ranks continue with a plan for the true lengths.

    Attributes:
        x, out, axis: arguments that the caller passed.
        root: rank that gets the result; None for a result on every rank.
        receives: whether this rank gets a result.
        hosted: as in :func:`.views.view`.
        leaves: arrays of the call.
        nesting: nesting of the arrays; 0 for one array.
        expected: number of rows of each leaf from each rank: the caller's lengths, or as if all
            ranks had as many rows as this rank.
        planned: plan for the expected numbers of rows.
        expects: length that the caller expects from each rank, as in :attr:`Path.expects`.
        compares: whether the ranks compare their calls before they send data; only of importance
            if the transport does not compare calls by itself.
    """

    x: Any
    out: Any
    axis: int
    root: int | None = None
    receives: bool = True
    hosted: str = ""
    leaves: list[Leaf]
    nesting: Any
    expected: Sequence[Sequence[int]]
    planned: Planned
    expects: Sequence[int] | None = None
    compares: bool = True

    # -- methods of each operation --------------------------------------------------------

    @abstractmethod
    def pack(self) -> Array:
        """Return this rank's pieces as contiguous bytes."""

    @abstractmethod
    def join_small(
        self, payloads: list[Array], src: Buffer, dst: Buffer, deadline: Deadline
    ) -> None:
        """Write the result of equal small arrays, whose bytes came with the digests."""

    @abstractmethod
    def uneven(self, headers: Sequence[Header]) -> tuple[Sequence[Sequence[int]], Planned]:
        """Return the number of rows of each leaf from each rank, and the plan for these numbers.

        Raises:
            MismatchError: the calls differ in more than the numbers of rows.
        """

    @abstractmethod
    def received_elements(self, planned: Planned) -> Sequence[int] | None:
        """Return the number of elements from each rank; None if this rank gets no result.

        As in :attr:`Request.elements`, the elements of a structure are bytes.
        """

    def offset(self, planned: Planned) -> int | None:
        """Return the offset of this rank's input in the result, in elements.

        Return None if the result does not contain this rank's input as one contiguous piece.
        """
        return None

    # -- the call ------------------------------------------------------------------------

    def run(self, deadline: Deadline) -> Any:
        planned = self._compared(deadline) if self.compares else self.planned
        return self._send(self.expected, planned, deadline)

    def recover(self, headers: Sequence[Header], deadline: Deadline) -> Any:
        rows, planned = self.uneven(headers)
        return self._send(rows, planned, deadline)

    def _send(self, rows: Sequence[Sequence[int]], planned: Planned, deadline: Deadline) -> Any:
        """Move the pieces; return the result.

        Args:
            rows: number of rows of each leaf from each rank.
        """
        if any(sum(lengths) > sys.maxsize for lengths in rows):
            raise ShapeError(
                f"{self.operation}: the result would have {max(map(sum, rows))} rows, more than an "
                f"array can have ({sys.maxsize}) {self.path.who}. Join along an axis with fewer."
            )
        if self.nesting == 0:
            return self._send_array(sum(rows[0]), planned, deadline)
        nbytes = self.received_elements(planned)
        src, dst = Buffer(self.pack(), UINT8), None
        if nbytes is not None:
            dst = self.path.allocate(Buffer.empty, sum(nbytes), UINT8, src.array)
        self.path.carry(planned, src, dst, deadline)
        if nbytes is None or dst is None:
            return None
        messages = np.split(dst.array, list(accumulate(nbytes))[:-1])
        parts = [ArrivedLeaf(leaf.rows, leaf.dtype, r) for leaf, r in zip(self.leaves, rows)]
        return assemble(
            self.operation, messages, parts, nested.flatten(self.x), self.out, self.nesting, self.x,
            self.path.who,
        )  # fmt: skip

    def _send_array(self, total: int, planned: Planned, deadline: Deadline) -> Any:
        """Move one array directly from its memory to the memory of the result.

        Args:
            total: number of rows of the result.
        """
        path, what, leaf = self.path, self.operation, self.leaves[0]
        rows, dtype = leaf.rows, leaf.dtype
        misfit: Exception | None = None
        output = None
        if self.receives:
            shape = rows.shape_with(total)
            try:
                output = Output(what, self.out, leaf.adapter, shape, dtype, rows.array)
            except (DeviceError, DtypeError, InvalidArgumentError, ShapeError) as error:
                # The peers are already in this call, so complete it with new memory, and raise
                # afterwards.
                misfit = error
                output = path.allocate(Output, what, None, leaf.adapter, shape, dtype, rows.array)
            except BaseException as error:
                # There is no memory for the result, and the peers are already in this call.
                path.fail_halfway(error)
                raise
        flat = rows.array.ravel()
        src, dst = Buffer(flat, dtype), None
        if output is not None:
            target = rows.target(output.flat)
            if np.may_share_memory(flat, target):
                at = self.offset(planned)
                if at is None or src.address != Buffer(target[at : at + flat.size], dtype).address:
                    src = Buffer(flat.copy(), dtype)
            dst = Buffer(target, dtype)
        path.carry(planned, src, dst, deadline)
        if misfit is not None:
            raise misfit
        if output is None:
            return None
        rows.restore(target, output.flat, total)
        return output.finish()

    # -- comparing calls --------------------------------------------------------------------

    def _compared(self, deadline: Deadline) -> Planned:
        """Compare the ranks' calls if the transport does not; return the plan to run.

        If the arrays are small, their bytes travel with the comparison. Then the plan only joins
        these bytes.

        Raises:
            Disagreement: the calls differ.
        """
        path, request = self.path, self.planned.request
        if path.agree_first:
            path.compare_calls(request, deadline)
        elif path.agree_sizes or request.options.get("device"):
            payloads = _exchange_heads(path, request, self.pack(), deadline)
            if payloads is not None:
                return Planned(request, partial(self.join_small, payloads))
        return self.planned

    def plan_pieces(
        self, axis: int, counts: Sequence[int] | None, sent: list[list[int]] | None = None
    ) -> Planned:
        """Return the plan for ``counts``, or as if all ranks had as many rows as this rank.

        Args:
            axis: axis along which the lengths may differ.
            counts: number of rows of each rank, if they are known.
            sent: in ``all_to_all``, number of rows of each leaf that this rank sends to each rank.
        """
        path, what, leaves, nesting = self.path, self.operation, self.leaves, self.nesting
        fixed = counts is not None
        shapes = tuple((leaf.dtype, leaf.rows.shape_with(-1 if fixed else leaf.rows.length))
                       for leaf in leaves)  # fmt: skip
        device = where(path, leaves[0].array) if leaves else None
        # Equal calls must have equal digests, so only unusual expectations are part of the request.
        expects = list(self.expects) if self.expects else None
        if expects is not None and expects == self.expected[0]:
            expects = None
        key = (
            what, shapes, str(nesting), self.root, axis, str(counts), str(sent), device,
            self.hosted, str(expects),
        )  # fmt: skip
        planned = path.plans.get(key)
        if planned is not None:
            return planned
        incoming = None
        if sent is not None:
            elements = self.elements_of(sent)
            incoming = self.elements_of([[rows[path.rank]] * path.size for rows in sent])
        else:
            elements = self.elements_of(
                [counts or [leaf.rows.length] * path.size for leaf in leaves]
            )
        options: dict[str, Any] = {
            "axis": axis or None, "sizes": sent, "elements": elements, "incoming": incoming,
            "counts": None if counts is None else list(map(int, counts)), "device": device,
            "alike": sent is not None, "object": self.hosted == "object" or None,
            "expects": expects,
        }  # fmt: skip
        if nesting == 0:
            (dtype, shape), *_ = shapes
            request = Request(what, dtype, shape, root=self.root, **options)
        else:
            names = [[dtype.name, *shape] for dtype, shape in shapes]
            request = Request(what, root=self.root, leaves=names, nesting=nesting, **options)
        return path.remember(key, path.planned(request))

    def elements_of(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """Return for each rank the number of elements of its array, or of bytes of its structure.

        Args:
            rows: for each leaf, the number of rows of each rank.
        """
        if self.nesting == 0:
            return [length * self.leaves[0].rows.inner for length in rows[0]]
        return [
            sum(r[k] * leaf.rows.inner * leaf.dtype.itemsize for r, leaf in zip(rows, self.leaves))
            for k in range(self.path.size)
        ]

    def rows_of(self, headers: Sequence[Header]) -> list[list[int]]:
        """Return the number of rows of each leaf of each rank, from the ranks' headers.

        Raises:
            MismatchError: the headers differ in more than the numbers of rows.
        """
        count = len(self.leaves)
        rows: list[list[int]] = [[] for _ in range(count)]
        reference: Any = None
        for header in headers:
            options = dict(header["options"])
            options.pop("sizes", None)
            options.pop("expects", None)
            leaves = options.pop("leaves", None) or [[header["dtype"], *(header["shape"] or ())]]
            axis = options.get("axis") or 0
            rest = []
            for k, (name, *shape) in enumerate(leaves):
                at = axis % len(shape) if shape else 0
                rest.append((name, shape[:at], shape[at + 1 :]))
                if k < count and shape:
                    rows[k].append(shape[at])
            fixed = (header["operation"], options, rest)
            if reference is None:
                reference = fixed
            if fixed != reference or len(leaves) != count:
                self.path.raise_mismatch(headers)
        return rows

    def compare_lengths(
        self, headers: Sequence[Header], sent: Sequence[Sequence[int]], receivers: Sequence[int]
    ) -> None:
        """Compare what the receivers expect with what the senders pass, if the callers state it.

        Args:
            sent: for each sender, the length that each rank gets.
            receivers: ranks that get a result.

        Raises:
            MismatchError: some receiver expects another length than its sender passes.
        """
        if self.expects is None:
            return
        fit = True
        for receiver in receivers:
            alike = [sent[receiver][receiver]] * self.path.size
            expects = headers[receiver]["options"].setdefault("expects", alike)
            fit = fit and expects == [lengths[receiver] for lengths in sent]
        if not fit:
            self.path.raise_mismatch(headers)


def _exchange_heads(
    path: Path, request: Request, payload: Array, deadline: Deadline
) -> list[Array] | None:
    """Compare ``request`` on all ranks, and give every rank the payloads if they are small.

    On transports that compare no calls, this function compares them, by one message from each
    rank. If digests differ, it calls :meth:`Path.compare_calls`, which exchanges the ranks'
    headers.

    Args:
        payload: contiguous bytes; ranks that make the same call pass the same number of bytes. A
            payload on a GPU is not sent.

    Returns:
        The ranks' payloads, in rank order; None if the payloads are too long or on a GPU.

    Raises:
        Disagreement: the calls differ.
    """
    if not isinstance(payload, np.ndarray):
        path.compare_calls(request, deadline)
        return None
    head = Head(1)
    head.words[0] = request.digest
    head.put(payload)
    received = Buffer.empty(HEAD_BYTES * path.size, UINT8)
    lengths = [HEAD_BYTES] * path.size
    plan = path.head_plan(request.operation, request, request.root, "all_gather", lengths)
    path.carry(plan, head.buffer, received, deadline)
    heads = [Head(1, words) for words in received.array.reshape(path.size, HEAD_BYTES)]
    if any(other.words[0] != request.digest for other in heads):
        # All ranks have the same words, so either all ranks come here or none. compare_calls()
        # raises Disagreement with the ranks' headers.
        path.compare_calls(request, deadline)
    # Equal calls have payloads of equal length: either all of them are in the heads, or none.
    payloads = [other.inline(payload.size) for other in heads]
    return [inline for inline in payloads if inline is not None] or None
