"""Call ``scatter``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.algorithms.pieces import split_sizes
from collective.deadline import Deadline
from collective.errors import InvalidArgumentError
from collective.memory import dtypes, nested
from collective.memory.buffer import Buffer
from collective.request import Disagreement, Request

from ..path import Path
from ..streams import nearest, settle
from .call import Call, Header, Planned
from .gathering import assemble
from .views import (
    UINT8,
    Array,
    Leaf,
    View,
    adapter_for,
    bytes_of,
    device_view,
    elements_of,
    room_on_gpu,
    view,
    views,
    where,
)


class Scatter(Call):
    """See :meth:`Communicator.scatter`.

    Only the root knows the shape and dtype of the array. If the transport compares calls by itself
    and memory is shared, the call is made at once, as if the other ranks had guessed the root's
    call from their ``out``. If a rank has not, all ranks continue with the root's header. On other
    transports the ranks compare their calls first.
    """

    operation = "scatter"
    rooted = True
    root: int

    def __init__(self, path: Path, x: Any = None, **arguments: Any) -> None:
        super().__init__(path, x, **arguments)
        self._states = path.expects is not None
        self._object = self.hosted == "object" or None

    def plan_for_c(self) -> Planned | None:
        path = self.path
        at_root = path.rank == self.root
        known = Leaf(self.operation, view(path, self.operation, self.x if at_root else self.out), 0)
        key = self.operation, known.dtype, known.shape, self.root
        planned = path.plans.get(key)
        if planned is not None:
            return planned
        request = self._root_request([known], 0) if at_root else self._guessed_request()
        return None if request is None else path.remember(key, path.planned(request))

    def prepare(self) -> Call:
        path = self.path
        self._leaves: list[Leaf] = []
        if path.rank == self.root:
            if self.x is None:
                raise InvalidArgumentError(
                    f"scatter: the root passed None {path.who}. Pass an array there."
                )
            seen = views(path, self.operation, self.x, self.hosted)
            self._leaves = [Leaf(self.operation, leaf, self.axis) for leaf in seen]
            self._request = self._root_request(self._leaves, nested.skeleton(self.x))
        else:
            adapter_for(self.like)
            self._request = self._guessed_request() or Request(
                self.operation, root=self.root, elements=[0] * path.size, object=self._object
            )
        self.run_by(nearest(self._leaves))
        return self

    def run(self, deadline: Deadline) -> Any:
        if not self.path.scatters_at_once:
            return self._scatter_known(self._options_of_root(deadline), deadline)
        # No rank knows whether the others have guessed the root's call, so the call is made as if
        # all had. One array is sent with its dtype, several arrays as bytes.
        options = self._request.options
        alone = options.get("nesting") == 0
        dtype = dtypes.named(options["leaves"][0][0]) if alone else UINT8
        piece = self._move(self._request, dtype, options.get("sizes", ()), None, deadline)
        return self._result(options, self.path.allocate(_leaves_in, options), piece, deadline)

    def recover(self, headers: Sequence[Header], deadline: Deadline) -> Any:
        return self._scatter_known(self._options_in(headers), deadline)

    def _scatter_known(self, options: dict[str, Any], deadline: Deadline) -> Any:
        """Scatter arrays that all ranks know by now; return this rank's result.

        Args:
            options: options of the root's call.
        """
        path = self.path
        leaves = path.allocate(_leaves_in, options)
        nbytes = elements_of(leaves, options["sizes"], path.size, in_bytes=True)
        room = None
        if "device" in options:
            models = self._likes(len(leaves))
            model = models[0] if models else None
            near = self._leaves[0].array if self._leaves else device_view(model)
            room = room_on_gpu(path, adapter_for(model, True), nbytes[path.rank], near)
        # The option sizes has the name of the numbers of rows in the first request, but here it has
        # bytes: dtypes and axes are settled.
        request = Request(self.operation, root=self.root, elements=nbytes, sizes=nbytes)
        try:
            piece = self._move(request, UINT8, options["sizes"], room, deadline)
        except Disagreement as difference:
            # The ranks have agreed once. A second difference means that one rank has moved on to
            # another call. Break the cycle exception → traceback → frame → exception.
            difference.__traceback__ = None
            headers = difference.headers
        else:
            return self._result(options, leaves, piece, deadline)
        path.raise_mismatch(headers)

    def _move(
        self, request: Request, dtype: dtypes.DType, rows: Sequence[Sequence[int]],
        room: Array | None, deadline: Deadline,
    ) -> Array:  # fmt: skip
        """Scatter the bytes of the root's leaves; return this rank's bytes.

        Args:
            dtype: dtype of the elements that the request counts.
            rows: for each leaf, the number of rows that each rank gets.
            room: memory that receives this rank's bytes; None to allocate it.
        """
        path, src = self.path, None
        if path.rank == self.root:
            if len(self._leaves) == 1:
                raw = self._leaves[0].array.ravel().view(np.uint8)  # the pieces, in rank order
            else:
                pieces = [
                    leaf.piece(cut, rank)
                    for rank in range(path.size)
                    for leaf, cut in zip(self._leaves, rows)
                ]
                raw = bytes_of(pieces)
            src = Buffer(raw.view(dtype.storage), dtype)
        if room is None:
            room = path.allocate(Buffer.empty, request.elements[path.rank], dtype).array
        path.carry(path.planned(request), src, Buffer(room, dtype), deadline)
        return room.view(np.uint8)

    def _result(
        self, options: dict[str, Any], leaves: Sequence[Leaf], piece: Array, deadline: Deadline
    ) -> Any:
        """Return this rank's piece in the form that the caller requested."""
        rows = [[cut[self.path.rank]] for cut in options["sizes"]]
        result = assemble(
            self.operation, [piece], leaves, rows, self._likes(len(leaves)), self.out,
            options["nesting"], self.x, self.path.who,
        )  # fmt: skip
        if not self._leaves:
            settle(self.path, self.operation, piece, deadline)
        return result

    def _likes(self, count: int) -> list[Any]:
        """Return the model of each of ``count`` leaves of the result."""
        model = self.out if self.out is not None else self.x if self.x is not None else self.like
        likes = nested.flatten(model) if nested.is_tree(model) else [model]
        return likes if len(likes) == count else [*likes, self.like][:1] * count

    # -- the root's call -------------------------------------------------------------------

    def _root_request(self, leaves: Sequence[Leaf], nesting: Any) -> Request:
        """Return the request of the root's call."""
        path = self.path
        rows = [split_sizes(self.operation, leaf.length, path.size, self.counts) for leaf in leaves]
        return Request(
            self.operation, root=self.root, axis=self.axis, nesting=nesting, sizes=rows,
            object=self._object,
            leaves=[[leaf.dtype.name, *leaf.shape] for leaf in leaves],
            device=where(path, leaves[0].array) if leaves else None,
            elements=elements_of(leaves, rows, path.size, in_bytes=nesting != 0),
        )  # fmt: skip

    def _guessed_request(self) -> Request | None:
        """Return a guess of the root's request: that the root cuts evenly, in pieces like ``out``.

        If the guess is right, comparing the calls is enough for this rank to know the root's array.
        If the guess is wrong, the ranks exchange their headers. Return None if ``out`` does not
        allow a guess.
        """
        path, out = self.path, self.out
        if out is None or not (path.on_host or self.hosted) or nested.is_tree(out):
            return None
        seen = view(path, self.operation, out, self.hosted)
        if not isinstance(seen.array, np.ndarray) or not seen.array.ndim:
            return None
        leaf = Leaf(self.operation, seen, self.axis)
        length = leaf.length
        return Request(
            self.operation, root=self.root, axis=self.axis, nesting=0,
            sizes=[[length] * path.size],
            leaves=[[leaf.dtype.name, *leaf.shape_with(length * path.size)]],
            elements=[leaf.inner * length] * path.size,
        )  # fmt: skip

    def _options_of_root(self, deadline: Deadline) -> dict[str, Any]:
        """Compare the ranks' calls; return the options of the root's call."""
        request = self._request
        headers = self.path.headers_if_different(request, deadline)
        # If the calls are equal, the other ranks have guessed the root's call.
        return request.options if headers is None else self._options_in(headers)

    @staticmethod
    def _fits(options: dict[str, Any], header: Header, rank: int) -> bool:
        """Return whether the ``out`` in a rank's header is like the piece that the root sends."""
        guess = header["options"]
        if "leaves" not in guess:
            return True  # an array on a GPU, whose length is checked afterwards
        return bool(
            guess["leaves"][0][0] == options["leaves"][0][0]
            and guess["sizes"][0][rank] == options["sizes"][0][rank]
        )

    def _options_in(self, headers: Sequence[Header]) -> dict[str, Any]:
        """Return the options of the root's call, which the other ranks may know only in part.

        Raises:
            MismatchError: a rank makes another call, names another root, or states another piece.
        """
        for header in headers:
            options, wanted = header["options"], (self.root, self._object)
            agreed = (options.get("root"), options.get("object")) == wanted
            if header["operation"] != "scatter" or not agreed:
                self.path.raise_mismatch(headers)
        options = dict(headers[self.root]["options"])
        if "leaves" not in options:
            self.path.raise_mismatch(headers)
        if self._states and not all(
            self._fits(options, header, rank)
            for rank, header in enumerate(headers)
            if rank != self.root
        ):
            self.path.raise_mismatch(headers)
        return options


def _leaves_in(options: dict[str, Any]) -> list[Leaf]:
    """Return leaves like those that the root scatters, from the options of its call.

    Only their dtypes and the shapes of their rows are used: their elements are single bytes.
    """
    return [
        Leaf(
            "scatter", View(adapter_for(None), np.empty(shape, np.bool_), dtypes.named(name)),
            options["axis"],
        )
        for name, *shape in options["leaves"]
    ]  # fmt: skip
