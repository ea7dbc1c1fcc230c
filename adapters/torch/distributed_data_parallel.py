"""Data-parallel training in several processes: one replica a rank, gradients averaged.

A hook starts the reduction of a bucket of gradients while the rest of the backward pass runs: as
soon as the bucket and all earlier ones are full. The last bucket is reduced at the end of the pass.
The parts that do not depend on PyTorch are in :mod:`collective.gradients`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from collective import (
    CommunicatorClosedError,
    GradientError,
    PeerLostError,
    Shards,
    UnsupportedError,
    current,
)
from collective.inner import (
    Bucket,
    Gradients,
    Parameter,
    ShardPasses,
    StateEntry,
    check_values,
    comm_or_current,
    refuses,
    shares,
)

from .dense import InBuckets, dense_weights, is_for
from .joining import Attendance
from .passes import BackwardPass, ForwardPass, Passes, leaves_behind, tensors_in, weakly
from .shard_loop import ShardLoop, generators_of, refuse_with_shards
from .sharded_optimizer import is_share
from .synchronous import all_reduce_sparse, broadcast_tensors, empty_sparse
from .wrapped import (
    Snapshot,
    announce,
    memory_order,
    refuse_max_norm,
    trained_parameters,
    with_prefix,
    without_prefix,
)

if TYPE_CHECKING:
    from collective import Communicator, Work

_MIB = 1 << 20
# What an error says of a rank that has ended its loop over the batches, and what it should say.
_UNEVEN = (
    "Is it inside `if rank == 0`?",
    "Do the ranks have different numbers of batches? Train inside `with model.join():`, or give "
    "all ranks as many by ShardedSampler(padded=True).",
)
_DIFFERENT = (
    "They were equal after the step before, or after the wrapper was made. Look for what this rank "
    "alone did to them: a write outside of the optimizer, a seed or a number of threads that "
    "depends on the rank, other libraries."
)
#: Arguments of PyTorch's own class, and what to write instead.
_TORCHS = {
    "batched_grad_copy": "leave it out: gradients are views of the buckets, and are rarely copied",
    "bucket_cap_mb": "use bucket_mib=",
    "bucket_cap_mb_list": "use bucket_mib=, one size for all buckets",
    "check_reduction": "leave it out: a reduction that fails raises",
    "delay_all_reduce_named_params": "it has no equivalent here",
    "device_ids": "leave it out, and move the module and its inputs to the device by to()",
    "device_mesh": "use comm=",
    "dim": "leave it out: each rank passes its own batch",
    "forward_sync_buffers": "use broadcast_buffers=",
    "gradient_as_bucket_view": "leave it out: gradients are always views of the buckets",
    "init_sync": "leave it out: rank 0's parameters always go to all ranks",
    "mixed_precision": "use torch.autocast, or reduce=collective.compression.Cast()",
    "output_device": "leave it out: outputs are where the module puts them",
    "param_to_hook_all_reduce": "it has no equivalent here",
    "process_group": "use comm=",
    "skip_all_reduce_unused_params": "it has no equivalent here; see find_unused_parameters=",
}


# Wrappers with check=True.
_CHECKED: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


@functools.cache
def _watch_steps() -> None:
    """Compare replicas after the steps of all optimizers from now on.

    The hook stays: its removal while another thread makes a step would be an error of that step.
    """

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for wrapper in list(_CHECKED):
            wrapper._compare(optimizer)

    register_optimizer_step_post_hook(stepped)


class DistributedDataParallel(nn.Module):
    """Wrapper of a module whose gradients are averaged over the ranks in each backward pass.

    Every rank makes the wrapper, with the same module. Rank 0 then sends its parameters and
    buffers to all other ranks. ``parameter.grad`` is a view of a bucket, in memory that the
    transport reduces without copies. If each rank has the same number of samples, the averaged
    gradient is that of the mean loss over all ranks' samples. All ranks get the same bits, so the
    replicas stay equal as long as their optimizers make the same steps.

    Parameters may change afterwards, if all ranks change them alike: frozen, unfrozen, replaced,
    added or removed parameters, or another dtype. The next forward pass whose gradients will be
    reduced then makes new buckets, and gives all ranks the values of rank 0.

    Forward and backward passes may come in any order, which must be the same on all ranks. A
    backward pass reduces the gradients if at least one of its forward passes ran outside of
    :meth:`no_sync`.

    ``state_dict()`` returns the state of the bare module. ``load_state_dict`` takes such a state,
    or a state with ``module.`` before each name, as PyTorch's own wrapper writes it.

    A single rank can copy the wrapper (``copy.deepcopy``, ``AveragedModel``) or pickle it
    (``torch.save``), without its gradients. A copy belongs to the same communicator. A loaded
    wrapper belongs to the communicator that is current when it trains (:func:`collective.init`). A
    copied or loaded wrapper begins to average gradients in its first forward pass outside of
    ``torch.no_grad()`` and :meth:`no_sync`. This first pass is collective: the ranks compare the
    parameters' shapes, but do not send their values. Without a communicator, a loaded wrapper
    computes the same as the bare module, until :meth:`rebind` gives it a communicator.

    Args:
        module: module on the CPU or a GPU, with all parameters on one device.
        comm: communicator that connects the ranks; None: the current communicator.
        bucket_mib: size of a bucket, the gradients that are reduced together, in MiB. If a core is
            idle to reduce it, the first bucket has at most 1 MiB, so that its reduction starts
            early.
        find_unused_parameters: if true, there may be passes in which the outputs, or the loss, do
            not depend on all parameters. If another rank has the gradient of a parameter, a
            missing gradient counts as zeros. If no rank has the gradient, it stays None.
        broadcast_buffers: if true, rank 0 sends its buffers (running statistics) to all ranks when
            the wrapper is made, and before each forward pass whose gradients will be reduced. If
            false, each rank keeps its own, from the beginning.
        static_graph: if true, every pass uses the same parameters, each of them equally often. A
            pass may then use a parameter several times, also in nested backward passes (reentrant
            checkpoints).
        reduce: function that reduces a full bucket, see
            :data:`collective.training.gradients.Reduce`; by default the average over the ranks.
        shards: number of virtual shards (:class:`collective.Shards`). Each step then makes one
            forward and backward pass for each shard of this rank, in the loop of
            :meth:`each_shard`, and the gradients are averaged over all shards. They have the same
            bits on any number of ranks. None: one pass a rank.
        check: if true, the ranks compare digests of their weights and of the optimizer's state
            after each step of an optimizer of PyTorch that has parameters of the module; with
            ``shards`` those of the buffers, too. Reading everything once a step costs time: it is
            for the search for the first step in which replicas differ. Within :meth:`join`, whose
            ranks make different steps, nothing is compared.

    Raises:
        MismatchError: the ranks' modules differ.
        UnsupportedError: ``shards`` with ``find_unused_parameters``, ``static_graph``, ``reduce``,
            sparse gradients, or a ``SyncBatchNorm`` or a ``Split`` in the module. Or an embedding
            with ``max_norm``, on several ranks or with ``shards``.
        InvalidArgumentError: no parameter requires a gradient, or the parameters are on several
            devices.

    See Also:
        torch.nn.parallel.DistributedDataParallel.
    """

    module: nn.Module
    comm: Communicator
    # Attributes that _connect() creates. A copy or a pickle has none of them.
    _of_connection = frozenset((
        "_attendance", "_gradients", "_hooks", "_in_buckets", "_loop", "_passes", "_snapshot",
        "_sparse", "_trained", "_written",
    ))  # fmt: skip

    @refuses(_TORCHS)
    def __init__(
        self,
        module: nn.Module,
        comm: Communicator | None = None,
        *,
        bucket_mib: float = 25.0,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        static_graph: bool = False,
        reduce: Callable[[Bucket], Work[Any] | None] | None = None,
        shards: int | None = None,
        check: bool = False,
    ) -> None:
        super().__init__()
        if shards is not None:
            refuse_with_shards(
                module, find_unused_parameters=find_unused_parameters, static_graph=static_graph,
                reduce=reduce is not None,
            )  # fmt: skip
        self.module = module
        self.comm = comm_or_current(comm, "DistributedDataParallel")
        if shards is not None or self.comm.size > 1:
            refuse_max_norm(module)
        self.find_unused_parameters = find_unused_parameters
        self.broadcast_buffers = broadcast_buffers
        self._static = static_graph
        self._bucket_bytes = max(1, int(bucket_mib * _MIB))
        self._reduce = reduce
        self._shards = shards
        self._check = check
        self._sync = True
        self._hooks: list[Any] = []
        self._connect()
        self._broadcast_state()
        untyped: Any = self
        untyped.register_state_dict_post_hook(without_prefix)
        untyped.register_load_state_dict_pre_hook(with_prefix)

    # The buckets outlive a caller's inference mode, in whose tensors no gradient may be written.
    @torch.inference_mode(False)
    def _connect(self) -> None:
        """Create the objects that reduce the gradients, over ``self.comm``. Collective."""
        module = self.module
        for hook in vars(self).get("_hooks", ()):  # of parameters that have changed
            hook.remove()
        named, self._sparse = trained_parameters(module)
        self._snapshot = Snapshot(module)
        self._trained = [parameter for _, parameter in named]
        passes = (
            None
            if self._shards is None
            else ShardPasses(self._shards, self.comm, generators_of(module))
        )
        self._gradients = Gradients(
            self.comm,
            [
                Parameter(n, tuple(p.shape), str(p.dtype).rpartition(".")[2], memory_order(p))
                for n, p in named
            ],
            like=next(module.parameters()).detach(),
            bucket_bytes=self._bucket_bytes,
            reduce=passes or self._reduce,
            counts=self._static,
        )
        self._loop = None
        if passes is not None:
            self._loop = ShardLoop(
                module, self._trained, self._gradients, passes, self._check
            )  # fmt: skip
        self._attendance: Attendance | None = None  # set within join()
        self._passes = self._new_passes()
        self._gradients.moved = weakly(self._point)
        dense = dense_weights(module, self._trained)
        self._in_buckets = InBuckets(dense, weakly(self._target)) if dense else None
        self._written: set[int] = set()  # gradients computed in their buckets, not yet arrived
        weak = weakref.ref(self)

        def arrived(number: int, parameter: nn.Parameter) -> None:
            wrapper = weak()
            if wrapper is not None:
                wrapper._arrived(number, parameter)

        hooks: list[tuple[Any, Any]]
        hooks = [(p, functools.partial(arrived, n)) for n, p in enumerate(self._trained)]
        hooks += [(parameter, weakly(self._sparse_arrived)) for parameter in self._sparse]
        self._hooks = [p.register_post_accumulate_grad_hook(hook) for p, hook in hooks]
        if self._check:
            _watch_steps()
            _CHECKED.add(self)
        self._connected = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module.

        Raises:
            GradientError: the previous backward pass did not finish; or, inside of :meth:`join`,
                the previous forward pass had no backward pass.
        """
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if not self._connected and not (self._sync and self._find_ranks()):
            return self.module(*args, **kwargs)
        # Within a backward pass, this call is a checkpoint that recomputes an earlier forward pass.
        if self._passes.under_way:
            return self.module(*args, **kwargs)
        self._refuse_broken()
        reduced = self._sync
        if self._loop is not None and not (reduced and self._loop.running):
            raise GradientError(
                "DistributedDataParallel: a pass with gradients outside of each_shard(), or in "
                f"no_sync() [rank {self.comm.rank} of {self.comm.size}]. With shards= make the "
                "passes in `for shard in model.each_shard():`."
            )
        if reduced and self._snapshot.differs():
            self._follow()
        if reduced and self._loop is None:
            root = 0
            if self._attendance is not None:
                self._attendance.forward()
                root = self._attendance.root
            if self.broadcast_buffers:
                broadcast_tensors(dict(self.module.named_buffers()), self.comm, root)
        with self._in_buckets or contextlib.nullcontext():
            outputs = self.module(*args, **kwargs)
        if self._loop is not None and self._snapshot.differs():
            self._follow()  # the pass has changed the parameters, which a loop refuses
        tensors = list(tensors_in(outputs))
        unused: Sequence[int] = ()
        if reduced and self.find_unused_parameters:
            used = leaves_behind(tensors)
            unused = [number for number, p in enumerate(self._trained) if p not in used]
            if len(unused) == len(self._trained) and not used.intersection(self._sparse):
                self._finish()  # this pass will not produce any gradient
            if self._static:
                unused = ()  # a static graph's first pass counts the uses of each parameter
        self._passes.add(tensors, reduced, unused)
        return outputs

    def _follow(self) -> None:
        """Train the parameters that the module has now.

        Collective, unless parameters have only been renamed.

        Raises:
            MismatchError: not all ranks have made the same changes; every rank raises it.
        """
        changes = self._snapshot.changes()
        if self._snapshot.replaced_for_a_call:
            return
        if changes and self._loop is not None and self._loop.running:
            self._loop.refuse(f"{changes[0]} in a loop of each_shard()")
        if changes:
            announce(self.comm, "DistributedDataParallel", changes)
        trained = {p for p in self.module.parameters() if p.requires_grad}
        known = {*self._trained, *self._sparse}
        # A model that is frozen for a pass, such as the critic in a step of the generator, has
        # nothing to reduce, and keeps its buckets.
        may_be_fewer = not trained or self.find_unused_parameters
        fits = trained <= known if may_be_fewer else trained == known
        if fits and self._snapshot.has_same_tensors:
            self._snapshot.take()
            return
        passes = self._passes
        self._connect()
        self._passes = passes  # backward passes of earlier forward passes may follow
        self._broadcast_state()

    def _broadcast_state(self, root: int = 0) -> None:
        """Give every rank the parameters of ``root``, and its buffers unless each has its own."""
        tensors = {name: p.detach() for name, p in self.module.named_parameters()}
        # The passes of shards begin with equal buffers.
        if self.broadcast_buffers or self._loop is not None:
            tensors.update(self.module.named_buffers())
        broadcast_tensors(tensors, self.comm, root)

    def rebind(self, comm: Communicator) -> None:
        """Continue over another communicator, such as that of the survivors after a loss.

        All gradients become None, and a pass in progress is discarded. Parameters and buffers are
        not sent: they have to be the same on all ranks already, as
        :class:`collective.elastic.State` makes them. A ``reduce`` function that reads ``self.comm``
        gets the new communicator. Each ``SyncBatchNorm`` in the module also continues over the new
        communicator.

        Collective: every rank of ``comm`` calls it.

        Raises:
            MismatchError: the ranks' modules differ.
        """
        self.comm = comm
        self._sync = True
        if self._connected and not self._snapshot.differs():
            self._attendance = None
            self._written.clear()
            self._passes = self._new_passes()
            self._gradients.rebind(comm)
        else:
            self._connect()
        for parameter in self.module.parameters():
            parameter.grad = None
        for each in self.module.modules():
            if isinstance(each, shares.Rebindable):
                each.rebind(comm)

    def _new_passes(self) -> Passes:
        return Passes(weakly(self._refuse_broken), weakly(self._reached), weakly(self._ended))

    @property
    def shards(self) -> Shards:
        """Division of the virtual shards among the ranks; only with ``shards=``."""
        return self._shard_loop().passes.shards

    def each_shard(self) -> Iterator[int]:
        """Yield this rank's virtual shards, one after the other; only with ``shards=``.

        The body makes one forward and one backward pass, with the samples of the shard
        (:class:`collective.ShardBatches`). A program with dropout seeds its generators first::

            for shard in model.each_shard():
                torch.manual_seed(model.shards.seed(shard, step))
                loss(model(x(shard)), y(shard)).backward()
            optimizer.step()

        At its end ``parameter.grad`` is the average over the shards of all ranks. Gradients of
        several loops add up until the program writes to the parameters or the gradients, as the
        step of an optimizer does. Each shard's pass begins with the same buffers (running
        statistics) and the same numbers in attributes of modules. Afterwards they are the average
        over the shards, too. Before each pass the global generators of Python, NumPy and PyTorch
        get a seed of the shard and the step; the loop restores their state at its end.

        Collective: every rank runs the loop to its end, including a rank without shards.

        Raises:
            GradientError: the body made no backward pass, or more than one.
            UnsupportedError: the wrapper was made without ``shards``, or a pass has written state
                that could carry over to the next shard.
        """
        self._shard_loop()  # connects a copy
        if self._snapshot.differs():
            self._follow()
        return iter(self._shard_loop())

    def _shard_loop(self) -> ShardLoop:
        if not self._connected:
            self._find_ranks()
        if self._loop is None:
            raise UnsupportedError(
                "DistributedDataParallel: this wrapper has no shards. Make it with shards=, such "
                "as DistributedDataParallel(module, shards=8)."
            )
        return self._loop

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up the gradients of forward passes in the body on this rank, without reducing them.

        Only the place of the forward pass matters; its backward pass may be inside or outside of
        the body. The next backward pass through a forward pass from outside the body reduces the
        sum.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @contextlib.contextmanager
    def join(self, by_all: bool = True) -> Iterator[None]:
        """Allow ranks to have different numbers of batches in the body, a loop over the batches.

        A rank whose body has ended takes part in the other ranks' passes, with gradients of zero,
        as long as a rank has batches. At the end all ranks get the parameters and buffers of a
        rank that was among the last to finish. Optimizers of ranks that finished earlier have made
        fewer steps.

        Collective: every rank enters the context. Inside, every forward pass whose gradients are
        reduced has one backward pass, before the next forward pass.

        Args:
            by_all: if true, averages are over all ranks, so that every sample has the same weight.
                If false, averages are over the ranks that still have batches. Zero the gradients
                between reduced passes: gradients that an earlier pass left would be averaged again,
                with the zeros of the ranks that have finished.

        Raises:
            GradientError: forward and backward passes came in another order.
            UnsupportedError: the wrapper has virtual shards.
        """
        if self._shards is not None:
            raise UnsupportedError(
                "DistributedDataParallel.join: not with shards=. All steps have the same number "
                "of shards, whatever the number of samples: see collective.ShardBatches."
            )
        if not self._connected and not self._find_ranks():
            yield
            return
        attendance = self._attendance = Attendance(self.comm, by_all)
        try:
            yield
            attendance.leave()
            for _ in attendance.rest():
                if self.broadcast_buffers:
                    buffers = dict(self.module.named_buffers())
                    broadcast_tensors(buffers, self.comm, attendance.root)
                self._gradients.shadow()
                self._reduce_sparse(absent=True)
                if self.find_unused_parameters:
                    self._agree_on_unused(range(len(self._trained)))
            self._broadcast_state(attendance.root)
        finally:
            self._attendance = None

    def _compare(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that all ranks have the same state after a step of an optimizer. Collective."""
        names = {p: name for name, p in self.module.named_parameters()}
        stepped = [p for group in optimizer.param_groups for p in group["params"] if p in names]
        if (
            not stepped
            or not self._connected
            or self._attendance is not None
            or is_share(optimizer)
        ):
            return
        entries = [StateEntry(name, p.detach(), p.requires_grad) for p, name in names.items()]
        if self._loop is not None:
            # Without shards each rank has the statistics of its own samples.
            entries += [StateEntry(n, b.detach()) for n, b in self.module.named_buffers()]
        entries += [
            StateEntry(f"{key} of {names[p]} in the optimizer's state", value)
            for p in stepped
            for key, value in optimizer.state.get(p, {}).items()
        ]
        check_values(self.comm, entries, _DIFFERENT, "DistributedDataParallel")

    # -- copies ---------------------------------------------------------------------------
    #
    # Connecting is collective, but often a single rank makes a copy, for a checkpoint or for
    # averaged weights. So a copy connects in the first forward pass that all ranks make.

    def _find_ranks(self) -> bool:
        """Connect a copy that is about to train.

        Returns:
            False if the copy is not connected: there is no communicator, or no parameter requires a
            gradient.
        """
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            return False
        if self.comm is None:
            try:
                self.comm = current()
            except CommunicatorClosedError:
                return False
        self._connect()
        return True

    def __copy__(self) -> Self:
        """Return a wrapper of the same module that shares all other attributes, too."""
        twin = self.__class__.__new__(self.__class__)
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin.comm = self.comm
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that are copied and pickled."""
        left_out = {"comm", *self._of_connection}
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        untyped: Any = super()
        untyped.__setstate__(state)
        self.comm = None  # type: ignore[assignment]  # the wrapper connects before any use
        self._connected = False
        self._sync = True

    # -- the backward pass ----------------------------------------------------------------

    def _refuse_broken(self) -> None:
        """Check that no earlier backward pass is unfinished."""
        if self._gradients.begun:
            self._gradients.drop()
            raise GradientError(
                "DistributedDataParallel: the previous backward pass did not finish "
                f"[rank {self.comm.rank} of {self.comm.size}]. Its gradients are invalid: call "
                "zero_grad(), and begin again with a forward pass, on all ranks."
            )

    def _reached(self, forward: ForwardPass, gradient: torch.Tensor) -> None:
        """Record that a backward pass has reached an output of a forward pass."""
        for number in self._passes.reach(forward):
            self._ready(number)

    def _target(self, number: int, node: Any) -> torch.Tensor | None:
        """Return the bucket's view for a gradient, if ``node`` computes the complete gradient.

        Only the first contribution gets the view. A second one, computed before the first has
        arrived, would overwrite it. Autograd adds up the contributions that do not get the view.
        A number that an unfinished pass has left in ``_written`` costs the next pass one copy of
        that parameter's gradient.
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
        """Move a gradient to its bucket if necessary; called when autograd has added to it."""
        view, grad = self._gradients.views[number], parameter.grad
        self._written.discard(number)
        if grad is not view:
            # The gradient was None, so autograd made a new tensor. Once `parameter.grad` is the
            # view, autograd adds to the view in place.
            assert grad is not None
            grad = grad.detach()
            if grad.layout is not torch.strided:
                grad = grad.to_dense()
            # The gradient of a large dense layer is already in the view's memory, as another
            # tensor (see dense.py).
            if grad.data_ptr() != view.data_ptr() or grad.stride() != view.stride():
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
        """Fill the bucket's view for a parameter that gets no gradient in this pass.

        The view gets the parameter's earlier gradient, or zeros if there is none.
        """
        view, parameter = self._gradients.views[number], self._trained[number]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view
        self._gradients.ready(number)

    def _ended(self, backward: BackwardPass) -> None:
        """Finish the reduction, unless the pass added to no gradient of this module.

        ``torch.autograd.grad`` of other tensors makes such passes.
        """
        if backward.reduced and backward.any_arrived:
            # Only the forward pass of this wrapper can follow a change.
            if backward.presumed and self._snapshot.differs():
                self._refuse_unknown()
            self._finish()

    def _refuse_unknown(self) -> None:
        """Check that each parameter that requires a gradient has a place in the buckets."""
        known = {*self._trained, *self._sparse}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and parameter not in known:
                error = GradientError(
                    f"DistributedDataParallel: {name} requires a gradient since the wrapper was "
                    "made or last called, and the pass did not go through the wrapper [rank "
                    f"{self.comm.rank} of {self.comm.size}]. Call the wrapper, and not the module, "
                    "or call rebind(comm) on all ranks after such a change."
                )
                self.comm.inner.fail(error)
                raise error

    def _finish(self) -> None:
        """Start the reductions that have not started yet, and wait for all of them."""
        if self._attendance is not None:
            self._attendance.backward()
        if self.find_unused_parameters:
            for number in self._gradients.missing():
                self._stand_in(number)
        try:
            self._gradients.finish(partial=self._loop is not None and self._loop.finish_pass())
        except PeerLostError as error:
            error.args = (error.args[0].replace(*_UNEVEN), *error.args[1:])
            raise
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
        """Average the sparse gradients, which are not in buckets."""
        for parameter in self._sparse:
            grad = None if absent else parameter.grad
            if grad is None:
                grad = empty_sparse(parameter.detach())
            reduced = all_reduce_sparse(grad, self.comm, "avg")
            if not absent:
                parameter.grad = reduced

    def _point(self) -> None:
        """Point the parameters' gradients at the buckets that the engine has laid out again."""
        for parameter, view in zip(self._trained, self._gradients.views):
            if parameter.grad is not None:
                parameter.grad = view

    def _agree_on_unused(self, unused: Collection[int]) -> list[bool]:
        """Return for each parameter whether it has a gradient on any rank."""
        used = [number not in unused for number in range(len(self._trained))]
        return [any(each) for each in zip(*self.comm.all_gather_object(used))]
