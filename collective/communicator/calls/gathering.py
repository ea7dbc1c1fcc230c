"""Calls that join pieces: ``gather``, ``all_gather``, ``all_to_all``.

This module has the whole way of such a call, except for the transport: the constructors check the
arguments, :meth:`Pieces.plan_pieces` plans, :meth:`Pieces.run` compares the ranks' calls,
:meth:`Pieces.recover` plans again if the pieces are uneven, and :meth:`Pieces._send` moves the
pieces and joins them.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from collective.algorithms.pieces import check_counts, split_sizes
from collective.deadline import Deadline
from collective.errors import DeviceError, DtypeError, InvalidArgumentError, ShapeError
from collective.memory import nested
from collective.memory.arrays import NUMBERS
from collective.memory.buffer import Buffer, Spot
from collective.request import Request

from ..output import Output, outputs_of
from ..path import Path
from ..streams import nearest
from .call import Call, Header, Planned, straight
from .heads import HEAD_BYTES, Head
from .views import UINT8, Array, Leaf, View, adapter_for, bytes_of, elements_of, view, views, where


class Pieces(Call):
    """Call that moves pieces. The ranks' pieces may have different numbers of rows.

    The call is planned as if every rank had as many rows as this rank. The ranks compare their
    calls. If the calls differ only in lengths, all ranks continue with a plan for the true lengths.

    Attributes:
        leaves: arrays of the call.
        nesting: nesting of the arrays; 0 for one array.
        expected: number of rows of each leaf from each rank: the caller's lengths, or as if all
            ranks had as many rows as this rank.
        planned: plan for the expected numbers of rows.
        expects: length that the caller expects from each rank, as in :attr:`Path.expects`.
        compares: whether the ranks compare their calls before they send data; only of importance
            if the transport does not compare calls by itself.
    """

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
        if self.compares and self.path.agree_sizes:
            self.path.compare_calls(self.planned.request, deadline)
        return self._send(self.expected, self.planned, deadline)

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
        return assemble(
            self.operation, messages, self.leaves, rows, nested.flatten(self.x), self.out,
            self.nesting, self.x, self.path.who,
        )  # fmt: skip

    def _send_array(self, total: int, planned: Planned, deadline: Deadline) -> Any:
        """Move one array directly from its memory to the memory of the result.

        Args:
            total: number of rows of the result.
        """
        path, what, leaf = self.path, self.operation, self.leaves[0]
        misfit: Exception | None = None
        output = None
        if self.receives:
            shape, dtype, near = leaf.shape_with(total), leaf.dtype, leaf.array
            try:
                output = Output(what, self.out, leaf.adapter, shape, dtype, near)
            except (DeviceError, DtypeError, InvalidArgumentError, ShapeError) as error:
                # The peers are already in this call, so complete it with new memory, and raise
                # afterwards.
                misfit = error
                output = path.allocate(Output, what, None, leaf.adapter, shape, dtype, near)
            except BaseException as error:
                # There is no memory for the result, and the peers are already in this call.
                path.fail_halfway(error)
                raise
        flat = leaf.array.ravel()
        src, dst = Buffer(flat, leaf.dtype), None
        if output is not None:
            target = leaf.target(output.flat)
            if np.may_share_memory(flat, target):
                at = self.offset(planned)
                own = None if at is None else Buffer(target[at : at + flat.size], leaf.dtype)
                if own is None or src.address != own.address:
                    src = Buffer(flat.copy(), leaf.dtype)
            dst = Buffer(target, leaf.dtype)
        path.carry(planned, src, dst, deadline)
        if misfit is not None:
            raise misfit
        if output is None:
            return None
        leaf.restore(target, output.flat, total)
        return output.finish()

    # -- comparing calls --------------------------------------------------------------------

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
        shapes = tuple((leaf.dtype, leaf.shape_with(-1 if fixed else leaf.length))
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
            elements = self.elements_of([counts or [leaf.length] * path.size for leaf in leaves])
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
        return elements_of(self.leaves, rows, self.path.size, in_bytes=self.nesting != 0)

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


def assemble(
    what: str, messages: Sequence[Array], leaves: Sequence[Leaf], rows: Sequence[Sequence[int]],
    likes: Sequence[Any], out: Any, nesting: Any, template: Any, who: str,
) -> Any:  # fmt: skip
    """Turn received bytes into arrays, and the arrays into a structure.

    Args:
        messages: bytes from each sender: its pieces of all leaves, one after the other.
        leaves: leaves with the dtypes and the rows of the pieces.
        rows: for each leaf, the number of rows from each sender.
        likes: model of each leaf's array: an array, the name of a framework, or None.
        out: structure or array that receives the result, or None.
        nesting: nesting of the result; 0 for one array.
        template: structure whose keys and classes the result takes, if it is nested alike.
        what, who: the operation and this rank, for errors.
    """
    positions = [0] * len(messages)
    outs = outputs_of(what, out, nesting, len(leaves), "result", who)
    results = []
    for leaf, lengths, like, leaf_out in zip(leaves, rows, likes, outs):
        pieces = []
        for sender, (message, length) in enumerate(zip(messages, lengths)):
            nbytes = length * leaf.inner * leaf.dtype.itemsize
            pieces.append(message[positions[sender] : positions[sender] + nbytes])
            positions[sender] += nbytes
        raw = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        # The bytes become elements of a wider type, of at most 16 bytes, and must be aligned.
        if Buffer(raw, UINT8).address % 16:
            raw = raw.copy()
        total = sum(lengths)
        model = leaf_out if like is None and leaf_out is not None else like
        adapter = adapter_for(model, on_gpu=not isinstance(raw, np.ndarray))
        # The bytes are on the current stream. The result must be on the stream of the given array.
        near = raw if isinstance(leaf.array, np.ndarray) else leaf.array
        output = Output(what, leaf_out, adapter, leaf.shape_with(total), leaf.dtype, near)
        leaf.restore(raw.view(leaf.dtype.storage), output.flat, total)
        results.append(output.finish())
    if nesting == 0:
        return results[0]
    fits = template is not None and nested.skeleton(template) == nesting
    return nested.rebuild(template if fits else nesting, iter(results))


# -- operations ------------------------------------------------------------------------------------


class _Collection(Pieces):
    """Call that joins the ranks' arrays, at one rank or at all ranks."""

    def __init__(self, path: Path, x: Any, **arguments: Any) -> None:
        super().__init__(path, x, **arguments)
        self.expects = path.expects
        if self.counts is not None:
            self.counts = check_counts(self.operation, self.counts, path.size)

    def plan_for_c(self) -> Planned | None:
        return self._plan_of(view(self.path, self.operation, self.x))

    def known_plan(self, spot: Spot) -> tuple[Planned | None, tuple[int, ...] | None]:
        if self.counts is None or self.axis != 0:
            return None, None
        planned = self.path.plans.get(self._key(spot.dtype, spot.shape, False))
        return planned, (sum(self.counts), *spot.shape[1:]) if self.receives else None

    def _key(self, dtype: Any, shape: tuple[int, ...], on_host: bool) -> Any:
        counts = None if self.counts is None else tuple(self.counts)
        return (
            self.operation, dtype, shape, self.root, self.axis, counts, on_host, self.hosted,
            tuple(self.expects or ()),
        )  # fmt: skip

    def _plan_of(self, seen: View) -> Planned:
        """Return the plan for one array."""
        key = self._key(seen.dtype, seen.array.shape, type(seen.array) is np.ndarray)
        planned = self.path.plans.get(key)
        if planned is None:
            self.leaves, self.nesting = [Leaf(self.operation, seen, self.axis)], 0
            self._prepare_lengths()
            planned = self.path.remember(key, self.plan_pieces(self.axis, self.counts))
        return planned

    def prepare(self) -> Call:
        path, what, x = self.path, self.operation, self.x
        if path.enqueues and (short := straight(self, x, self.out)) is not None:
            return short
        if nested.is_tree(x):
            self.nesting = nested.skeleton(x)
            seen = views(path, what, x, self.hosted)
            self.leaves = [Leaf(what, leaf, self.axis) for leaf in seen]
            self._refuse_numbers()
            self._prepare_lengths()
            self.planned = self.plan_pieces(self.axis, self.counts)
        else:
            array = view(path, what, x, self.hosted)
            self.planned = self._plan_of(array)
            self.leaves, self.nesting = [Leaf(what, array, self.axis)], 0
            self._prepare_lengths()
        self.compares = self.counts is None or path.agree_first
        self.run_by(nearest(self.leaves))
        return self

    def _refuse_numbers(self) -> None:
        what = self.operation
        if any(leaf.adapter is NUMBERS for leaf in self.leaves):
            raise InvalidArgumentError(
                f"{what}: the structure contains numbers, which could be joined in two ways "
                f"{self.path.who}. To join lists to a longer array, pass numpy.asarray(x). To get "
                f"a list of the ranks' structures, use {what}_object."
            )

    def _prepare_lengths(self) -> None:
        """Set the expected lengths; check that the counts are the lengths of this rank's arrays."""
        path = self.path
        self.expected = [self.counts or [leaf.length] * path.size for leaf in self.leaves]
        if self.counts is None:
            return
        expected = self.counts[path.rank]
        for leaf in self.leaves:
            if leaf.length != expected:
                raise ShapeError(
                    f"{self.operation}: counts give rank {path.rank} {expected} rows; its array "
                    f"has {leaf.length} {path.who}."
                )

    def pack(self) -> Array:
        if self.nesting == 0:
            return self.leaves[0].array.ravel().view(np.uint8)
        return bytes_of([leaf.array.ravel() for leaf in self.leaves])

    def received_elements(self, planned: Planned) -> Sequence[int] | None:
        return planned.request.elements if self.receives else None

    def offset(self, planned: Planned) -> int | None:
        return sum(planned.request.elements[: self.path.rank])

    def uneven(self, headers: Sequence[Header]) -> tuple[Sequence[Sequence[int]], Planned]:
        if self.counts is not None:
            self.path.raise_mismatch(headers)
        rows = self.rows_of(headers)
        if self.nesting == 0:
            sent = [[length] * self.path.size for length in rows[0]]
            self.compare_lengths(headers, sent, [] if self.root is None else [self.root])
        # The headers have shown that dtype and shape agree, so the request has none. The rows are
        # part of its digest. The plan is not remembered: the next call may have other lengths.
        request = Request(
            self.operation, root=self.root, elements=self.elements_of(rows), sizes=rows
        )
        return rows, self.path.planned(request)


class Gather(_Collection):
    """See :meth:`Communicator.gather`."""

    operation = "gather"
    rooted = to_root = True


class AllGather(_Collection):
    """See :meth:`Communicator.all_gather`."""

    operation = "all_gather"


class AllGatherObjects(Call):
    """All-gather of encoded objects, of which short ones travel in heads.

    Args:
        path: path of the communicator.
        raw: bytes of this rank's object.
    """

    operation = "all_gather"

    def __init__(self, path: Path, raw: Array) -> None:
        super().__init__(path, raw)

    def run(self, deadline: Deadline) -> list[Array]:
        """Return the bytes of the ranks' objects."""
        path, raw = self.path, self.x
        head = Head(1)
        head.words[0] = raw.size
        head.put(raw)
        heads = np.empty(HEAD_BYTES * path.size, np.uint8)
        plan = path.object_heads_plan(HEAD_BYTES)
        path.carry(plan, head.buffer, Buffer(heads, UINT8), deadline)
        lengths = heads.view(np.int64)[:: HEAD_BYTES // 8].tolist()
        if max(lengths) <= head.room:
            starts = range(HEAD_BYTES - head.room, heads.size, HEAD_BYTES)
            return [heads[at : at + nbytes] for at, nbytes in zip(starts, lengths)]
        call = AllGather(path, raw, counts=lengths, hosted="object")
        joined = call.prepare().perform(deadline)
        return np.split(joined, list(accumulate(lengths))[:-1])


class AllToAll(Pieces):
    """See :meth:`Communicator.all_to_all`."""

    operation = "all_to_all"

    def plan_for_c(self) -> Planned | None:
        self.prepare()
        return self.planned

    def prepare(self) -> Call:
        path, what = self.path, self.operation
        self.expects = path.expects
        self.nesting = nested.skeleton(self.x)
        self.leaves = [Leaf(what, leaf, self.axis) for leaf in views(path, what, self.x)]
        # For each leaf, the number of rows that this rank sends to each rank.
        self._sent = [
            split_sizes(what, leaf.length, path.size, self.counts) for leaf in self.leaves
        ]
        # Assume that every rank sends as many rows as this rank, until the headers show otherwise.
        self.expected = [[rows[path.rank]] * path.size for rows in self._sent]
        self.planned = self.plan_pieces(self.axis, None, self._sent)
        self.run_by(nearest(self.leaves))
        return self

    def pack(self) -> Array:
        if self.nesting == 0:
            return self.leaves[0].array.ravel().view(np.uint8)
        size = len(self._sent[0]) if self._sent else 0
        return bytes_of(
            [
                leaf.piece(rows, rank)
                for rank in range(size)
                for leaf, rows in zip(self.leaves, self._sent)
            ]
        )

    def received_elements(self, planned: Planned) -> Sequence[int] | None:
        return planned.request.incoming

    def uneven(self, headers: Sequence[Header]) -> tuple[Sequence[Sequence[int]], Planned]:
        self.rows_of(headers)
        path, request = self.path, self.planned.request
        table = [header["options"]["sizes"] for header in headers]
        if self.nesting == 0:
            self.compare_lengths(headers, [sizes[0] for sizes in table], range(path.size))
        rows = [
            [table[rank][k][path.rank] for rank in range(path.size)]
            for k in range(len(self.leaves))
        ]
        agreed = Request(
            self.operation, sizes=table, elements=request.elements, incoming=self.elements_of(rows)
        )
        return rows, path.planned(agreed)
