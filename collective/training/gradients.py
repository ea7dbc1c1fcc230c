"""Gradients of a data-parallel model: kept in buckets, reduced while others are still computed.

It knows no framework. An adapter tells it the parameters, lets gradients be written to the
arrays of :attr:`Gradients.views`, says which are :meth:`~Gradients.ready`, and calls
:meth:`~Gradients.finish` at the end of the backward pass. The bucketing is that of Li et al.,
"PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from collective import trace
from collective.contract.copying import NotCopied
from collective.errors import (
    CollectiveError,
    GradientError,
    InvalidArgumentError,
    MismatchError,
)
from collective.memory.dtypes import named

from .buckets import Bucket, Parameter, Reduce
from .rebinding import Rebindable

if TYPE_CHECKING:
    from collective.communicator import Communicator
    from collective.contract.work import Work

__all__ = ["Bucket", "Gradients", "Parameter", "Reduce"]

# Of the first bucket, in bytes.
_FIRST = 1 << 20
# Where a gradient begins in its bucket, in bytes: a line of the cache, for vector instructions.
_ALIGNMENT = 64


class Gradients(NotCopied):
    """The gradients of one model on one rank.

    Made by all ranks of the communicator, with the same parameters in the same order. A
    bucket is reduced as soon as it is full and those before it are on their way, so that all
    ranks reduce in one order whatever the order in which gradients arrive. After the first
    pass the buckets are laid out anew, once, in the order of arrival on rank 0.

    Args:
        comm: connects the ranks. Only :meth:`ready` and :meth:`finish` call it, in the thread
            that calls them.
        parameters: in the order in which gradients are expected to arrive.
        like: the framework of the memory; see :meth:`Communicator.empty`.
        bucket_bytes: how much is reduced together, about.
        first_bytes: the same for the first bucket, which shall be on its way early; at most
            ``bucket_bytes``. By default 1 MiB, and ``bucket_bytes`` where no core is idle that
            could reduce it meanwhile: ranks of one host with less than two cores each.
        reduce: what to do with a full bucket; by default the average over the ranks.
        counts: how often a gradient is ready in each pass, where that may differ from once
            and does not change: it is counted in the first pass, whose buckets are all
            reduced at its end.

    Attributes:
        views: the arrays for the gradients, by the parameters' numbers. They are replaced by
            others when the buckets are laid out anew: see ``moved``.
        moved: called with nothing when that has happened. What was in the old ``views`` has
            been copied to the new ones.
        begun: whether a backward pass has begun, by the first :meth:`ready`, and is not finished.

    Raises:
        MismatchError: the ranks' parameters differ.
        AllocationError: there is no memory for them, on any rank.
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
                raise InvalidArgumentError(f"Gradients: {name} {value!r}; a positive integer.")
        self.comm = comm
        self.parameters = list(parameters)
        self._reduce = reduce
        self.moved: Callable[[], object] = lambda: None
        self.views: list[Any] = [None] * len(self.parameters)
        self.buckets: list[Bucket] = []
        self._like = like
        self._bytes = first_bytes, bucket_bytes
        self._bucket_of: list[Bucket] = []
        self._counts: list[int] | None = [0] * len(self.parameters) if counts else None
        self._begin_over()
        self._arriving: trace.Interval | None = None

    def _begin_over(self) -> None:
        """Lay out the buckets over the communicator, as if there had been no pass."""
        overlaps = self._compare()
        first, limit = self._bytes
        if first is None:
            first = _FIRST if overlaps else limit
        self._limits = min(first, limit), limit
        self._slabs = self._allocate()
        self._settled = False
        if self._counts is not None:
            self._counts = [0] * len(self.parameters)
        self._lay_out(range(len(self.parameters)))
        self.begun = False
        self._arrived: list[int] = []
        self._left: list[int] = []
        self._next = 0
        self._works: list[Work[Any]] = []

    def rebind(self, comm: Communicator) -> None:
        """Go on over another communicator, with memory and buckets of its own.

        What the gradients were is lost: whoever has them takes :attr:`views` anew, and calls
        neither :meth:`ready` nor :meth:`finish` for a pass that had begun. A ``reduce`` with a
        method ``rebind`` gets a communicator of its own, too; another one has to look for it.

        Collective: every rank of ``comm`` calls it.

        Raises:
            MismatchError: the ranks' parameters differ.
        """
        self._trace_arrived()
        for work in self._works:
            with contextlib.suppress(CollectiveError):  # of the one before, which is broken
                work.wait()
        self.comm = comm
        if isinstance(self._reduce, Rebindable):
            self._reduce.rebind(comm.dup())
        self._begin_over()

    # -- memory ---------------------------------------------------------------------------

    def _compare(self) -> bool:
        """Refuse parameters that are not the same on all ranks.

        Returns:
            Whether all ranks have what reduces beside a backward pass: the same on all of them.
        """
        mine: list[Any] = [tuple(parameter) for parameter in self.parameters]
        found = self.comm.all_gather_object((mine, _overlaps(self.comm)))
        every = [theirs for theirs, _ in found]
        for rank, theirs in enumerate(every):
            if theirs == every[0]:
                continue
            if len(theirs) != len(every[0]):
                what = f"{len(theirs)} parameters, rank 0 has {len(every[0])}"
            else:
                differing = [(a, b) for a, b in zip(theirs, every[0]) if a != b]
                a, b = (Parameter(*one) for one in differing[0])
                what = (
                    f"{a.name} {a.dtype}{list(a.shape)}, rank 0 {b.name} {b.dtype}{list(b.shape)}"
                )
                what += f" and {len(differing) - 1} more" * (len(differing) > 1)
            raise MismatchError(
                f"gradients: the ranks' parameters differ: rank {rank} has {what} "
                f"[rank {self.comm.rank} of {self.comm.size}]. Make the same model on every rank, "
                "with the same parameters frozen."
            )
        return all(overlaps for _, overlaps in found)

    def _extents(self, number: int) -> tuple[int, int]:
        """Return how many elements a gradient has, and how many it takes in its bucket."""
        parameter = self.parameters[number]
        count, unit = math.prod(parameter.shape), _ALIGNMENT // named(parameter.dtype).itemsize
        return count, -(-count // unit) * unit

    def _allocate(self) -> dict[str, Any]:
        """Return one array for all gradients of each type."""
        lengths: dict[str, int] = {}
        for number, parameter in enumerate(self.parameters):
            lengths[parameter.dtype] = lengths.get(parameter.dtype, 0) + self._extents(number)[1]
        slabs = {}
        for dtype, length in lengths.items():
            slabs[dtype] = slab = self.comm.empty(length, dtype, like=self._like)
            # Also between the gradients: what fills a bucket up is reduced with it, and a `reduce`
            # that compresses looks at it.
            slab[...] = 0
        return slabs

    def _lay_out(self, order: Sequence[int]) -> None:
        """Lay out the buckets and the gradients in them in an order of arrival."""
        first, limit = self._limits
        used = dict.fromkeys(self._slabs, 0)
        open_: dict[str, list[int]] = {}
        taken = dict.fromkeys(self._slabs, 0)  # bytes of the open ones
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
                self.views[number] = slab[at : at + count].reshape(self.parameters[number].shape)
            views = [self.views[number] for number in members]
            last = index == len(closed) - 1
            bucket = Bucket(index, slab[start:stop], members, views, last)
            self.buckets.append(bucket)
            for number in members:
                self._bucket_of[number] = bucket

    def _settle(self) -> None:
        """Lay out the buckets in rank 0's order of arrival, if that is another one.

        Gradients arrive in about one order in all passes. A bucket of such as arrive one after the
        other is full early, and is reduced while later layers' gradients are still computed.
        """
        # One rank's for all: what arrives at one time may do so in another order elsewhere, and
        # buckets are folded elementwise.
        self._settled = True
        seen = set(self._arrived)
        late = [number for number in range(len(self.parameters)) if number not in seen]
        order: list[int] = self.comm.broadcast_object([*self._arrived, *late])
        if order == [number for bucket in self.buckets for number in bucket.members]:
            return
        before = [_copy(view) for view in self.views]
        for slab in self._slabs.values():
            slab[...] = 0
        self._lay_out(order)
        for view, kept in zip(self.views, before):
            view[...] = kept
        self.moved()

    # -- a backward pass ------------------------------------------------------------------

    def ready(self, number: int) -> None:
        """Take note that a gradient is in its place, and nothing will be added in this pass.

        Raises:
            GradientError: it was ready already.
            CollectiveError: of a reduction that it has started.
        """
        if not self.begun:
            self._begin()
        if self._counts is not None and not self._settled:
            self._counts[number] += 1
            if self._counts[number] == 1:
                self._arrived.append(number)
            return
        self._left[number] -= 1
        if self._left[number] > 0:
            return
        if self._left[number] < 0:
            name = self.parameters[number].name
            raise GradientError(
                f"gradients: that of {name} was ready twice in one backward pass. A parameter that "
                "is used in several such passes of one step (as with reentrant checkpoints) needs "
                "static_graph=True, or no_sync() around all but the last."
            )
        self._arrived.append(number)
        bucket = self._bucket_of[number]
        bucket.missing -= 1
        if not bucket.missing:
            self._launch(all_of_them=False)

    def missing(self) -> list[int]:
        """Return the numbers of the gradients that this pass, or else the next, waits for."""
        if not self.begun:
            return list(range(len(self.parameters)))
        if self._counts is not None and not self._settled:
            return [number for number, count in enumerate(self._counts) if not count]
        return [number for number, left in enumerate(self._left) if left > 0]

    def finish(self) -> None:
        """Wait until all gradients are reduced. Every rank calls it, after the same pass.

        Raises:
            GradientError: gradients are missing; the pass is over nevertheless, on this rank.
            CollectiveError: what went wrong in a reduction.
        """
        if not self.begun:
            self._begin()
        if self._counts is not None and not self._settled:
            for number, count in enumerate(self._counts):
                if count:
                    self._left[number] = 0
                    self._bucket_of[number].missing -= 1
        missing = self.missing()
        if missing:
            self.drop()
            names = [self.parameters[number].name for number in missing]
            listed = ", ".join(names[:10]) + f" and {len(names) - 10} more" * (len(names) > 10)
            raise GradientError(
                f"gradients: none came in this backward pass for {listed} [rank {self.comm.rank} "
                f"of {self.comm.size}]. If a pass does not use all parameters, or not all outputs "
                "go into the loss, pass find_unused_parameters=True; parameters that are never "
                "trained want requires_grad=False."
            )
        self._conclude()

    def shadow(self) -> None:
        """Take part, with zeros, in a pass that only other ranks make."""
        if not self.begun:
            self._begin()
        for slab in self._slabs.values():
            slab[...] = 0
        for bucket in self.buckets:
            bucket.missing = 0
        self._conclude()

    def _conclude(self) -> None:
        self._trace_arrived()
        try:
            with trace.span("finish gradients"):
                self._launch(all_of_them=True)
                for work in self._works:
                    work.wait()
        finally:
            self.begun = False
            self._works = []
        if not self._settled:
            self._settle()
        trace.step("gradients")

    def _trace_arrived(self) -> None:
        if self._arriving is not None:
            self._arriving.end()
            self._arriving = None

    def drop(self) -> None:
        """Give up a pass that has begun: what is on its way is waited for, and nothing begun."""
        self._trace_arrived()
        works, self._works, self.begun = self._works, [], False
        for work in works:
            work.wait()

    def _begin(self) -> None:
        self.begun = True
        # From the first gradient to the last: what of a backward pass is seen from here.
        self._arriving = trace.interval("backward")
        self._arrived = []
        self._next = 0
        self._works = []
        known = self._counts is not None and self._settled
        self._left = list(self._counts or ()) if known else [1] * len(self.parameters)
        if known:
            # None was counted where the first pass was other ranks' alone (shadow()).
            self._left = [max(1, left) for left in self._left]
        elif self._counts is not None:
            self._counts = [0] * len(self.parameters)  # a first pass that broke off has counted
        for bucket in self.buckets:
            bucket.missing = len(bucket.members)

    def _launch(self, all_of_them: bool) -> None:
        """Start the reductions of full buckets, in order; the last one only if ``all_of_them``.

        In the buckets' order, and not as they are full: that may be another one on each rank, and
        collective calls are made by all ranks in one order. A full one waits for those before it.

        Whoever starts the last waits for it anyway: it needs nobody in the background.
        """
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.missing or (bucket.is_last and not all_of_them):
                return
            self._next += 1
            with trace.span("bucket", index=bucket.index, parameters=len(bucket.members)):
                work = (self._reduce or self.average)(bucket)
            if work is not None:
                self._works.append(work)

    def average(self, bucket: Bucket) -> Work[Any] | None:
        """Start the average of a bucket over the ranks; the default ``reduce``."""
        array = bucket.array
        if bucket.is_last:
            self.comm.all_reduce(array, op="avg", out=array)
            return None
        work: Work[Any] = self.comm.all_reduce(array, op="avg", out=array, async_op=True)
        return work


def _overlaps(comm: Communicator) -> bool:
    """Tell whether this rank has a network, a GPU or a core that is idle while it computes."""
    known = comm.capabilities
    if known.across_hosts or "cuda" in known.devices:
        return True
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (cores or 1) >= 2 * comm.size


def _copy(array: Any) -> Any:
    """Return a copy of an array of any framework."""
    return array.clone() if hasattr(array, "clone") else array.copy()
