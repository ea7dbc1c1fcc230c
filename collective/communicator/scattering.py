"""The call scatter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.errors import InvalidArgumentError
from collective.memory import dtypes, nested
from collective.memory.buffer import Buffer
from collective.request import Request

from .deadline import Deadline
from .heads import Head
from .pieces import UINT8, Leaf, PieceCalls, bytes_of
from .rows import Rows, split_sizes

__all__ = ["Scattering"]


class Scattering(PieceCalls):
    """The part of a communicator that scatters."""

    def scatter(
        self,
        x: Any,
        *,
        root: int = 0,
        counts: Sequence[int] | None = None,
        axis: int = 0,
        out: Any = None,
        like: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Cut the array of ``root`` into pieces and give each rank one.

        Collective: every rank calls it, with one root.

        Args:
            x: at the root, an array or a nested list, tuple or dict of arrays, each of
                which is cut. Elsewhere None, or something of the same shape.
            root: the rank whose array is cut.
            counts: at the root, lengths of the ranks' pieces along ``axis``; by default
                as ``numpy.array_split`` cuts.
            axis: at the root, the axis that is cut.
            out: where this rank's piece goes.
            like: the framework of the result where ``x`` and ``out`` are None.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            Piece ``rank``, as ``out`` or a new array. Structures come as they were nested
            at the root, dicts with string keys.

        Raises:
            ShapeError: the counts do not add up to the axis, or ``out`` does not fit (after
                the call: its own rank raises, nothing is written there).
            MismatchError: roots or operations differ.

        See Also:
            MPI_Scatterv.
        """
        what = "scatter"
        root = self._rank(what, "root", root)
        seconds = self._seconds(timeout)
        leaves: list[Leaf] = []
        nesting: Any = 0
        if self.rank == root:
            if x is None:
                raise InvalidArgumentError(f"scatter: the root passed None {self._who}.")
            nesting = nested.skeleton(x)
            leaves = [Leaf(what, view, axis) for view in self._views(what, x)]
            sizes = [split_sizes(what, leaf.rows.length, self.size, counts) for leaf in leaves]
            call = Request(
                what, root=root, axis=axis, nesting=nesting, sizes=sizes,
                leaves=[[leaf.dtype.name, *leaf.shape] for leaf in leaves],
                device=self._where(leaves[0].rows.array) if leaves else None,
            )  # fmt: skip
        else:
            self._adapter(like)
            call = self._guessed(root, axis, out)
        chosen = out if out is not None else x if x is not None else like
        likes = nested.flatten(chosen) if nested.is_tree(chosen) else [chosen]

        def run() -> Any:
            deadline = Deadline(seconds)
            options = self._root_options(call, root, deadline)
            names = [dtypes.named(name) for name, *_ in options["leaves"]]
            shapes = [tuple(shape) for _, *shape in options["leaves"]]
            sizes = options["sizes"]
            models = [Rows(what, np.empty(shape, np.bool_), options["axis"]) for shape in shapes]
            nbytes = [
                sum(s[r] * m.inner * d.itemsize for s, m, d in zip(sizes, models, names))
                for r in range(self.size)
            ]
            packed = None
            if self.rank == root:
                packed = Buffer(
                    bytes_of(
                        [
                            leaf.rows.piece(cut, rank)
                            for rank in range(self.size)
                            for leaf, cut in zip(leaves, sizes)
                        ]
                    ),
                    UINT8,
                )
            kept = likes if len(likes) == len(names) else [*likes, like][:1] * len(names)
            if "device" in options:
                model = kept[0] if kept else None
                near = leaves[0].rows.array if leaves else self._seen(model)
                room = self._room(self._adapter(model, True), nbytes[self.rank], near)
                mine = Buffer(room, UINT8)
            else:
                mine = Buffer.empty(nbytes[self.rank], UINT8)
            agreed = Request(what, root=root, elements=nbytes, sizes=nbytes)
            self._carry(self._planned(agreed), packed, mine, deadline.left(), alike=False)
            results = [(m, d, [s[self.rank]]) for s, m, d in zip(sizes, models, names)]
            nesting = options["nesting"]
            found = self._assemble(what, [mine.array], results, kept, out, nesting, x)
            if not leaves:
                self._settle(what, mine.array, deadline.left())
            return found

        return self._go(what, run, async_op, *self._near(leaves))

    def _guessed(self, root: int, axis: int, out: Any) -> Request:
        """Return the root's call, if ``out`` is a piece of what it cuts evenly.

        Where that is so, comparing the calls is all that it takes to know what is scattered; where
        not, the ranks tell each other.
        """
        if out is not None and self._on_host and not nested.is_tree(out):
            view = self._view("scatter", out)
            if isinstance(view.array, np.ndarray) and view.array.ndim:
                leaf = Leaf("scatter", view, axis)
                length = leaf.rows.length
                shape = leaf.rows.shape_with(length * self.size)
                return Request(
                    "scatter", root=root, axis=axis, nesting=0, sizes=[[length] * self.size],
                    leaves=[[leaf.dtype.name, *shape]],
                )  # fmt: skip
        return Request("scatter", root=root)

    def _root_options(self, request: Request, root: int, deadline: Deadline) -> dict[str, Any]:
        """Return the options of the root's call, which alone knows what is scattered."""
        if not self._heads:
            headers = self._sizes(request, deadline.left())
            if headers is None:
                return request.options  # the others have guessed it
            for header in headers:
                if header["operation"] != "scatter" or header["options"].get("root") != root:
                    self._mismatch(headers)
            if "leaves" not in headers[root]["options"]:
                self._mismatch(headers)
            return dict(headers[root]["options"])
        head = Head(1)
        text = np.frombuffer(json.dumps(request.options).encode(), np.uint8)
        if self.rank == root:
            head.words[0] = text.size
            head.put(text)
        about = request.comparing("broadcast")
        plan = self._planned(about)
        self._carry(plan, head.buffer, head.buffer, deadline.left(), alike=False)
        received = head.inline(int(head.words[0]))
        if received is None:
            received = np.empty(int(head.words[0]), np.uint8)
            if self.rank == root:
                received[:] = text
            text_of_root = Buffer(received, UINT8)
            plan = self._planned(about)
            self._carry(plan, text_of_root, text_of_root, deadline.left(), alike=False)
        return dict(json.loads(received.tobytes()))
