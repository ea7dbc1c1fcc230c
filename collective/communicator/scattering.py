"""The call scatter."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collective.errors import InvalidArgumentError
from collective.memory import dtypes, nested
from collective.memory.buffer import Buffer
from collective.request import Disagreement, Request

from .calls import Array
from .deadline import Deadline
from .gpu_calls import nearest
from .heads import Head
from .pieces import UINT8, Header, Leaf, PieceCalls, bytes_of
from .plan import Planned
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
        root = self._rank("scatter", "root", root)
        seconds = self._seconds(timeout)
        call = self._call_of_scatter(x, root, counts, axis, out, like)
        return self._scatter(call, seconds, async_op)

    def _call_of_scatter(
        self, x: Any, root: int, counts: Sequence[int] | None, axis: int, out: Any, like: Any
    ) -> _ScatterCall:
        """Return what this rank knows of a scatter, whose arguments are as the caller has them."""
        leaves: list[Leaf] = []
        if self.rank == root:
            if x is None:
                raise InvalidArgumentError(f"scatter: the root passed None {self._who}.")
            leaves = [Leaf("scatter", view, axis) for view in self._views("scatter", x)]
            request = self._scatter_request(root, axis, leaves, nested.skeleton(x), counts)
        else:
            self._adapter(like)
            request = self._guessed(root, axis, out) or Request(
                "scatter", root=root, elements=[0] * self.size
            )
        chosen = out if out is not None else x if x is not None else like
        likes = nested.flatten(chosen) if nested.is_tree(chosen) else [chosen]
        return _ScatterCall(request, leaves, x, out, like, likes)

    def _scatter(
        self,
        call: _ScatterCall,
        seconds: float,
        async_op: bool,
        difference: Disagreement | None = None,
    ) -> Any:
        """Make the call; see :meth:`scatter`.

        Args:
            difference: what the ranks have found already, if that is how they differ.
        """
        run = functools.partial(self._scatter_now, call, seconds, difference)
        return self._go("scatter", run, async_op, *nearest(call.leaves))

    def _scatter_now(
        self, call: _ScatterCall, seconds: float, difference: Disagreement | None
    ) -> Any:
        deadline = Deadline(seconds)
        request, leaves = call.request, call.leaves
        mine = None
        if difference is not None:
            options = self._options_in(difference.headers, request.root)
        elif not self._scatters_at_once:
            options = self._root_options(request, deadline)
        else:
            # Nobody knows who has guessed right, so the call is made as if all had.
            options = request.options
            sizes = options.get("sizes", ())
            # One array travels as what it is, several as bytes.
            alone = options.get("nesting") == 0
            dtype = dtypes.named(options["leaves"][0][0]) if alone else UINT8
            try:
                mine = self._scatter_bytes(request, dtype, leaves, sizes, None, deadline.left())
            except Disagreement as found_out:
                options = self._options_in(found_out.headers, request.root)
        scattered = self._allocate(_Scattered, options)
        count = len(scattered.dtypes)
        likes = call.likes if len(call.likes) == count else [*call.likes, call.like][:1] * count
        if mine is None:
            try:
                mine = self._scatter_known(scattered, request.root, leaves, likes, deadline)
            except Disagreement as found_out:
                self._mismatch(found_out.headers)
        found = self._assemble(
            "scatter", [mine], scattered.results(self.rank), likes, call.out, scattered.nesting,
            call.x,
        )  # fmt: skip
        if not leaves:
            self._settle("scatter", mine, deadline.left())
        return found

    def _scatter_known(
        self,
        scattered: _Scattered,
        root: int,
        leaves: Sequence[Leaf],
        likes: Sequence[Any],
        deadline: Deadline,
    ) -> Array:
        """Scatter what is known on all ranks by now; return this rank's bytes.

        Args:
            leaves: the root's; none elsewhere.
            likes: what this rank's results are to be like.
        """
        nbytes = scattered.nbytes(self.size)
        room = None
        if scattered.on_gpu:
            model = likes[0] if likes else None
            near = leaves[0].array if leaves else self._seen(model)
            room = self._room(self._adapter(model, True), nbytes[self.rank], near)
        agreed = Request("scatter", root=root, elements=nbytes, sizes=nbytes)
        return self._scatter_bytes(agreed, UINT8, leaves, scattered.sizes, room, deadline.left())

    def _scatter_request(
        self, root: int, axis: int, leaves: Sequence[Leaf], nesting: Any, counts: Any
    ) -> Request:
        """Return the root's call."""
        sizes = [split_sizes("scatter", leaf.rows.length, self.size, counts) for leaf in leaves]
        widths = [leaf.rows.inner * (leaf.dtype.itemsize if nesting else 1) for leaf in leaves]
        return Request(
            "scatter", root=root, axis=axis, nesting=nesting, sizes=sizes,
            leaves=[[leaf.dtype.name, *leaf.shape] for leaf in leaves],
            device=self._where(leaves[0].array) if leaves else None,
            elements=[sum(s[r] * w for s, w in zip(sizes, widths)) for r in range(self.size)],
        )  # fmt: skip

    def _scatter_bytes(
        self,
        request: Request,
        dtype: dtypes.DType,
        leaves: Sequence[Leaf],
        sizes: Sequence[Sequence[int]],
        room: Array | None,
        seconds: float,
    ) -> Array:
        """Scatter the bytes of the root's leaves; return this rank's.

        Args:
            dtype: of what the request counts.
            sizes: of each leaf, how many rows each rank gets.
            room: where this rank's go, or None.
        """
        src = None
        if self.rank == request.root:
            pieces = [
                leaf.rows.piece(cut, rank)
                for rank in range(self.size)
                for leaf, cut in zip(leaves, sizes)
            ]
            src = Buffer(bytes_of(pieces).view(dtype.storage), dtype)
        if room is None:
            room = self._allocate(Buffer.empty, request.elements[self.rank], dtype).array
        self._carry(self._planned(request), src, Buffer(room, dtype), seconds, alike=False)
        return room.view(np.uint8)

    def _plan_of_scatter(self, leaf: Leaf, root: int, out: Any) -> Planned | None:
        """Return the plan of a plain scatter of an array, or of one that ``out`` is a piece of."""
        key = "scatter", leaf.dtype, leaf.shape, root
        planned = self._plans.get(key)
        if planned is not None:
            return planned
        if self.rank == root:
            request: Request | None = self._scatter_request(root, 0, [leaf], 0, None)
        else:
            request = self._guessed(root, 0, out)
        return None if request is None else self._remember(key, self._planned(request))

    def _guessed(self, root: int, axis: int, out: Any) -> Request | None:
        """Return the root's call, if ``out`` is a piece of what it cuts evenly.

        Where that is so, comparing the calls is all that it takes to know what is scattered; where
        not, the ranks tell each other.
        """
        if out is None or not self._on_host or nested.is_tree(out):
            return None
        view = self._view("scatter", out)
        if not isinstance(view.array, np.ndarray) or not view.array.ndim:
            return None
        leaf = Leaf("scatter", view, axis)
        length = leaf.rows.length
        return Request(
            "scatter", root=root, axis=axis, nesting=0, sizes=[[length] * self.size],
            leaves=[[leaf.dtype.name, *leaf.rows.shape_with(length * self.size)]],
            elements=[leaf.rows.inner * length] * self.size,
        )  # fmt: skip

    def _root_options(self, request: Request, deadline: Deadline) -> dict[str, Any]:
        """Return the options of the root's call, which alone knows what is scattered."""
        root = request.root
        if not self._heads:
            headers = self._sizes(request, deadline.left())
            # If they are alike the others have guessed it.
            return request.options if headers is None else self._options_in(headers, root)
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

    def _options_in(self, headers: Sequence[Header], root: int) -> dict[str, Any]:
        """Return the options of the root's call, if the others' are only less of it."""
        for header in headers:
            if header["operation"] != "scatter" or header["options"].get("root") != root:
                self._mismatch(headers)
        if "leaves" not in headers[root]["options"]:
            self._mismatch(headers)
        return dict(headers[root]["options"])


class _ScatterCall(NamedTuple):
    """What one rank knows of a scatter.

    Attributes:
        request: the root's call; elsewhere what is known of it.
        leaves: what the root cuts; none elsewhere.
        x, out, like: as the caller has them.
        likes: what the results may be like.
    """

    request: Request
    leaves: list[Leaf]
    x: Any
    out: Any
    like: Any
    likes: list[Any]


class _Scattered:
    """What the root scatters, by the options of its call.

    Attributes:
        dtypes: of each leaf.
        sizes: of each leaf, how many rows each rank gets.
        nesting: of the structure; 0 for one array.
        on_gpu: whether it is in a GPU's memory.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.dtypes = [dtypes.named(name) for name, *_ in options["leaves"]]
        self.sizes: Sequence[Sequence[int]] = options["sizes"]
        self.nesting = options["nesting"]
        self.on_gpu = "device" in options
        # Of the shapes that the rows have at the root, of a byte each.
        self._models = [
            Rows("scatter", np.empty(shape, np.bool_), options["axis"])
            for _, *shape in options["leaves"]
        ]

    def nbytes(self, size: int) -> list[int]:
        """Return how many bytes each of ``size`` ranks gets, of all leaves together."""
        return [
            sum(
                rows[rank] * model.inner * dtype.itemsize
                for rows, model, dtype in zip(self.sizes, self._models, self.dtypes)
            )
            for rank in range(size)
        ]

    def results(self, rank: int) -> list[tuple[Rows, dtypes.DType, list[int]]]:
        """Return of each leaf what a rank's piece is put together by."""
        return [
            (model, dtype, [rows[rank]])
            for rows, model, dtype in zip(self.sizes, self._models, self.dtypes)
        ]
