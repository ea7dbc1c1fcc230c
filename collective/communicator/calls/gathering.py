"""Calls that join pieces: ``gather``, ``all_gather``, ``all_to_all``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from collective.deadline import Deadline
from collective.errors import InvalidArgumentError, ShapeError
from collective.memory import nested
from collective.memory.buffer import Buffer, Spot
from collective.memory.numbers import NUMBERS
from collective.request import Request

from ..path import Path
from ..planned import Planned
from ..rows import check_counts, split_sizes
from ..streams import nearest
from .call import Call, Header
from .device import straight
from .pieces import Leaf, Pieces
from .structure import bytes_of
from .views import Array, View, view, views

__all__ = ["AllGather", "AllToAll", "Gather"]


class _Collection(Pieces):
    """Call that joins the ranks' arrays, at one rank or at all ranks.

    Args:
        path: path of the communicator.
        x, counts, axis, out: arguments that the caller passed.
        root: rank that gets the result; None for a result on every rank.
        hosted: as in :func:`.views.view`.
    """

    def __init__(
        self, path: Path, x: Any, root: int | None, counts: Sequence[int] | None, axis: int,
        out: Any, hosted: str = "",
    ) -> None:  # fmt: skip
        self.path = path
        self.x = x
        self.root = root
        self.receives = root is None or root == path.rank
        self.axis = axis
        self.out = out
        self.hosted = hosted
        self.expects = path.expects
        self._counts = None if counts is None else check_counts(self.operation, counts, path.size)

    def plan_for_c(self) -> Planned | None:
        return self._plan_of(view(self.path, self.operation, self.x))

    def known_plan(self, spot: Spot) -> tuple[Planned | None, tuple[int, ...] | None]:
        if self._counts is None or self.axis != 0:
            return None, None
        planned = self.path.plans.get(self._key(spot.dtype, spot.shape, False))
        return planned, (sum(self._counts), *spot.shape[1:]) if self.receives else None

    def _key(self, dtype: Any, shape: tuple[int, ...], on_host: bool) -> Any:
        counts = None if self._counts is None else tuple(self._counts)
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
            planned = self.path.remember(key, self.plan_pieces(self.axis, self._counts))
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
            self.planned = self.plan_pieces(self.axis, self._counts)
        else:
            array = view(path, what, x, self.hosted)
            self.planned = self._plan_of(array)
            self.leaves, self.nesting = [Leaf(what, array, self.axis)], 0
            self._prepare_lengths()
        self.compares = self._counts is None or path.agree_first
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
        self.expected = [self._counts or [leaf.rows.length] * path.size for leaf in self.leaves]
        if self._counts is None:
            return
        expected = self._counts[path.rank]
        for leaf in self.leaves:
            if leaf.rows.length != expected:
                raise ShapeError(
                    f"{self.operation}: counts give rank {path.rank} {expected} rows; its array "
                    f"has {leaf.rows.length} {path.who}."
                )

    def pack(self) -> Array:
        if self.nesting == 0:
            return self.leaves[0].array.ravel().view(np.uint8)
        return bytes_of([leaf.array.ravel() for leaf in self.leaves])

    def join_small(
        self, payloads: list[Array], src: Buffer, dst: Buffer | None, deadline: Deadline
    ) -> None:
        if dst is not None:
            np.concatenate(payloads, out=dst.array.view(np.uint8))

    def received_elements(self, planned: Planned) -> Sequence[int] | None:
        return planned.request.elements if self.receives else None

    def offset(self, planned: Planned) -> int | None:
        return sum(planned.request.elements[: self.path.rank])

    def uneven(self, headers: Sequence[Header]) -> tuple[Sequence[Sequence[int]], Planned]:
        if self._counts is not None:
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

    def __init__(
        self, path: Path, x: Any, root: Any, counts: Sequence[int] | None, axis: int, out: Any,
        hosted: str = "",
    ) -> None:  # fmt: skip
        root = path.check_rank("gather", "root", root)
        super().__init__(path, x, root, counts, axis, out if path.rank == root else None, hosted)

    @classmethod
    def of_plain(
        cls, path: Path, x: Any, out: Any, *, op: Any = None, order: Any = None, root: Any = None,
        counts: Any = None,
    ) -> Self:  # fmt: skip
        return cls(path, x, root, counts, 0, out)


class AllGather(_Collection):
    """See :meth:`Communicator.all_gather`."""

    operation = "all_gather"

    def __init__(
        self, path: Path, x: Any, counts: Sequence[int] | None, axis: int, out: Any,
        hosted: str = "",
    ) -> None:  # fmt: skip
        super().__init__(path, x, None, counts, axis, out, hosted)

    @classmethod
    def of_plain(
        cls, path: Path, x: Any, out: Any, *, op: Any = None, order: Any = None, root: Any = None,
        counts: Any = None,
    ) -> Self:  # fmt: skip
        return cls(path, x, counts, 0, out)


class AllToAll(Pieces):
    """See :meth:`Communicator.all_to_all`."""

    operation = "all_to_all"

    def __init__(
        self, path: Path, x: Any, counts: Sequence[int] | None, axis: int, out: Any
    ) -> None:
        self.path = path
        self.x = x
        self.axis = axis
        self.out = out
        self.expects = path.expects
        self._counts = counts

    @classmethod
    def of_plain(
        cls, path: Path, x: Any, out: Any, *, op: Any = None, order: Any = None, root: Any = None,
        counts: Any = None,
    ) -> Self:  # fmt: skip
        return cls(path, x, None, 0, out)

    def plan_for_c(self) -> Planned | None:
        self.prepare()
        return self.planned

    def prepare(self) -> Call:
        path, what = self.path, self.operation
        self.nesting = nested.skeleton(self.x)
        self.leaves = [Leaf(what, leaf, self.axis) for leaf in views(path, what, self.x)]
        # For each leaf, the number of rows that this rank sends to each rank.
        self._sent = [
            split_sizes(what, leaf.rows.length, path.size, self._counts) for leaf in self.leaves
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
                leaf.rows.piece(rows, rank)
                for rank in range(size)
                for leaf, rows in zip(self.leaves, self._sent)
            ]
        )

    def join_small(
        self, payloads: list[Array], src: Buffer, dst: Buffer | None, deadline: Deadline
    ) -> None:
        assert dst is not None
        # The ranks' calls are equal, so every rank cuts its array as this rank does.
        rank, width, elements = self.path.rank, src.dtype.itemsize, self.planned.request.elements
        start = width * sum(elements[:rank])
        pieces = [payload[start : start + width * elements[rank]] for payload in payloads]
        np.concatenate(pieces, out=dst.array.view(np.uint8))

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
