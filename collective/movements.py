"""The calls that move: broadcast, scatter, gather, all_gather, all_to_all, barrier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from collective import dtypes, tree
from collective.arrays import Adapter, adapter_of
from collective.buffer import Buffer
from collective.call import Call, Disagreement
from collective.calls import Array, Calls, Output
from collective.dtypes import DType
from collective.errors import InvalidArgumentError, ShapeError
from collective.rows import Rows, check_counts, split_sizes

__all__ = ["Movements"]

Header = dict[str, Any]


class _Leaf:
    """One array of a call, as it is sent: its rows, and what its results are made with."""

    __slots__ = ("adapter", "dtype", "rows", "shape")

    def __init__(self, what: str, x: Any, axis: int) -> None:
        self.adapter: Adapter = adapter_of(x)
        array, self.dtype = self.adapter.view(x)
        self.shape = array.shape
        self.rows = Rows(what, array, axis)


class Movements(Calls):
    """The moving part of a communicator."""

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Wait until every rank has called it.

        Collective: every rank calls it.

        Raises:
            CollectiveTimeoutError, PeerLostError, PeerFailedError: somebody did not.

        See Also:
            MPI_Barrier.
        """
        call = self._plans.get("barrier") or self._remember("barrier", Call("barrier"))
        seconds = self._seconds(timeout)

        def run() -> None:
            self._collective(self._backend.barrier, call, call, seconds)

        return self._go("barrier", run, async_op)

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
            x: at the root, an array or a nested list, tuple or dict of arrays. Elsewhere
                an array of that shape and dtype, whose values do not matter and are not
                changed, or None.
            root: the rank whose array it is.
            out: where it goes; ``broadcast(w, out=w)`` works in place.
            like: where ``x`` is None, the framework of the result: its name, or an array.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            ``out`` if given; else, at the root ``x`` itself, elsewhere a new array.

        Raises:
            MismatchError: shapes, dtypes or roots differ; nothing was written.

        See Also:
            MPI_Bcast, ncclBroadcast.
        """
        again = ("broadcast", id(x), id(out), root)
        plain = timeout is None and not async_op and out is x
        kept = self._kept(again, x, out) if plain else None
        if kept is not None and self._lane.idle:
            self._known_at_root(kept[-1], lambda: (self._backend.broadcast, *kept, self.timeout),
                                self.timeout)  # fmt: skip
            return out
        root = self._rank("broadcast", "root", root)
        seconds = self._seconds(timeout)
        template = out if x is None and out is not None else x
        if template is None and self.rank == root:
            raise InvalidArgumentError(f"broadcast: the root passed None {self._who}.")
        if tree.is_tree(template):
            return self._broadcast_tree(x, template, root, out, seconds, async_op)
        if template is None:
            return self._go(
                "broadcast", lambda: self._broadcast_unknown(root, like, seconds), async_op
            )
        adapter = adapter_of(template)
        array, dtype = adapter.view(template)
        key = ("broadcast", dtype, array.shape, root)
        call = self._plans.get(key)
        if call is None:
            call = self._remember(key, Call("broadcast", dtype, array.shape, root=root))
        output: Output | None = None
        if self.rank != root or out is not None:
            output = Output("broadcast", out, adapter, array.shape, dtype)
        if self.rank == root:
            buffer = Buffer(array.ravel(), dtype)
        else:
            assert output is not None
            buffer = Buffer(output.flat, dtype)
        if plain:
            self._keep(again, x, out, buffer, buffer, buffer, root, call)

        def run() -> Any:
            self._known_at_root(
                call, lambda: (self._backend.broadcast, buffer, root, call, seconds), seconds
            )
            if output is None:
                return x
            if self.rank == root and out is not x:
                output.flat[:] = buffer.array
            return output.finish()

        return self._go("broadcast", run, async_op)

    def _broadcast_unknown(self, root: int, like: Any, seconds: float) -> Any:
        """Take part in a broadcast of which nothing is known here."""
        adapter = self._adapter(like)
        headers = self._sizes(Call("broadcast", root=root), seconds) or []
        header = self._root_header(headers, root)
        dtype, shape = dtypes.named(header["dtype"]), tuple(header["shape"])
        if "nesting" in header["options"]:
            self._mismatch(headers)
        output = Output("broadcast", None, adapter, shape, dtype)
        buffer = Buffer(output.flat, dtype)
        call = Call("broadcast", dtype, shape, root=root)
        self._transport(self._backend.broadcast, buffer, root, call, seconds)
        return output.finish()

    def _known_at_root(
        self, call: Call, prepared: Callable[[], tuple[Any, ...]], seconds: float
    ) -> None:
        """Make a rooted call; ranks that passed None may differ from the root in the rest."""
        try:
            if self._agree_sizes:
                self._transport(self._backend.agree, call, seconds)
            self._transport(*prepared())
        except Disagreement as difference:
            self._root_header(difference.headers, call.options["root"])
            self._transport(*prepared())

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
        leaves = tree.flatten(template)
        adapters = [adapter_of(leaf) for leaf in leaves]
        views = [adapter.view(leaf) for adapter, leaf in zip(adapters, leaves)]
        nesting = tree.skeleton(template)
        shapes = [[dtype.name, *array.shape] for array, dtype in views]
        outputs: list[Output] | None = None
        if self.rank != root or out is not None:
            if out is not None and tree.skeleton(out) != nesting:
                raise InvalidArgumentError(
                    f"broadcast: out is nested differently from the input {self._who}."
                )
            outs = [None] * len(leaves) if out is None else tree.flatten(out)
            outputs = [
                Output("broadcast", given, adapter, array.shape, dtype)
                for given, adapter, (array, dtype) in zip(outs, adapters, views)
            ]
        nbytes = sum(array.nbytes for array, _ in views)
        call = Call("broadcast", _UINT8, (nbytes,), root=root, leaves=shapes, nesting=nesting)

        def run() -> Any:
            packed = Buffer.empty(nbytes, _UINT8)
            if self.rank == root:
                _pack([array.ravel() for array, _ in views], packed.array)
            self._collective(self._backend.broadcast, call, packed, root, call, seconds)
            if outputs is None:
                return x
            _unpack(packed.array, [output.flat for output in outputs])
            return tree.rebuild(template, iter([output.finish() for output in outputs]))

        return self._go("broadcast", run, async_op)

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
        leaves: list[_Leaf] = []
        nesting: Any = 0
        if self.rank == root:
            if x is None:
                raise InvalidArgumentError(f"scatter: the root passed None {self._who}.")
            nesting = tree.skeleton(x)
            leaves = [_Leaf(what, leaf, axis) for leaf in tree.flatten(x)]
            sizes = [split_sizes(what, leaf.rows.length, self.size, counts) for leaf in leaves]
            call = Call(
                what, root=root, axis=axis, nesting=nesting, sizes=sizes,
                leaves=[[leaf.dtype.name, *leaf.shape] for leaf in leaves],
            )  # fmt: skip
        else:
            call = Call(what, root=root)
        chosen = out if out is not None else x if x is not None else like
        likes = tree.flatten(chosen) if tree.is_tree(chosen) else [chosen]

        def run() -> Any:
            headers = self._sizes(call, seconds)
            options = call.options if headers is None else headers[root]["options"]
            for header in headers or ():
                if header["operation"] != what or header["options"].get("root") != root:
                    self._mismatch(headers or ())
            if "leaves" not in options:
                self._mismatch(headers or ())
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
                    _packed(
                        [
                            leaf.rows.piece(cut, rank)
                            for rank in range(self.size)
                            for leaf, cut in zip(leaves, sizes)
                        ]
                    ),
                    _UINT8,
                )
            mine = Buffer.empty(nbytes[self.rank], _UINT8)
            agreed = Call(what, root=root, sizes=nbytes)
            self._transport(self._backend.scatter, packed, mine, nbytes, root, agreed, seconds)
            results = [(m, d, [s[self.rank]]) for s, m, d in zip(sizes, models, names)]
            kept = likes if len(likes) == len(names) else [likes[0]] * len(names)
            return self._assemble(what, [mine.array], results, kept, out, options["nesting"], x)

        return self._go(what, run, async_op)

    def gather(
        self,
        x: Any,
        *,
        root: int = 0,
        counts: Sequence[int] | None = None,
        axis: int = 0,
        out: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Join the ranks' arrays along an axis, in rank order, at ``root``.

        Collective: every rank calls it, with one root, dtype and axis; shapes may differ
        along the axis.

        Args:
            x: an array, or a nested list, tuple or dict of arrays.
            root: the rank that gets the result.
            counts: the ranks' lengths along ``axis``, where all ranks know them: spares
                the exchange of shapes.
            axis: the axis to join along; a 0-d array counts as one of length 1.
            out: at the root, where the result goes.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            At the root ``out`` or a new array; None elsewhere.

        Raises:
            ShapeError: ``out`` does not fit (after the call; nothing is written).
            MismatchError: dtypes, other axes, roots or nestings differ.

        See Also:
            MPI_Gatherv.
        """
        root = self._rank("gather", "root", root)
        out = out if self.rank == root else None
        return self._collect("gather", x, root, counts, axis, out, timeout, async_op)

    def all_gather(
        self,
        x: Any,
        *,
        counts: Sequence[int] | None = None,
        axis: int = 0,
        out: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Join the ranks' arrays along an axis, in rank order, at every rank.

        Collective: as :meth:`gather`, without a root.

        Args:
            x, counts, axis, out, timeout, async_op: as in :meth:`gather`.

        Returns:
            ``out`` or a new array.

        Raises:
            As :meth:`gather`.

        See Also:
            MPI_Allgatherv, ncclAllGather.
        """
        return self._collect("all_gather", x, None, counts, axis, out, timeout, async_op)

    def _collect(
        self,
        what: str,
        x: Any,
        root: int | None,
        counts: Sequence[int] | None,
        axis: int,
        out: Any,
        timeout: float | None,
        async_op: bool,
    ) -> Any:
        method = self._backend.all_gather if root is None else self._backend.gather
        again = (what, id(x), id(out), root)
        plain = timeout is None and axis == 0 and counts is None and not async_op
        plain = plain and not self._agree_sizes and out is not None
        kept = self._kept(again, x, out) if plain else None
        differ: list[Header] | None = None
        if kept is not None and self._lane.idle:
            try:
                self._transport(method, *kept, self.timeout)
                return out
            except Disagreement as difference:
                differ = difference.headers
        seconds = self._seconds(timeout)
        nesting = tree.skeleton(x)
        leaves = [_Leaf(what, leaf, axis) for leaf in tree.flatten(x)]
        receives = root is None or root == self.rank
        known: list[list[int]] | None = None
        if counts is not None:
            lengths = check_counts(what, counts, self.size)
            for leaf in leaves:
                if leaf.rows.length != lengths[self.rank]:
                    raise ShapeError(
                        f"{what}: counts give rank {self.rank} {lengths[self.rank]} rows; its "
                        f"array has {leaf.rows.length} {self._who}."
                    )
            known = [lengths] * len(leaves)
        call = self._piece_call(what, leaves, nesting, root, axis, counts)

        def send(rows: list[list[int]], agreed: Call) -> Any:
            """Move the pieces, knowing how many rows of each leaf each rank has."""
            ends = (agreed, seconds) if root is None else (root, agreed, seconds)
            if nesting == 0:
                elements = [length * leaves[0].rows.inner for length in rows[0]]
                return self._move_one(
                    what, method, leaves[0], sum(rows[0]), sum(elements[: self.rank]), receives,
                    out, (elements, *ends), (again, x) if plain and agreed is call else None,
                )  # fmt: skip
            nbytes = [
                sum(r[k] * leaf.rows.inner * leaf.dtype.itemsize for r, leaf in zip(rows, leaves))
                for k in range(self.size)
            ]
            src = Buffer(_packed([leaf.rows.array.ravel() for leaf in leaves]), _UINT8)
            dst = Buffer.empty(sum(nbytes), _UINT8) if receives else None
            self._transport(method, src, dst, nbytes, *ends)
            if dst is None:
                return None
            parts = np.split(dst.array, list(accumulate(nbytes))[:-1])
            results = [(leaf.rows, leaf.dtype, r) for leaf, r in zip(leaves, rows)]
            return self._assemble(what, parts, results, tree.flatten(x), out, nesting, x)

        def run() -> Any:
            even = known or [[leaf.rows.length] * self.size for leaf in leaves]
            headers = differ
            if headers is None:
                try:
                    if self._agree_first or (self._agree_sizes and known is None):
                        self._transport(self._backend.agree, call, seconds)
                    return send(even, call)
                except Disagreement as difference:
                    headers = difference.headers
            if known is not None:
                self._mismatch(headers)
            rows = self._rows_of(headers, len(leaves))
            return send(rows, Call(what, sizes=rows, root=root))

        return self._go(what, run, async_op)

    def _move_one(
        self,
        what: str,
        method: Any,
        leaf: _Leaf,
        total: int,
        at: int | None,
        receives: bool,
        out: Any,
        rest: tuple[Any, ...],
        again: tuple[Any, Any] | None,
    ) -> Any:
        """Move one array, straight from where it is and to where it goes.

        Args:
            total: rows of the result.
            at: where this rank's own piece is in the result, if the call may be in place.
            rest: what the transport wants to know besides the buffers.
            again: the key under which to keep the call, and x.
        """
        rows, dtype = leaf.rows, leaf.dtype
        fits: Exception | None = None
        output = None
        if receives:
            shape = rows.shape_with(total)
            try:
                output = Output(what, out, leaf.adapter, shape, dtype)
            except (ShapeError, InvalidArgumentError) as error:
                # The peers are already on their way: go with them, and raise afterwards.
                fits = error
                output = Output(what, None, leaf.adapter, shape, dtype)
        src = rows.array.ravel()
        dst = None
        if output is not None:
            target = rows.target(output.flat, total)
            if np.may_share_memory(src, target) and (
                at is None or not _same(src, target[at : at + src.size])
            ):
                src = src.copy()
            dst = Buffer(target, dtype)
        source = Buffer(src, dtype)
        if again is not None and dst is not None and fits is None:
            self._keep(*again, out, source, dst, source, dst, *rest[:-1])
        self._transport(method, source, dst, *rest)
        if fits is not None:
            raise fits
        if output is None:
            return None
        rows.restore(target, output.flat, total)
        return output.finish()

    def all_to_all(
        self,
        x: Any,
        *,
        counts: Sequence[int] | None = None,
        axis: int = 0,
        out: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Cut every rank's array into pieces, send piece ``j`` to rank ``j``, join what comes.

        Collective: every rank calls it, with one dtype and axis; shapes may differ along
        the axis.

        Args:
            x: an array, or a nested list, tuple or dict of arrays, each of which is cut.
            counts: lengths of the pieces that this rank sends; ranks may differ. By
                default as ``numpy.array_split`` cuts.
            axis: the axis to cut and to join along.
            out: where the result goes; may not be ``x``.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            The pieces for this rank, in the order of their senders, as ``out`` or a new
            array.

        Raises:
            ShapeError: the counts do not add up to the axis (before anything is sent), or
                ``out`` does not fit (after the call; nothing is written).
            MismatchError: dtypes, other axes or nestings differ.

        See Also:
            MPI_Alltoallv, ncclAlltoAll.
        """
        what, method = "all_to_all", self._backend.all_to_all
        again = (what, id(x), id(out))
        plain = timeout is None and axis == 0 and counts is None and not async_op
        plain = plain and not self._agree_sizes and out is not None
        kept = self._kept(again, x, out) if plain else None
        differ: list[Header] | None = None
        if kept is not None and self._lane.idle:
            try:
                self._transport(method, *kept, self.timeout)
                return out
            except Disagreement as difference:
                differ = difference.headers
        seconds = self._seconds(timeout)
        nesting = tree.skeleton(x)
        leaves = [_Leaf(what, leaf, axis) for leaf in tree.flatten(x)]
        sends = [split_sizes(what, leaf.rows.length, self.size, counts) for leaf in leaves]
        call = self._piece_call(what, leaves, nesting, None, axis, None, sends)

        def run() -> Any:
            # What a rank receives is written in the others' headers, or like its own.
            headers = differ
            if headers is None:
                try:
                    if self._agree_sizes:
                        self._transport(self._backend.agree, call, seconds)
                    return send([[s[self.rank]] * self.size for s in sends], call)
                except Disagreement as difference:
                    headers = difference.headers
            self._rows_of(headers, len(leaves))
            table = [header["options"]["sizes"] for header in headers]
            receives = [
                [table[rank][k][self.rank] for rank in range(self.size)] for k in range(len(leaves))
            ]
            return send(receives, Call(what, sizes=table))

        def send(receives: list[list[int]], agreed: Call) -> Any:
            if nesting == 0:
                inner = leaves[0].rows.inner
                elements = tuple([n * inner for n in c[0]] for c in (sends, receives))
                return self._move_one(
                    what, method, leaves[0], sum(receives[0]), None, True, out,
                    (*elements, agreed, seconds), (again, x) if plain and agreed is call else None,
                )  # fmt: skip
            to, coming = (
                [
                    sum(n[r] * leaf.rows.inner * leaf.dtype.itemsize
                        for n, leaf in zip(counts, leaves))
                    for r in range(self.size)
                ]
                for counts in (sends, receives)
            )  # fmt: skip
            source = _packed(
                [
                    leaf.rows.piece(cut, rank)
                    for rank in range(self.size)
                    for leaf, cut in zip(leaves, sends)
                ]
            )
            dst = Buffer.empty(sum(coming), _UINT8)
            self._transport(method, Buffer(source, _UINT8), dst, to, coming, agreed, seconds)
            parts = np.split(dst.array, list(accumulate(coming))[:-1])
            results = [(leaf.rows, leaf.dtype, r) for leaf, r in zip(leaves, receives)]
            return self._assemble(what, parts, results, tree.flatten(x), out, nesting, x)

        return self._go(what, run, async_op)

    # -- shared ---------------------------------------------------------------------------

    def _piece_call(
        self,
        what: str,
        leaves: list[_Leaf],
        nesting: Any,
        root: int | None,
        axis: int,
        counts: Sequence[int] | None,
        sizes: list[list[int]] | None = None,
    ) -> Call:
        """Return the call of pieces whose lengths along ``axis`` may differ."""
        fixed = counts is not None
        shapes = tuple((leaf.dtype, leaf.rows.shape_with(-1 if fixed else leaf.rows.length))
                       for leaf in leaves)  # fmt: skip
        key = (what, shapes, str(nesting), root, axis, str(counts), str(sizes))
        call = self._plans.get(key)
        if call is None:
            options: dict[str, Any] = {"root": root, "axis": axis or None, "sizes": sizes}
            options["counts"] = None if counts is None else list(map(int, counts))
            if nesting == 0:
                (dtype, shape), *_ = shapes
                call = Call(what, dtype, shape, **options)
            else:
                names = [[dtype.name, *shape] for dtype, shape in shapes]
                call = Call(what, leaves=names, nesting=nesting, **options)
            self._remember(key, call)
        return call

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
        results: Sequence[tuple[Rows, DType, list[int]]],
        likes: Sequence[Any],
        out: Any,
        nesting: Any,
        template: Any,
    ) -> Any:
        """Turn bytes, a part a sender with its rows of each leaf in turn, into arrays."""
        positions = [0] * len(parts)
        outs: list[Any] = [None] * len(results)
        if out is not None:
            if tree.skeleton(out) != nesting:
                raise InvalidArgumentError(
                    f"{what}: out is nested differently from the result {self._who}."
                )
            outs = tree.flatten(out)
        finished = []
        for (rows, dtype, lengths), like, given in zip(results, likes, outs):
            pieces = []
            for k, (part, length) in enumerate(zip(parts, lengths)):
                nbytes = length * rows.inner * dtype.itemsize
                pieces.append(part[positions[k] : positions[k] + nbytes])
                positions[k] += nbytes
            raw = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            if positions[0] % dtype.itemsize or not raw.flags.aligned or raw.ctypes.data % 16:
                raw = raw.copy()
            total = sum(lengths)
            adapter = self._adapter(given if like is None and given is not None else like)
            output = Output(what, given, adapter, rows.shape_with(total), dtype)
            rows.restore(raw.view(dtype.storage), output.flat, total)
            finished.append(output.finish())
        if nesting == 0:
            return finished[0]
        return tree.rebuild(nesting if template is None else template, iter(finished))


_UINT8 = dtypes.BY_NAME["uint8"]


def _packed(arrays: Sequence[Array]) -> Array:
    """Return the bytes of the arrays, one after the other."""
    packed = np.empty(sum(array.nbytes for array in arrays), np.uint8)
    _pack(arrays, packed)
    return packed


def _pack(arrays: Sequence[Array], packed: Array) -> None:
    start = 0
    for array in arrays:
        packed[start : start + array.nbytes] = array.view(np.uint8)
        start += array.nbytes


def _unpack(packed: Array, arrays: Sequence[Array]) -> None:
    start = 0
    for array in arrays:
        array.view(np.uint8)[:] = packed[start : start + array.nbytes]
        start += array.nbytes


def _same(a: Array, b: Array) -> bool:
    return bool(a.__array_interface__["data"] == b.__array_interface__["data"])
