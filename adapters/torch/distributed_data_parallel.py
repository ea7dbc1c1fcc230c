"""Data-parallel training in several processes: one replica a rank, gradients averaged.

The reduction of a bucket of gradients starts from a hook as soon as the bucket is full, beside
the rest of the backward pass. What is not PyTorch's own is in :mod:`collective.gradients`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from collective.errors import GradientError
from collective.training.gradients import Bucket, Gradients, Parameter
from collective.training.rebinding import Rebindable

from .copying import Copyable
from .dense import InBuckets, dense_weights, is_for
from .joining import Attendance
from .passes import BackwardPass, ForwardPass, Passes, leaves_behind, tensors_in, weakly
from .synchronous import all_reduce_sparse, broadcast_state, broadcast_tensors, empty_sparse
from .wrapped import trained_parameters, with_prefix, without_prefix

if TYPE_CHECKING:
    from collective.communicator import Communicator
    from collective.contract.work import Work

__all__ = ["DistributedDataParallel"]

_MIB = 1 << 20


class DistributedDataParallel(Copyable):
    """A module whose gradients are averaged over the ranks in each backward pass.

    Every rank makes it, of the same module. Rank 0's parameters and buffers go to all others
    then. ``parameter.grad`` is a view of a bucket in memory that the transport reduces without
    copies. A gradient is averaged over the ranks, as if the loss were the mean over all their
    samples (if each rank has as many). Gradients become the same bits on all ranks, so that
    the replicas stay equal as long as the optimizers do the same.

    Forward and backward passes may come in any order; all ranks make the same. A backward pass
    reduces if one of the forward passes that it goes back through was outside of
    :meth:`no_sync`.

    ``state_dict()`` is that of the bare module; ``load_state_dict`` also takes one with
    ``module.`` before each name, as PyTorch's own wrapper writes it.

    It can be copied (``copy.deepcopy``, ``AveragedModel``) and pickled (``torch.save``), without
    gradients, by any rank alone. A copy belongs to the same communicator; one that has been loaded
    belongs to the communicator that is current when it trains (:func:`collective.init`). It
    averages gradients from its first forward pass on that is outside of ``torch.no_grad()`` and
    :meth:`no_sync`. That pass is collective: the ranks compare the parameters' shapes; their values
    are not sent. Without a communicator it computes what the bare module computes, until
    :meth:`rebind` gives it one.

    Args:
        module: on the CPU or a GPU; all of its parameters on one device. Freeze parameters
            before, not afterwards.
        comm: connects the ranks.
        bucket_mib: MiB of gradients that are reduced together; the first bucket is of 1 MiB
            at most, so that it is on its way early, where a core is idle to reduce it.
        find_unused_parameters: there are passes in which the outputs, or the loss, do not depend
            on all parameters. A gradient that does not come counts as zeros where another rank
            has one, and stays None where nobody has.
        broadcast_buffers: whether rank 0's buffers (running statistics) go to all ranks before
            each forward pass that is followed by a reduction.
        static_graph: the same parameters are used in every pass, equally often. Then they may
            be used several times, in nested backward passes (reentrant checkpoints).
        reduce: what to do with a full bucket, see :data:`collective.training.gradients.Reduce`; by
            default the average over the ranks.

    Raises:
        MismatchError: the ranks' modules differ.
        InvalidArgumentError: no parameter requires a gradient, or they are on several devices.

    See Also:
        torch.nn.parallel.DistributedDataParallel.
    """

    _of_connection = frozenset((
        "_attendance", "_gradients", "_in_buckets", "_passes", "_sparse", "_trained", "_written",
    ))  # fmt: skip

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        *,
        bucket_mib: float = 25.0,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        static_graph: bool = False,
        reduce: Callable[[Bucket], Work[Any] | None] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.comm = comm
        self.find_unused_parameters = find_unused_parameters
        self.broadcast_buffers = broadcast_buffers
        self._static = static_graph
        self._bucket_bytes = max(1, int(bucket_mib * _MIB))
        self._reduce = reduce
        self._sync = True
        self._connect()
        broadcast_state(module, comm)
        untyped: Any = self
        untyped.register_state_dict_post_hook(without_prefix)
        untyped.register_load_state_dict_pre_hook(with_prefix)

    def _connect(self) -> None:
        module = self.module
        named, self._sparse = trained_parameters(module)
        self._trained = [parameter for _, parameter in named]
        self._gradients = Gradients(
            self.comm,
            [Parameter(n, tuple(p.shape), str(p.dtype).rpartition(".")[2]) for n, p in named],
            like=next(module.parameters()).detach(),
            bucket_bytes=self._bucket_bytes,
            reduce=self._reduce,
            counts=self._static,
        )
        self._attendance: Attendance | None = None  # inside of join()
        self._passes = self._new_passes()
        self._gradients.moved = weakly(self._point)
        dense = dense_weights(module, self._trained)
        self._in_buckets = InBuckets(dense, weakly(self._target)) if dense else None
        self._written: set[int] = set()  # gradients in their place that have not arrived yet
        weak = weakref.ref(self)

        def arrived(number: int, parameter: nn.Parameter) -> None:
            found = weak()
            if found is not None:
                found._arrived(number, parameter)

        untyped: Any
        for number, untyped in enumerate(self._trained):
            untyped.register_post_accumulate_grad_hook(functools.partial(arrived, number))
        sparse_arrived = weakly(self._sparse_arrived)
        for untyped in self._sparse:
            untyped.register_post_accumulate_grad_hook(sparse_arrived)
        self._connected = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module.

        Raises:
            GradientError: the backward pass before broke off; or, inside of :meth:`join`, the
                forward pass before had none.
        """
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if not self._connected and not (self._sync and self._find_ranks()):
            return self.module(*args, **kwargs)
        # Within a backward pass a checkpoint computes once again what has been computed before.
        if self._passes.under_way:
            return self.module(*args, **kwargs)
        self._refuse_broken()
        reduced = self._sync
        if reduced:
            root = 0
            if self._attendance is not None:
                self._attendance.forward()
                root = self._attendance.root
            if self.broadcast_buffers:
                broadcast_tensors(list(self.module.buffers()), self.comm, root)
        with self._in_buckets or contextlib.nullcontext():
            outputs = self.module(*args, **kwargs)
        tensors = list(tensors_in(outputs))
        unused: Sequence[int] = ()
        if reduced and self.find_unused_parameters:
            used = leaves_behind(tensors)
            unused = [number for number, p in enumerate(self._trained) if p not in used]
            if len(unused) == len(self._trained) and not used.intersection(self._sparse):
                self._finish()  # no gradient will come
            if self._static:
                unused = ()  # what it uses is counted in its first pass
        self._passes.add(tensors, reduced, unused)
        return outputs

    def rebind(self, comm: Communicator) -> None:
        """Go on over another communicator, such as one of the ranks that are left after a loss.

        Gradients are None then, and a pass that was under way is forgotten. Parameters and buffers
        are not sent: they have to be the same on all ranks, as :class:`collective.elastic.State`
        makes them. A ``reduce`` function that looks for the communicator at ``self.comm`` finds
        this one. ``SyncBatchNorm`` in the module goes on over it, too.

        Collective: every rank of ``comm`` calls it.

        Raises:
            MismatchError: the ranks' modules differ.
        """
        self.comm = comm
        self._sync = True
        if self._connected:
            self._attendance = None
            self._written.clear()
            self._passes = self._new_passes()
            self._gradients.rebind(comm)
        else:
            self._connect()
        for parameter in self.module.parameters():
            parameter.grad = None
        for each in self.module.modules():
            if isinstance(each, Rebindable):
                each.rebind(comm)

    def _new_passes(self) -> Passes:
        return Passes(weakly(self._refuse_broken), weakly(self._reached), weakly(self._ended))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of the forward passes in the body add up on this rank alone.

        It is the forward pass that counts, wherever its backward pass is. The next backward pass
        through one from outside reduces the sum.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @contextlib.contextmanager
    def join(self, by_all: bool = True) -> Iterator[None]:
        """Let ranks have different numbers of batches in the body, a loop over them.

        A rank whose body has ended takes part, with gradients of zero, in the passes of those
        that still have batches. At the end all ranks get the state of one that was among the
        last; optimizers of others have made fewer steps.

        Collective: every rank enters it; inside, every forward pass whose gradients are
        reduced has one backward pass, before the next forward pass.

        Args:
            by_all: averages stay over all ranks, so that samples count alike; else they are
                over those that still have batches. Then gradients have to be zeroed between
                passes that are reduced: what one has left is averaged once more, with the zeros
                of those that are through.

        Raises:
            GradientError: passes came in another order.
        """
        if not self._connected and not self._find_ranks():
            yield
            return
        attendance = self._attendance = Attendance(self.comm, by_all)
        try:
            yield
            attendance.leave()
            for _ in attendance.rest():
                if self.broadcast_buffers:
                    broadcast_tensors(list(self.module.buffers()), self.comm, attendance.root)
                self._gradients.shadow()
                self._reduce_sparse(absent=True)
                if self.find_unused_parameters:
                    self._agree_on_unused(range(len(self._trained)))
            broadcast_state(self.module, self.comm, attendance.root)
        finally:
            self._attendance = None

    # -- the backward pass ----------------------------------------------------------------

    def _refuse_broken(self) -> None:
        """Refuse a pass while that before is half done."""
        if self._gradients.begun:
            self._gradients.drop()
            raise GradientError(
                "DistributedDataParallel: the backward pass before this pass did not come to its "
                f"end [rank {self.comm.rank} of {self.comm.size}]. Its gradients are void: call "
                "zero_grad(), and begin with a forward pass, on all ranks."
            )

    def _reached(self, forward: ForwardPass, gradient: torch.Tensor) -> None:
        """Take note that a backward pass comes by an output."""
        for number in self._passes.reach(forward):
            self._ready(number)

    def _target(self, number: int, node: Any) -> torch.Tensor | None:
        """Return where a gradient may be computed, if what is computed will be all of it.

        A second contribution before the first has arrived would be written over it; autograd adds
        up those that are not given a place. What a pass that broke off has left here costs the
        parameter one copy in the next one.
        """
        parameter = self._trained[number]
        untyped: Any = parameter
        if parameter.grad is not None or number in self._written or untyped._backward_hooks:
            return None
        if not is_for(node, parameter):
            return None
        self._written.add(number)
        view: torch.Tensor = self._gradients.views[number]
        return view

    def _arrived(self, number: int, parameter: nn.Parameter) -> None:
        """Have a gradient in its place; called when autograd has added to it."""
        view, grad = self._gradients.views[number], parameter.grad
        self._written.discard(number)
        if grad is not view:
            # Made anew, as it was None: autograd adds to it in its place from now on.
            assert grad is not None
            grad = grad.detach()
            if grad.layout is not torch.strided:
                grad = grad.to_dense()
            # Of a large dense layer it was computed in its place (dense.py), by another tensor.
            if grad.data_ptr() != view.data_ptr() or not grad.is_contiguous():
                view.copy_(grad)
            parameter.grad = view
        if self._passes.arrive(number, self._sync):
            self._ready(number)

    def _sparse_arrived(self, parameter: nn.Parameter) -> None:
        self._passes.arrive(None, self._sync)

    def _ready(self, number: int) -> None:
        if not self._gradients.begun and self.find_unused_parameters:
            for other in self._passes.unused():
                self._stand_in(other)
        self._gradients.ready(number)

    def _stand_in(self, number: int) -> None:
        """Have in its place what counts for a gradient that does not come in this pass."""
        view, parameter = self._gradients.views[number], self._trained[number]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view
        self._gradients.ready(number)

    def _ended(self, backward: BackwardPass) -> None:
        """Finish, unless the pass was ``torch.autograd.grad`` of something else."""
        if backward.reduced and backward.any_arrived:
            self._finish()

    def _finish(self) -> None:
        """Reduce what is not on its way yet, and wait."""
        if self._attendance is not None:
            self._attendance.backward()
        if self.find_unused_parameters:
            for number in self._gradients.missing():
                self._stand_in(number)
        self._gradients.finish()
        self._reduce_sparse()
        if self.find_unused_parameters:
            without = {n for n, p in enumerate(self._trained) if p.grad is None}
            used = self._agree_on_unused(without)
            for number in without:
                if used[number]:
                    self._trained[number].grad = self._gradients.views[number]
        if self._attendance is not None and self._attendance.factor != 1:
            for parameter in [*self._trained, *self._sparse]:
                if parameter.grad is not None:
                    parameter.grad.mul_(self._attendance.factor)

    def _reduce_sparse(self, absent: bool = False) -> None:
        """Average the gradients that are not in buckets, as they are sparse."""
        for parameter in self._sparse:
            grad = None if absent else parameter.grad
            if grad is None:
                grad = empty_sparse(parameter.detach())
            reduced = all_reduce_sparse(grad, self.comm, "avg")
            if not absent:
                parameter.grad = reduced

    def _point(self) -> None:
        """Have the parameters' gradients where the engine has laid them out anew."""
        for parameter, view in zip(self._trained, self._gradients.views):
            if parameter.grad is not None:
                parameter.grad = view

    def _agree_on_unused(self, unused: Collection[int]) -> list[bool]:
        """Return for each parameter whether it has a gradient on any rank."""
        used = [number not in unused for number in range(len(self._trained))]
        return [any(each) for each in zip(*self.comm.all_gather_object(used))]
