"""Gradients of a data-parallel model, reduced in buckets while later ones are still computed.

The engine is independent of frameworks. An adapter passes it the parameters and lets the framework
write gradients to the arrays of :attr:`Gradients.views`. The adapter reports each complete
gradient by :meth:`~Gradients.ready`, and calls :meth:`~Gradients.finish` at the end of the
backward pass. The bucketing is that of Li et al., "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from collective import trace
from collective.contract.process import NotCopied
from collective.errors import (
    CollectiveError,
    GradientError,
    InvalidArgumentError,
)
from collective.memory.dtypes import named

from .replicas import few, refuse_differences
from .shares import Rebindable

if TYPE_CHECKING:
    from collective.communicator import Communicator
    from collective.contract.work import Work


class Parameter(NamedTuple):
    """Description of one parameter, as far as the engine needs it.

    Attributes:
        name: the name that errors print.
        shape: shape of its gradient.
        dtype: name of its gradient's type, such as ``"float32"``.
        axes: axes in the order of the gradient's memory, the last one contiguous; empty: C order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[int, ...] = ()

    @property
    def layout(self) -> list[str]:
        """Name and text of all that the ranks must have in common: buckets are folded in order."""
        order = f" with axes in the order {list(self.axes)}" if self.axes else ""
        return [self.name, f"{self.dtype}{list(self.shape)}{order}"]

    def view(self, memory: Any) -> Any:
        """Return the gradient that an array of one dimension holds."""
        if not self.axes:
            return memory.reshape(self.shape)
        stored = memory.reshape([self.shape[axis] for axis in self.axes])
        places = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        return stored.permute(places) if hasattr(stored, "permute") else stored.transpose(places)


@dataclass
class Bucket:
    """Gradients that are reduced together.

    Attributes:
        index: position in the order in which buckets are reduced; the same on all ranks.
        array: memory of the gradients, one-dimensional, an array of the framework. Gaps between
            gradients hold zeros.
        members: numbers of the parameters whose gradients the bucket holds.
        views: gradients in the bucket, one for each member.
        is_last: whether it is the last bucket of a backward pass.
        pending: number of gradients that the pass has not completed yet.
    """

    index: int
    array: Any
    members: list[int]
    views: list[Any]
    is_last: bool = False
    pending: int = field(default=0, repr=False)


#: Starts the reduction of a bucket, in place. Returns the work to wait for, or None if the
#: reduction is already complete.
Reduce = Callable[["Bucket"], "Work[Any] | None"]


# Size of the first bucket, in bytes.
_FIRST = 1 << 20
# Alignment of each gradient in its bucket, in bytes: a cache line, for vector instructions.
_ALIGNMENT = 64


class Gradients(NotCopied):
    """Gradients of one model on one rank.

    All ranks of the communicator make it, with the same parameters in the same order. A bucket is
    reduced as soon as it is full and the reductions of all earlier buckets have started. So all
    ranks reduce in the same order, in whatever order gradients arrive. The last bucket is reduced
    only in :meth:`finish` (or :meth:`shadow`). After the first pass the buckets are laid out again,
    once, in the order of arrival on rank 0.

    Args:
        comm: communicator that connects the ranks. The constructor, :meth:`ready`, :meth:`finish`,
            :meth:`shadow` and :meth:`rebind` use it, in the thread that calls them.
        parameters: parameters in the order in which their gradients are expected to arrive.
        like: framework of the memory; see :meth:`Communicator.empty`.
        bucket_bytes: approximate size of a bucket.
        first_bytes: approximate size of the first bucket, whose reduction should start early. A
            value above ``bucket_bytes`` counts as ``bucket_bytes``. The default is 1 MiB. On ranks
            of one host with less than two cores each, no idle core could reduce the bucket
            meanwhile, and the default is ``bucket_bytes``.
        reduce: function that reduces a full bucket; by default the average over the ranks.
        counts: whether a gradient may be ready several times in a pass, equally often in every
            pass. The engine counts these times in the first pass, and reduces the buckets of that
            pass only at its end.

    Attributes:
        views: arrays for the gradients, by the parameters' numbers. Other arrays replace them when
            the buckets are laid out again: see ``moved``.
        moved: function without arguments that is called after the buckets have been laid out again.
            The contents of the old ``views`` have then been copied to the new ones.
        begun: whether a backward pass has begun with its first :meth:`ready`, and is not finished.

    Raises:
        MismatchError: the ranks' parameters differ.
        AllocationError: some rank has no memory for them.
    """

    instead = "Make another one, on all ranks, for the parameters of the copy."

    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[Parameter],
        *,
        like: Any = None,
        bucket_bytes: int = 25 << 20,
        first_bytes: int | None = None,
        reduce: Reduce | None = None,
        counts: bool = False,
    ) -> None:
        for name, value in (("bucket_bytes", bucket_bytes), ("first_bytes", first_bytes)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidArgumentError(
                    f"Gradients: {name} is {value!r} (expected a positive integer)."
                )
        self.comm = comm
        self.parameters = list(parameters)
        self._reduce = reduce
        self.moved: Callable[[], object] = lambda: None
        self.views: list[Any] = [None] * len(self.parameters)
        self.buckets: list[Bucket] = []
        self._like = like
        self._bytes = first_bytes, bucket_bytes
        self._bucket_of: list[Bucket] = []
        # How often each gradient is ready in a pass; None if `counts` is false.
        self._uses: list[int] | None = [0] * len(self.parameters) if counts else None
        self._begin_over()

    def _begin_over(self) -> None:
        """Lay out the buckets over the communicator, as before the first pass."""
        mine = [parameter.layout for parameter in self.parameters]
        # Ranks that are bound to cores have different ones.
        replies = self.comm.all_gather_object((mine, sorted(os.sched_getaffinity(0))))
        every = [parameters for parameters, _ in replies]
        remedy = "Make the same model on every rank, with the same parameters frozen."
        refuse_differences("gradients", "parameters", every, self.comm, remedy)
        first, limit = self._bytes
        if first is None:
            cores = {core for _, usable in replies for core in usable}
            first = _FIRST if _overlaps(self.comm, len(cores)) else limit
        self._limits = min(first, limit), limit
        self._slabs = self._allocate()
        self._reordered = False
        if self._uses is not None:
            self._uses = [0] * len(self.parameters)
        self._lay_out(range(len(self.parameters)))
        self.begun = False
        self._arrived: list[int] = []
        self._left: list[int] = []
        self._next = 0
        self._works: list[Work[Any]] = []

    def rebind(self, comm: Communicator) -> None:
        """Continue over another communicator, with new memory and new buckets.

        The old gradients are lost: the adapter takes the new arrays from :attr:`views`, and calls
        neither :meth:`ready` nor :meth:`finish` for a pass that had begun. If ``reduce`` has a
        method ``rebind``, it gets a duplicate of the communicator. Any other ``reduce`` must
        change its communicator itself.

        Collective: every rank of ``comm`` calls it.

        Raises:
            MismatchError: the ranks' parameters differ.
        """
        for work in self._works:
            with contextlib.suppress(CollectiveError):  # the old communicator is broken
                work.wait()
        self.comm = comm
        if isinstance(self._reduce, Rebindable):
            self._reduce.rebind(comm.dup())
        self._begin_over()

    # -- memory ---------------------------------------------------------------------------

    def _extents(self, number: int) -> tuple[int, int]:
        """Return a gradient's number of elements, and the number that it occupies in its bucket."""
        parameter = self.parameters[number]
        count, unit = math.prod(parameter.shape), _ALIGNMENT // named(parameter.dtype).itemsize
        return count, -(-count // unit) * unit

    def _allocate(self) -> dict[str, Any]:
        """Return one array for all gradients of each dtype."""
        lengths: dict[str, int] = {}
        for number, parameter in enumerate(self.parameters):
            lengths[parameter.dtype] = lengths.get(parameter.dtype, 0) + self._extents(number)[1]
        slabs = {}
        for dtype, length in lengths.items():
            slabs[dtype] = slab = self.comm.empty(length, dtype, like=self._like)
            # The gaps between gradients are zeroed, too: they are reduced with the bucket, and a
            # `reduce` that compresses reads them.
            slab[...] = 0
        return slabs

    def _lay_out(self, order: Sequence[int]) -> None:
        """Lay out the buckets, and the gradients in them, in the given order of arrival."""
        first, limit = self._limits
        used = dict.fromkeys(self._slabs, 0)
        open_: dict[str, list[int]] = {}
        taken = dict.fromkeys(self._slabs, 0)  # bytes in the open bucket of each dtype
        placed: list[tuple[int, int]] = [(0, 0)] * len(self.parameters)
        closed: list[list[int]] = []
        for number in order:
            dtype = self.parameters[number].dtype
            count, extent = self._extents(number)
            nbytes = extent * named(dtype).itemsize
            if taken[dtype] and taken[dtype] + nbytes > (limit if closed else first):
                closed.append(open_.pop(dtype))
                taken[dtype] = 0
            open_.setdefault(dtype, []).append(number)
            placed[number] = used[dtype], count
            used[dtype] += extent
            taken[dtype] += nbytes
        closed += open_.values()
        self.buckets = []
        self._bucket_of = [None] * len(self.parameters)  # type: ignore[list-item]  # filled below
        for index, members in enumerate(closed):
            slab = self._slabs[self.parameters[members[0]].dtype]
            start = placed[members[0]][0]
            stop = placed[members[-1]][0] + self._extents(members[-1])[1]
            for number in members:
                at, count = placed[number]
                self.views[number] = self.parameters[number].view(slab[at : at + count])
            views = [self.views[number] for number in members]
            last = index == len(closed) - 1
            bucket = Bucket(index, slab[start:stop], members, views, last)
            self.buckets.append(bucket)
            for number in members:
                self._bucket_of[number] = bucket

    def _reorder_buckets(self) -> None:
        """Lay out the buckets in rank 0's order of arrival, if that order differs from the present.

        Gradients arrive in about the same order in all passes. A bucket of gradients that arrive
        one after the other is full early, and is reduced while later gradients are still computed.
        """
        # All ranks use the order of one rank. Gradients that arrive at about the same time may
        # arrive in another order on another rank. But buckets are folded elementwise, so that all
        # ranks need the same layout.
        self._reordered = True
        seen = set(self._arrived)
        late = [number for number in range(len(self.parameters)) if number not in seen]
        order: list[int] = self.comm.broadcast_object([*self._arrived, *late])
        if order == [number for bucket in self.buckets for number in bucket.members]:
            return
        before = [copied(view) for view in self.views]
        for slab in self._slabs.values():
            slab[...] = 0
        self._lay_out(order)
        for view, kept in zip(self.views, before):
            view[...] = kept
        self.moved()

    # -- a backward pass ------------------------------------------------------------------

    def ready(self, number: int) -> None:
        """Record that a gradient is complete: nothing will be added to it in this pass.

        Raises:
            GradientError: the gradient was ready already.
            CollectiveError: a reduction that this call has started failed.
        """
        if not self.begun:
            self._begin()
        if self._uses is not None and not self._reordered:
            self._uses[number] += 1
            if self._uses[number] == 1:
                self._arrived.append(number)
            return
        self._left[number] -= 1
        if self._left[number] > 0:
            return
        if self._left[number] < 0:
            name = self.parameters[number].name
            raise GradientError(
                f"gradients: {name} was ready twice in one backward pass. A parameter that is used "
                "in several such passes of one step (as with reentrant checkpoints) needs "
                "static_graph=True, or no_sync() around all passes but the last."
            )
        self._arrived.append(number)
        bucket = self._bucket_of[number]
        bucket.pending -= 1
        if not bucket.pending:
            self._launch(all_of_them=False)

    def missing(self) -> list[int]:
        """Return the numbers of the gradients that this pass still waits for.

        Outside a pass, these are the numbers of all gradients.
        """
        if not self.begun:
            return list(range(len(self.parameters)))
        if self._uses is not None and not self._reordered:
            return [number for number, count in enumerate(self._uses) if not count]
        return [number for number, left in enumerate(self._left) if left > 0]

    def finish(self, partial: bool = False) -> None:
        """Wait until all gradients are reduced. Every rank calls it after the same pass.

        Args:
            partial: whether further passes of this rank belong to the same reductions, so that
                ``reduce`` has sent nothing in this pass.

        Raises:
            GradientError: gradients are missing. The pass has ended on this rank all the same.
            CollectiveError: a reduction failed.
        """
        if not self.begun:
            self._begin()
        if self._uses is not None and not self._reordered:
            for number, count in enumerate(self._uses):
                if count:
                    self._left[number] = 0
                    self._bucket_of[number].pending -= 1
        missing = self.missing()
        if missing:
            self.drop()
            names = [self.parameters[number].name for number in missing]
            raise GradientError(
                "gradients: this backward pass computed no gradient for "
                f"{few(names)} [rank {self.comm.rank} of {self.comm.size}]. If a pass does not "
                "use all parameters, or if not all outputs go into the loss, pass "
                "find_unused_parameters=True. If parameters are never trained, set "
                "requires_grad=False."
            )
        self._conclude(partial)

    def shadow(self) -> None:
        """Take part, with zeros, in a pass that only other ranks compute."""
        if not self.begun:
            self._begin()
        for slab in self._slabs.values():
            slab[...] = 0
        for bucket in self.buckets:
            bucket.pending = 0
        self._conclude()

    def _conclude(self, partial: bool = False) -> None:
        try:
            with trace.span("finish gradients"):
                self._launch(all_of_them=True)
                for work in self._works:
                    work.wait()
        finally:
            self.begun = False
            self._works = []
        if partial:
            return
        if not self._reordered:
            self._reorder_buckets()
        trace.step("gradients")

    def drop(self) -> None:
        """Abandon a pass that has begun: wait for reductions in flight and start no others."""
        works, self._works, self.begun = self._works, [], False
        for work in works:
            work.wait()

    def _begin(self) -> None:
        self.begun = True
        self._arrived = []
        self._next = 0
        self._works = []
        known = self._uses is not None and self._reordered
        self._left = list(self._uses or ()) if known else [1] * len(self.parameters)
        if known:
            # A count is 0 if only other ranks computed the first pass, and this one called
            # shadow(). Then the gradient is expected once.
            self._left = [max(1, left) for left in self._left]
        elif self._uses is not None:
            self._uses = [0] * len(self.parameters)  # discard those of an abandoned pass
        for bucket in self.buckets:
            bucket.pending = len(bucket.members)

    def _launch(self, all_of_them: bool) -> None:
        """Start the reductions of full buckets, in order; the last one only if ``all_of_them``.

        Reductions start in the buckets' order, not in the order in which buckets are filled. The
        latter order may differ between ranks, but all ranks must make collective calls in the same
        order. So a full bucket waits for all earlier buckets.

        The caller that starts the last reduction waits for it anyway, so this reduction need not
        run in the background.
        """
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.pending or (bucket.is_last and not all_of_them):
                return
            self._next += 1
            with trace.span("bucket", index=bucket.index, parameters=len(bucket.members)):
                work = (self._reduce or self.average)(bucket)
            if work is not None:
                self._works.append(work)

    def average(self, bucket: Bucket) -> Work[Any] | None:
        """Start averaging a bucket over the ranks; the default ``reduce``."""
        array = bucket.array
        if bucket.is_last:
            self.comm.all_reduce(array, op="avg", out=array)
            return None
        work: Work[Any] = self.comm.all_reduce(array, op="avg", out=array, async_op=True)
        return work


def _overlaps(comm: Communicator, cores: int) -> bool:
    """Return whether the ranks have a network, a GPU or idle cores to reduce while they compute.

    Args:
        comm: the communicator.
        cores: number of cores that all ranks together may use, if they are on one host.
    """
    known = comm.capabilities
    if known.across_hosts or "cuda" in known.devices:
        return True
    return cores >= 2 * comm.size


def copied(array: Any) -> Any:
    """Return a copy of an array of any framework."""
    return array.clone() if hasattr(array, "clone") else array.copy()
